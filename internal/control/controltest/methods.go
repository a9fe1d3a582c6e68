package controltest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

func document(v any) (*msg.Document, error) {
	raw, err := json.Marshal(v)
	return &msg.Document{Json: raw}, err
}

func (e *Edge) create(ctx context.Context, s *aether.Stream, doc *msg.Document) (*msg.Document, error) {
	var req v1.EdgeCreate
	if err := json.Unmarshal(doc.Json, &req); err != nil {
		return nil, errs.New(errs.BadRequest, "edge.create", "not an EdgeCreate").Because(err)
	}
	if node, epoch, err := v1.ParseSandboxID(req.ID); err != nil || node != e.node.ID || epoch != e.node.Epoch {
		return nil, errs.New(errs.BadRequest, "edge.create", "the id "+req.ID+" is not of this edge and epoch")
	}
	start := time.Now()
	e.mu.Lock()
	e.creates++
	e.requests = append(e.requests, s.RequestID())
	hook := e.onCreate
	over := make(chan struct{})
	e.creating[req.ID] = over
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.creating, req.ID)
		close(over)
	}()
	if hook != nil {
		if err := hook(ctx, &req); err != nil {
			return nil, err
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if n := int64(len(e.sandboxes)); n >= e.cfg.Capacity.Slots {
		return nil, errs.New(errs.NodeFull, "edge.admit", "all slots are taken").With("resource", "slots").
			With("capacity", fmt.Sprint(e.cfg.Capacity.Slots)).With("used", fmt.Sprint(n)).After(2 * time.Second)
	}
	if ctx.Err() != nil && !e.cfg.Stubborn { // as a real edge: undone
		return nil, ctx.Err()
	}
	started := time.Now().UTC()
	sb := &v1.Sandbox{
		ID: req.ID, Generation: 2, State: v1.StateRunning, Node: e.node.ID, Spec: req.Spec, CreatedAt: start.UTC(), StartedAt: &started,
		CreateMS: float64(time.Since(start).Microseconds()) / 1000, IdempotencyKey: req.IdempotencyKey,
	}
	if req.Image != nil {
		sb.ImageDigest = req.Image.Digest
	}
	e.sandboxes[req.ID] = sb
	e.emit(v1.EdgeEvent{Sandboxes: []v1.Sandbox{*sb}})
	return document(sb)
}

func (e *Edge) get(_ context.Context, _ *aether.Stream, req *msg.SandboxRequest) (*msg.Document, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb := e.sandboxes[req.Id]
	if sb == nil {
		return nil, e.missing(req.Id)
	}
	with := *sb
	with.Usage = &v1.Usage{CPUSeconds: 0.5, MemoryBytes: 1 << 20, Processes: 1}
	return document(with)
}

func (e *Edge) renew(_ context.Context, _ *aether.Stream, req *msg.SandboxRequest) (*msg.Empty, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sandboxes[req.Id] == nil {
		return nil, e.missing(req.Id)
	}
	e.renewals++
	return &msg.Empty{}, nil
}

// Renewals says how many leases were renewed.
func (e *Edge) Renewals() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.renewals
}

func (e *Edge) delete(_ context.Context, _ *aether.Stream, req *msg.SandboxRequest) (*msg.Document, error) {
	last, err := e.drop(req.Id)
	if err != nil {
		return nil, err
	}
	return document(last)
}

func (e *Edge) drop(id string) (v1.Sandbox, error) {
	e.mu.Lock()
	if over := e.creating[id]; over != nil { // one operation at a time for an id
		e.mu.Unlock()
		<-over
		e.mu.Lock()
	}
	defer e.mu.Unlock()
	sb := e.sandboxes[id]
	if sb == nil {
		return v1.Sandbox{}, e.missing(id)
	}
	last := *sb
	last.State, last.EndReason = v1.StateStopping, v1.EndRequest
	last.Generation++
	delete(e.sandboxes, id)
	e.removed[id] = true
	e.emit(v1.EdgeEvent{Removed: []string{id}})
	return last, nil
}

func (e *Edge) deleteMany(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.EdgeDelete](s)
	if err != nil {
		return nil, err
	}
	return e.each(ctx, s, "sandbox.delete_many", req.IDs, func(id string) any {
		r := v1.EdgeDeleted{DeleteResult: v1.DeleteResult{ID: id}}
		last, err := e.drop(id)
		if err == nil {
			r.Sandbox = &last
		}
		r.Error = v1.ProblemOf(err)
		return r
	})
}

func (e *Edge) pause(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.EdgePause](s)
	if err != nil {
		return nil, err
	}
	return e.each(ctx, s, "sandbox.pause", req.IDs, func(id string) any { return e.turn(id, v1.StatePaused) })
}

func (e *Edge) resume(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.EdgePause](s)
	if err != nil {
		return nil, err
	}
	return e.each(ctx, s, "sandbox.resume", req.IDs, func(id string) any { return e.turn(id, v1.StateRunning) })
}

// Freed is what a pause of a fake edge's sandbox frees.
const Freed = 64 << 20

// turn takes a sandbox from running to paused, or back.
func (e *Edge) turn(id string, to v1.State) v1.EdgePaused {
	e.mu.Lock()
	defer e.mu.Unlock()
	r := v1.EdgePaused{PauseResult: v1.PauseResult{ID: id, TookMS: 1}}
	old := e.sandboxes[id]
	switch {
	case old == nil:
		r.Error = v1.ProblemOf(e.missing(id))
		return r
	case old.State != v1.StateRunning && old.State != v1.StatePaused:
		r.Error = v1.ProblemOf(errs.New(errs.StateConflict, "edge.pause", "the sandbox is "+string(old.State)).With("state", string(old.State)))
		return r
	}
	sb := *old
	if r.State, r.Sandbox = to, &sb; sb.State == to {
		return r
	}
	r.Changed = true
	sb.State, sb.PausedAt, sb.PauseReason = to, nil, ""
	sb.Generation++
	if to == v1.StatePaused {
		now := time.Now().UTC()
		sb.PausedAt, sb.PauseReason = &now, v1.PauseRequested
		sb.Pauses++
		r.FreedBytes = Freed
	}
	e.sandboxes[id] = &sb
	e.emit(v1.EdgeEvent{Sandboxes: []v1.Sandbox{sb}})
	return r
}

// each tells an outcome for each id, as far as OnEach lets it.
func (e *Edge) each(ctx context.Context, s *aether.Stream, method string, ids []string, do func(id string) any) (aether.Message, error) {
	e.mu.Lock()
	e.asks = append(e.asks, Ask{Method: method, IDs: ids})
	hook := e.onEach
	e.mu.Unlock()
	for n, id := range ids {
		if hook != nil {
			if err := hook(ctx, method, n); err != nil {
				return nil, err
			}
		}
		doc, err := document(do(id))
		if err != nil {
			return nil, err
		}
		if err := s.SendMessage(ctx, doc); err != nil {
			return nil, err
		}
	}
	return &msg.Empty{}, nil
}

// hint pauses what will not be used for a minute.
func (e *Edge) hint(_ context.Context, _ *aether.Stream, doc *msg.Document) (*msg.Document, error) {
	var req v1.EdgeHint
	if err := json.Unmarshal(doc.Json, &req); err != nil {
		return nil, err
	}
	r := v1.HintResult{ID: req.ID, Action: "keep", HoldCost: float64(req.NextCall), MoveCost: 60, MemoryBytes: Freed, Why: "it is a fake edge"}
	e.mu.Lock()
	sb := e.sandboxes[req.ID]
	if sb == nil {
		defer e.mu.Unlock()
		return nil, e.missing(req.ID)
	}
	e.mu.Unlock()
	r.Sandbox = sb
	if r.HoldCost > r.MoveCost {
		r.Action, r.Sandbox = "pause", e.turn(req.ID, v1.StatePaused).Sandbox
	}
	return document(r)
}

func (e *Edge) usage(_ context.Context, _ *aether.Stream, doc *msg.Document) (*msg.Document, error) {
	var req v1.EdgeUsage
	if err := json.Unmarshal(doc.Json, &req); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asks = append(e.asks, Ask{Method: "sandbox.usage", IDs: req.IDs})
	ids := req.IDs
	if len(ids) == 0 {
		for id := range e.sandboxes {
			ids = append(ids, id)
		}
	}
	u := v1.NodeUsage{At: time.Now().UTC(), CPUMillis: 2000, CPUSeconds: 7, MemoryBytes: 24 << 30}
	for _, id := range ids {
		it := v1.SandboxUsage{ID: id}
		if sb := e.sandboxes[id]; sb != nil {
			it.State, it.Usage = sb.State, &v1.Usage{CPUSeconds: 0.5, MemoryBytes: 1 << 20, Processes: 1}
		} else {
			it.Error = v1.ProblemOf(e.missing(id))
		}
		u.Items = append(u.Items, it)
	}
	return document(u)
}

func asked[T any](s *aether.Stream) (req T, err error) {
	var doc msg.Document
	if err := s.Parse(&doc); err != nil {
		return req, err
	}
	return req, json.Unmarshal(doc.Json, &req)
}

func (e *Edge) watch(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var req msg.EdgeWatchRequest
	if err := s.Parse(&req); err != nil {
		return nil, err
	}
	e.mu.Lock()
	next := req.From
	var first *v1.EdgeEvent
	if req.From == 0 || req.From > e.seq {
		node := e.node
		first = &v1.EdgeEvent{Seq: e.seq, Reset: true, Sandboxes: e.all(), Node: &node}
		next = e.seq
	}
	e.mu.Unlock()
	if first != nil {
		if err := sendParts(ctx, s, *first); err != nil {
			return nil, err
		}
	}
	for {
		e.mu.Lock()
		events, changed := e.log[next:], e.changed
		e.mu.Unlock()
		for i := range events {
			if err := send(ctx, s, &events[i]); err != nil {
				return nil, err
			}
			next = events[i].Seq
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-changed:
		}
	}
}

// sendParts sends a Reset three sandboxes at a time, as a real edge does with more.
func sendParts(ctx context.Context, s *aether.Stream, ev v1.EdgeEvent) error {
	const part = 3
	for len(ev.Sandboxes) > part {
		head := ev
		head.Sandboxes, head.More = ev.Sandboxes[:part], true
		if err := send(ctx, s, &head); err != nil {
			return err
		}
		ev.Reset, ev.Node, ev.Sandboxes = false, nil, ev.Sandboxes[part:]
	}
	return send(ctx, s, &ev)
}

func send(ctx context.Context, s *aether.Stream, ev *v1.EdgeEvent) error {
	doc, err := document(ev)
	if err != nil {
		return err
	}
	return s.SendMessage(ctx, doc)
}

func (e *Edge) imageImport(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var req msg.ImageImportRequest
	if err := s.Parse(&req); err != nil {
		return nil, err
	}
	e.mu.Lock()
	f := e.onImport
	e.mu.Unlock()
	if f == nil {
		f = hashImport
	}
	image, err := f(ctx, s, &req)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.images[image.Digest] = image
	return document(image)
}

// hashImport takes any bytes for an image, named by their digest.
func hashImport(ctx context.Context, s *aether.Stream, _ *msg.ImageImportRequest) (v1.Image, error) {
	h, total := sha256.New(), uint64(0)
	for {
		f, err := s.Recv(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return v1.Image{}, err
		}
		h.Write(f.Payload)
		total += uint64(len(f.Payload))
		if err := s.SendMessage(ctx, &msg.ImageProgress{Phase: "receive", Done: total}); err != nil {
			return v1.Image{}, err
		}
	}
	return v1.Image{Digest: "sha256:" + hex.EncodeToString(h.Sum(nil)), Bytes: int64(total), CreatedAt: time.Now().UTC(), Layers: []v1.Layer{}}, nil
}

func (e *Edge) imageExport(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var doc msg.Document
	var ask v1.EdgeExport
	if err := s.Parse(&doc); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(doc.Json, &ask); err != nil {
		return nil, err
	}
	e.mu.Lock()
	f := e.onExport
	e.mu.Unlock()
	if f == nil {
		return nil, errs.New(errs.ImageNotFound, "edge.image", "no image "+ask.Image.Digest)
	}
	if err := f(ctx, s, &ask.Image); err != nil {
		return nil, err
	}
	return &msg.Empty{}, nil
}

func (e *Edge) imageDelete(_ context.Context, _ *aether.Stream, req *msg.ImageRequest) (*msg.Empty, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, ok := e.images[req.Digest]; !ok {
		return nil, errs.New(errs.ImageNotFound, "edge.image", "no image "+req.Digest)
	}
	for _, sb := range e.sandboxes {
		if sb.ImageDigest == req.Digest {
			return nil, errs.New(errs.ImageInUse, "edge.image", "sandbox "+sb.ID+" uses it")
		}
	}
	delete(e.images, req.Digest)
	return &msg.Empty{}, nil
}

func (e *Edge) imageList(context.Context, *aether.Stream, *msg.Empty) (*msg.Document, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := make([]v1.Image, 0, len(e.images))
	for _, img := range e.images {
		list = append(list, img)
	}
	return document(list)
}

// exec is the guests' only operation: it answers with its arguments and input.
func (e *Edge) exec(_ context.Context, s *aether.Stream, req *msg.ExecRequest) (*msg.ExecResult, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.requests = append(e.requests, s.RequestID())
	if e.sandboxes[s.Target()] == nil {
		return nil, e.missing(s.Target())
	}
	out := append([]byte(nil), req.Stdin...)
	if req.Start != nil {
		out = append(out, strings.Join(req.Start.Args, " ")...)
	}
	return &msg.ExecResult{Exit: &msg.Exit{Exited: true, StdoutBytes: uint64(len(out))}, Stdout: out, Pid: 1}, nil
}

func (e *Edge) imageRoots(context.Context, *aether.Stream, *msg.Empty) (*msg.Document, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return document(e.roots)
}

func (e *Edge) imageCache(context.Context, *aether.Stream, *msg.Empty) (*msg.Document, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := v1.ImageCache{Node: e.node.ID, Mode: "fanotify"}
	for _, img := range e.images {
		for _, l := range img.Layers {
			c.Layers = append(c.Layers, v1.LayerCache{MetaDigest: l.MetaDigest, CachedBytes: 100})
		}
	}
	return document(c)
}

func (e *Edge) imageWarm(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var doc msg.Document
	var req v1.EdgeWarm
	if err := s.Parse(&doc); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(doc.Json, &req); err != nil {
		return nil, err
	}
	if err := s.SendMessage(ctx, &msg.ImageProgress{Done: 1, Total: 2}); err != nil {
		return nil, err
	}
	return document(v1.WarmProgress{Node: e.node.ID, Done: 2, Total: 2, Trace: !req.All, End: true})
}

// imageCollapse merges all layers that snapshots made into one.
func (e *Edge) imageCollapse(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var doc msg.Document
	var req v1.EdgeCollapse
	if err := s.Parse(&doc); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(doc.Json, &req); err != nil {
		return nil, err
	}
	if err := s.SendMessage(ctx, &msg.ImageProgress{Phase: "merge", Done: 1, Total: 2}); err != nil {
		return nil, err
	}
	img := req.Image
	n := slices.IndexFunc(img.Layers, func(l v1.Layer) bool { return l.Kind == v1.KindDiff })
	if n < 0 || len(img.Layers)-n-1 < max(1, req.Least) {
		return document(img)
	}
	img.Made = img.Layers
	img.Layers = append(slices.Clone(img.Layers[:n]), v1.Layer{Kind: v1.KindDiff, MetaDigest: "merged", MetaBytes: req.Below})
	return document(img)
}

func (e *Edge) imageEvict(_ context.Context, _ *aether.Stream, d *msg.Document) (*msg.Document, error) {
	var layers []v1.Layer
	if err := json.Unmarshal(d.Json, &layers); err != nil {
		return nil, err
	}
	return document(v1.EvictReport{Node: e.node.ID, FreedBytes: 100 * int64(len(layers))})
}

func (e *Edge) imageTrim(_ context.Context, _ *aether.Stream, d *msg.Document) (*msg.Empty, error) {
	var keep v1.EdgeKeep
	if err := json.Unmarshal(d.Json, &keep); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.kept = &keep
	return &msg.Empty{}, nil
}

// start is a process that says that it runs and goes on until its caller goes away.
func (e *Edge) start(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	if err := s.SendMessage(ctx, &msg.ProcessStarted{Pid: 1}); err != nil {
		return nil, err
	}
	<-ctx.Done()
	return nil, ctx.Err()
}
