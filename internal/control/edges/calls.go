package edges

import (
	"context"
	"encoding/json"
	"errors"
	"io"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Create makes a sandbox and returns it once its guest answers.
func (p *Pool) Create(ctx context.Context, node v1.Node, req *v1.EdgeCreate) (v1.Sandbox, error) {
	raw, err := json.Marshal(req)
	if err != nil {
		return v1.Sandbox{}, errs.Wrap(errs.InternalError, "sandbox.create", "encode", err)
	}
	var sb v1.Sandbox
	err = p.document(ctx, node, req.ID, "sandbox.create", &msg.Document{Json: raw}, &sb)
	return sb, err
}

// Get returns a sandbox with its usage.
func (p *Pool) Get(ctx context.Context, node v1.Node, id string) (v1.Sandbox, error) {
	var sb v1.Sandbox
	err := p.document(ctx, node, id, "sandbox.get", &msg.SandboxRequest{Id: id}, &sb)
	return sb, err
}

// Renew says that a sandbox's owner is there.
func (p *Pool) Renew(ctx context.Context, node v1.Node, id string) error {
	c, err := p.Conn(ctx, node)
	if err != nil {
		return err
	}
	return answer(ctx, node, c.Call(ctx, "", "sandbox.renew", &msg.SandboxRequest{Id: id}, &msg.Empty{}))
}

// Delete removes a sandbox and returns it as it was last, once nothing of it is left.
func (p *Pool) Delete(ctx context.Context, node v1.Node, id string) (v1.Sandbox, error) {
	var sb v1.Sandbox
	err := p.document(ctx, node, id, "sandbox.delete", &msg.SandboxRequest{Id: id, Wait: true}, &sb)
	return sb, err
}

// Images returns the images that are present on an edge.
func (p *Pool) Images(ctx context.Context, node v1.Node) ([]v1.Image, error) {
	var list []v1.Image
	err := p.parts(ctx, node, "image.list", &msg.Empty{}, &list)
	return list, err
}

// DeleteImage removes an image from an edge; errs.ImageInUse.
func (p *Pool) DeleteImage(ctx context.Context, node v1.Node, digest string) error {
	c, err := p.Conn(ctx, node)
	if err != nil {
		return err
	}
	return answer(ctx, node, c.Call(ctx, "", "image.delete", &msg.ImageRequest{Digest: digest}, &msg.Empty{}))
}

// document calls a method that answers with a Document and decodes it into out. These
// methods are the edge's own: the sandbox is named in the request, never as the stream's
// target, which would send the stream on to the guest.
func (p *Pool) document(ctx context.Context, node v1.Node, sandbox, method string, req aether.Message, out any) error {
	c, err := p.Conn(ctx, node)
	if err != nil {
		return err
	}
	var doc msg.Document
	if err := answer(ctx, node, c.Call(ctx, "", method, req, &doc)); err != nil {
		return err
	}
	return parse(node, sandbox, method, &doc, out)
}

// parts calls a method whose answer may be longer than a message: documents whose JSON is
// one when it is joined.
func (p *Pool) parts(ctx context.Context, node v1.Node, method string, req aether.Message, out any) error {
	c, err := p.Conn(ctx, node)
	if err != nil {
		return err
	}
	s, err := c.Open(ctx, "", method, req)
	if err != nil {
		return err
	}
	defer s.Cancel()
	var all msg.Document
	for {
		f, err := s.Recv(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return answer(ctx, node, err)
		}
		if err := aether.JoinDocument(&all, f.Payload); err != nil {
			return err
		}
	}
	var last msg.Document
	if err := answer(ctx, node, s.Result(&last)); err != nil {
		return err
	}
	all.Json = append(all.Json, last.Json...)
	return parse(node, "", method, &all, out)
}

func parse(node v1.Node, sandbox, method string, doc *msg.Document, out any) error {
	if err := json.Unmarshal(doc.Json, out); err != nil {
		e := errs.New(errs.ProtocolError, method, "the edge's answer does not parse").Because(err)
		e.Node, e.Sandbox, e.Infra = node.ID, sandbox, true
		return e
	}
	return nil
}

// answer turns "canceled" by an edge that is going down into what it is for a caller who
// did not cancel.
func answer(ctx context.Context, node v1.Node, err error) error {
	if err == nil || ctx.Err() != nil || !errors.Is(err, errs.RequestCanceled) {
		return err
	}
	e := errs.New(errs.ConnectionLost, "edge.call", "the edge gave the operation up").Because(err)
	e.Node = node.ID
	return e
}

// Watch follows an edge (watcher.Source). from is the last sequence seen.
func (p *Pool) Watch(ctx context.Context, node v1.Node, from uint64, each func(v1.EdgeEvent) error) error {
	c, err := p.Conn(ctx, node)
	if err != nil {
		return err
	}
	s, err := c.Open(ctx, "", "edge.watch", &msg.EdgeWatchRequest{From: from})
	if err != nil {
		return err
	}
	defer s.Cancel()
	for {
		f, err := s.Recv(ctx)
		if errors.Is(err, io.EOF) {
			return errs.New(errs.ConnectionLost, "edge.watch", "the edge ended its watch")
		}
		if err != nil {
			return err
		}
		var doc msg.Document
		var ev v1.EdgeEvent
		if err := doc.ParseWire(f.Payload); err != nil {
			return err
		}
		if err := json.Unmarshal(doc.Json, &ev); err != nil {
			return errs.New(errs.ProtocolError, "edge.watch", "the edge's event does not parse").Because(err)
		}
		if err := each(ev); err != nil {
			return err
		}
	}
}

// Snapshot packs a sandbox into an image of its edge.
func (p *Pool) Snapshot(ctx context.Context, node v1.Node, req *v1.EdgeSnapshot, progress func(*msg.ImageProgress) error) (v1.Image, error) {
	return working[v1.Image](ctx, p, node, "sandbox.snapshot", req, progress)
}

// Collapse has an edge merge small layers of an image.
func (p *Pool) Collapse(ctx context.Context, node v1.Node, req *v1.EdgeCollapse, progress func(*msg.ImageProgress) error) (v1.Image, error) {
	return working[v1.Image](ctx, p, node, "image.collapse", req, progress)
}

// Pull has an edge make an image of a registry's.
func (p *Pool) Pull(ctx context.Context, node v1.Node, req *v1.RegistryRequest, progress func(*msg.ImageProgress) error) (v1.Image, error) {
	return working[v1.Image](ctx, p, node, "image.pull", req, progress)
}

// Push has an edge send an image to a registry.
func (p *Pool) Push(ctx context.Context, node v1.Node, req *v1.EdgePush, progress func(*msg.ImageProgress) error) (v1.Pushed, error) {
	return working[v1.Pushed](ctx, p, node, "image.push", req, progress)
}

// Export writes an image that an edge sends to w.
func (p *Pool) Export(ctx context.Context, node v1.Node, req *v1.EdgeExport, w io.Writer) error {
	s, err := p.open(ctx, node, "image.export", req)
	if err != nil {
		return err
	}
	defer s.Cancel()
	for {
		f, err := s.Recv(ctx)
		if errors.Is(err, io.EOF) {
			return answer(ctx, node, s.Result(&msg.Empty{}))
		}
		if err != nil {
			return answer(ctx, node, err)
		}
		if f.IsMessage {
			continue
		}
		if _, err := w.Write(f.Payload); err != nil {
			return err
		}
	}
}

// open begins a stream of the edge's own with a document.
func (p *Pool) open(ctx context.Context, node v1.Node, method string, req any) (*aether.Stream, error) {
	raw, err := json.Marshal(req)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, method, "encode", err)
	}
	c, err := p.Conn(ctx, node)
	if err != nil {
		return nil, err
	}
	return c.Open(ctx, "", method, &msg.Document{Json: raw})
}

// Fork makes children of a sandbox on its edge; each is told as it is made or has failed.
func (p *Pool) Fork(ctx context.Context, node v1.Node, req *v1.EdgeFork, each func(v1.CreateResult) error) error {
	return outcomes(ctx, p, node, "sandbox.fork", req, each)
}

// Pause pauses sandboxes of an edge; the outcome of each is told as it ends.
func (p *Pool) Pause(ctx context.Context, node v1.Node, ids []string, each func(v1.EdgePaused) error) error {
	return outcomes(ctx, p, node, "sandbox.pause", &v1.EdgePause{IDs: ids, Why: v1.PauseRequested}, each)
}

// Resume lets sandboxes of an edge run again; the outcome of each is told as it ends.
func (p *Pool) Resume(ctx context.Context, node v1.Node, ids []string, each func(v1.EdgePaused) error) error {
	return outcomes(ctx, p, node, "sandbox.resume", &v1.EdgePause{IDs: ids}, each)
}

// DeleteMany removes sandboxes of an edge; the outcome of each is told as it ends.
func (p *Pool) DeleteMany(ctx context.Context, node v1.Node, ids []string, each func(v1.EdgeDeleted) error) error {
	return outcomes(ctx, p, node, "sandbox.delete_many", &v1.EdgeDelete{IDs: ids}, each)
}

// Hint tells an edge when a sandbox will be used next.
func (p *Pool) Hint(ctx context.Context, node v1.Node, req *v1.EdgeHint) (v1.HintResult, error) {
	var r v1.HintResult
	doc, err := encode("sandbox.hint", req)
	if err == nil {
		err = p.document(ctx, node, req.ID, "sandbox.hint", doc, &r)
	}
	return r, err
}

// Usage returns what sandboxes of an edge use; without ids, what all do.
func (p *Pool) Usage(ctx context.Context, node v1.Node, ids []string) (v1.NodeUsage, error) {
	var u v1.NodeUsage
	doc, err := encode("sandbox.usage", &v1.EdgeUsage{IDs: ids})
	if err == nil {
		err = p.parts(ctx, node, "sandbox.usage", doc, &u)
	}
	return u, err
}

// outcomes calls a method that tells the outcome for each of several sandboxes.
func outcomes[T any](ctx context.Context, p *Pool, node v1.Node, method string, req any, each func(T) error) error {
	s, err := p.open(ctx, node, method, req)
	if err != nil {
		return err
	}
	defer s.Cancel()
	for {
		f, err := s.Recv(ctx)
		if errors.Is(err, io.EOF) {
			return answer(ctx, node, s.Result(&msg.Empty{}))
		}
		if err != nil {
			return answer(ctx, node, err)
		}
		var doc msg.Document
		var r T
		if err := doc.ParseWire(f.Payload); err != nil {
			return err
		}
		if err := json.Unmarshal(doc.Json, &r); err != nil {
			return errs.New(errs.ProtocolError, method, "the edge's answer does not parse").Because(err)
		}
		if err := each(r); err != nil {
			return err
		}
	}
}

// working calls a method that tells its progress and ends with a document.
func working[T any](ctx context.Context, p *Pool, node v1.Node, method string, req any, progress func(*msg.ImageProgress) error) (out T, err error) {
	s, err := p.open(ctx, node, method, req)
	if err != nil {
		return out, err
	}
	defer s.Cancel()
	return out, answer(ctx, node, receive(ctx, s, method, progress, &out))
}

const importChunk = 256 << 10

// Import sends an archive to an edge and returns the image that it made of it.
// interrupt makes a blocked read of body fail; it is called when the edge ends before
// the archive does.
func (p *Pool) Import(ctx context.Context, node v1.Node, req *msg.ImageImportRequest, body io.Reader, interrupt func(), progress func(*msg.ImageProgress) error) (v1.Image, error) {
	c, err := p.Conn(ctx, node)
	if err != nil {
		return v1.Image{}, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s, err := c.Open(ctx, "", "image.import", req)
	if err != nil {
		return v1.Image{}, err
	}
	defer s.Cancel()
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		if err := sendAll(ctx, s, body); err != nil {
			// The source broke off: the edge must not take what it has for the whole.
			cancel(err)
		}
	}()
	var image v1.Image
	err = receive(ctx, s, "image.import", progress, &image)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	interrupt()
	s.Cancel()
	<-sent
	return image, errs.Wrap(errs.InternalError, "image.import", "import", err)
}

// sendAll returns an error only if the source fails: if the stream does, its end says why.
func sendAll(ctx context.Context, s *aether.Stream, body io.Reader) error {
	buf := make([]byte, importChunk)
	for {
		n, err := body.Read(buf)
		if n > 0 && s.Send(ctx, aether.KindInput, buf[:n]) != nil {
			return nil
		}
		if err == io.EOF {
			// A failure to close shows at the receiving end, too.
			_ = s.CloseSend()
			return nil
		}
		if err != nil {
			var e *errs.Error // of who watches the upload
			if errors.As(err, &e) {
				return e
			}
			return errs.New(errs.ConnectionLost, "image.import", "the archive broke off").Because(err)
		}
	}
}

// receive reads progress, and then the answer into out.
func receive(ctx context.Context, s *aether.Stream, method string, progress func(*msg.ImageProgress) error, out any) error {
	for {
		f, err := s.Recv(ctx)
		if errors.Is(err, io.EOF) {
			var doc msg.Document
			if err := s.Result(&doc); err != nil {
				return err
			}
			return errs.Wrap(errs.ProtocolError, method, "the edge's answer does not parse", json.Unmarshal(doc.Json, out))
		}
		if err != nil {
			return err
		}
		if !f.IsMessage {
			continue
		}
		var m msg.ImageProgress
		if err := m.ParseWire(f.Payload); err != nil {
			return err
		}
		if err := progress(&m); err != nil {
			return err
		}
	}
}
