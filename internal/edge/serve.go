package edge

import (
	"context"
	"encoding/json"
	"io"
	"slices"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/capability"
)

// newServer serves the control plane's methods itself and relays those of guests.
func (e *Edge) newServer() *aether.Server {
	return aether.NewServer(aether.ServerConfig{
		Handlers: e.handlers(),
		Auth: func(_ context.Context, hello *msg.Hello) (any, error) {
			c, err := e.signer.Verify(hello.Token)
			if err != nil {
				return nil, err
			}
			return c, nil
		},
		Route:      e.route,
		Node:       e.id,
		Generation: e.epoch,
		Log:        func(event string, err error) { e.cfg.Log.Debug("aether: "+event, "err", err) },
	})
}

// handlers returns the control plane's methods.
func (e *Edge) handlers() map[string]aether.Handler {
	control := func(h aether.Handler) aether.Handler { // only for holders of a capability over the whole node
		return func(ctx context.Context, s *aether.Stream) (aether.Message, error) {
			c, ok := s.Principal().(capability.Claims)
			if !ok || c.Sandbox != capability.AnySandbox {
				return nil, errs.New(errs.MissingRight, "edge.auth", "the operation is for the control plane").With("right", string(v1.RightAdmin))
			}
			if err := c.Allows(capability.AnySandbox, v1.RightAdmin); err != nil {
				return nil, err
			}
			return h(ctx, s)
		}
	}
	return map[string]aether.Handler{
		"sandbox.create":      control(aether.Unary(e.serveCreate)),
		"sandbox.get":         control(aether.Unary(e.serveGet)),
		"sandbox.renew":       control(aether.Unary(e.serveRenew)),
		"sandbox.pause":       control(e.servePause),
		"sandbox.resume":      control(e.serveResume),
		"sandbox.hint":        control(aether.Unary(e.serveHint)),
		"sandbox.delete":      control(aether.Unary(e.serveDelete)),
		"sandbox.delete_many": control(e.serveDeleteMany),
		"sandbox.usage":       control(e.serveUsage),
		"sandbox.fork":        control(e.serveFork),
		"sandbox.snapshot":    control(e.serveSnapshot),
		"edge.watch":          control(e.serveWatch),
		"edge.audit":          control(aether.Unary(e.serveAudit)),
		"image.import":        control(e.serveImport),
		"image.pull":          control(e.servePull),
		"image.push":          control(e.servePush),
		"image.export":        control(e.serveExport),
		"image.delete":        control(aether.Unary(e.serveImageDelete)),
		"image.list":          control(aether.Unary(e.serveImageList)),
		"image.roots":         control(aether.Unary(e.serveImageRoots)),
		"image.cache":         control(aether.Unary(e.serveImageCache)),
		"image.warm":          control(e.serveImageWarm),
		"image.collapse":      control(e.serveImageCollapse),
		"image.evict":         control(aether.Unary(e.serveImageEvict)),
		"image.trim":          control(e.serveImageTrim),
	}
}

// route sends a guest's methods to the guest. It takes no lifecycle lock: a removal
// must never wait for the command that it ends.
func (e *Edge) route(ctx context.Context, principal any, open *msg.Open) (aether.Relay, error) {
	if open.Method != aether.MethodBatch && aether.GuestGroup(open.Method) == "" {
		return aether.Relay{}, nil
	}
	c, ok := principal.(capability.Claims)
	if !ok {
		return aether.Relay{}, errs.New(errs.BadToken, "edge.route", "no capability")
	}
	if err := c.Allows(open.Target, v1.RightSandbox); err != nil {
		return aether.Relay{}, err
	}
	s := e.get(open.Target)
	if s == nil {
		return aether.Relay{}, e.absent(open.Target)
	}
	return e.open(ctx, s, open)
}

func document(v any) (*msg.Document, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, "edge.encode", "answer", err)
	}
	return &msg.Document{Json: b}, nil
}

func (e *Edge) serveCreate(ctx context.Context, _ *aether.Stream, d *msg.Document) (*msg.Document, error) {
	var req v1.EdgeCreate
	if err := json.Unmarshal(d.Json, &req); err != nil {
		return nil, errs.Wrap(errs.BadRequest, "edge.create", "decode the request", err)
	}
	v, err := e.create(ctx, &req)
	if err != nil {
		return nil, err
	}
	return document(v)
}

func (e *Edge) serveGet(ctx context.Context, _ *aether.Stream, r *msg.SandboxRequest) (*msg.Document, error) {
	s := e.get(r.Id)
	if s == nil {
		return nil, e.absent(r.Id)
	}
	s.mu.Lock()
	v, instance := s.view, s.instance
	s.mu.Unlock()
	if s.image != nil {
		v.Layers = e.cfg.Images.Cache(s.image.Layers).Layers
	}
	if instance != nil {
		u, err := instance.Usage(ctx)
		if err == nil {
			s.fill(&u, e.cfg.Now())
			v.Usage = &u
		} else if live(s.snapshot().State) { // else it ended meanwhile
			return nil, err
		}
	}
	return document(v)
}

func (e *Edge) serveRenew(_ context.Context, _ *aether.Stream, r *msg.SandboxRequest) (*msg.Empty, error) {
	return &msg.Empty{}, e.renew(r.Id)
}

// serveDelete answers with the sandbox as it was last: whoever asked may forget it before
// its watch says how it ended.
func (e *Edge) serveDelete(ctx context.Context, _ *aether.Stream, r *msg.SandboxRequest) (*msg.Document, error) {
	s, err := e.remove(ctx, r.Id, v1.EndRequest)
	if err != nil {
		return nil, err
	}
	return document(s.snapshot())
}

// AuditReport is the answer of edge.audit.
type AuditReport struct {
	Node      v1.Node         `json:"node"`
	Counts    map[string]int  `json:"counts"`    // resources by kind
	Resources []AuditResource `json:"resources"` // all of them
	Orphans   []string        `json:"orphans"`   // ids that no record explains

	Reconciled Reconciled `json:"reconciled"`
}

// AuditResource is one object and its owner.
type AuditResource struct {
	Kind, Name, Sandbox string
}

func (e *Edge) serveAudit(ctx context.Context, _ *aether.Stream, _ *msg.Empty) (*msg.Document, error) {
	resources, orphans, err := e.Audit(ctx)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, "edge.audit", "count resources", err)
	}
	r := AuditReport{Node: e.Node(), Counts: map[string]int{}, Orphans: orphans, Reconciled: e.reconciler.counts()}
	for _, x := range resources {
		r.Counts[x.Kind]++
		r.Resources = append(r.Resources, AuditResource{x.Kind, x.Name, x.Sandbox})
	}
	return document(r)
}

const (
	watchBatch = 128       // sandboxes in one event
	watchBytes = 512 << 10 // of one event, to stay below a frame
	loadEvery  = 250 * time.Millisecond
	gather     = 10 * time.Millisecond
)

// serveWatch streams what changes on this edge until the watcher goes away.
func (e *Edge) serveWatch(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var req msg.EdgeWatchRequest
	if err := s.Parse(&req); err != nil {
		return nil, err
	}
	var send func(ev v1.EdgeEvent) error
	send = func(ev v1.EdgeEvent) error {
		d, err := document(ev)
		if err != nil {
			return err
		}
		if len(d.Json) <= watchBytes || len(ev.Sandboxes) < 2 {
			return s.SendMessage(ctx, d)
		}
		half := len(ev.Sandboxes) / 2
		rest := ev
		rest.Reset, rest.Node, rest.Sandboxes = false, nil, ev.Sandboxes[half:]
		ev.More, ev.Removed, ev.Sandboxes = true, nil, ev.Sandboxes[:half]
		if err := send(ev); err != nil {
			return err
		}
		return send(rest)
	}
	seq := req.From
	tick := time.NewTicker(loadEvery)
	defer tick.Stop()
	var last v1.Node
	var told time.Time
	for first := true; ; first = false {
		changes, now, wake, ok := e.feed.since(seq, watchBatch)
		if !ok || (first && req.From == 0) {
			var err error
			if seq, err = e.sendAll(send); err != nil {
				return nil, err
			}
			continue
		}
		if now := time.Now(); first || now.Sub(told) >= loadEvery {
			told = now
			if n := e.Node(); first || !sameLoad(n, last) {
				last = n
				if err := send(v1.EdgeEvent{Seq: seq, Node: &n}); err != nil {
					return nil, err
				}
			}
		}
		for len(changes) > 0 {
			if err := send(eventOf(changes, now)); err != nil {
				return nil, err
			}
			seq = now
			if changes, now, wake, ok = e.feed.since(seq, watchBatch); !ok {
				break
			}
		}
		if !ok {
			continue
		}
		select {
		case <-wake:
			// What comes at the same time goes in one message: at hundreds of changes a
			// second, a message for each would cost more than the rest of the watch.
			time.Sleep(gather)
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-e.stop:
			return nil, errs.New(errs.ShuttingDown, "edge.watch", "the node is stopping")
		}
	}
}

// sendAll sends everything the edge has and returns the number from which to go on.
func (e *Edge) sendAll(send func(v1.EdgeEvent) error) (uint64, error) {
	seq := e.feed.now() // changes from here on are sent again, which does no harm
	e.mu.Lock()
	all := make([]*sandbox, 0, len(e.sandboxes))
	for _, s := range e.sandboxes {
		all = append(all, s)
	}
	e.mu.Unlock()
	n := e.Node()
	ev := v1.EdgeEvent{Seq: seq, Reset: true, Node: &n}
	for i, s := range all {
		ev.Sandboxes = append(ev.Sandboxes, s.snapshot())
		if len(ev.Sandboxes) == watchBatch && i < len(all)-1 {
			ev.More = true
			if err := send(ev); err != nil {
				return 0, err
			}
			ev = v1.EdgeEvent{Seq: seq}
		}
	}
	return seq, send(ev)
}

func eventOf(changes []change, seq uint64) v1.EdgeEvent {
	ev := v1.EdgeEvent{Seq: seq}
	for _, c := range changes {
		if c.sandbox != nil {
			ev.Sandboxes = append(ev.Sandboxes, *c.sandbox)
		} else {
			ev.Removed = append(ev.Removed, c.removed)
		}
	}
	return ev
}

// sameLoad tells whether a watcher needs to hear of n after it heard of last. Free
// memory and disk always move a little.
func sameLoad(n, last v1.Node) bool {
	near := func(a, b int64) bool { return max(a-b, b-a) <= max(a, b)/64 }
	return n.Ready == last.Ready && n.Sandboxes == last.Sandboxes && n.Paused == last.Paused && n.Pressure == last.Pressure && n.Allocated == last.Allocated &&
		n.CreatesOK == last.CreatesOK && n.CreatesFail == last.CreatesFail && near(n.FreeDisk, last.FreeDisk) && near(n.FreeMemory, last.FreeMemory) &&
		near(n.Swap.UsedBytes, last.Swap.UsedBytes) && n.Swap.TotalBytes == last.Swap.TotalBytes
}

// serveImport reads an archive from the stream and makes an image of it.
func (e *Edge) serveImport(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var req msg.ImageImportRequest
	if err := s.Parse(&req); err != nil {
		return nil, err
	}
	ctx, end, tell := teller(ctx, s)
	defer end()
	img, err := e.cfg.Images.Import(ctx, &streamReader{ctx: ctx, s: s}, req.Format, tell)
	if err != nil {
		return nil, err
	}
	return document(img)
}

func (e *Edge) serveImageDelete(ctx context.Context, _ *aether.Stream, r *msg.ImageRequest) (*msg.Empty, error) {
	if users := e.usersOf(r.Digest); len(users) > 0 {
		return nil, v1.InUse("edge.image", "image", users)
	}
	return &msg.Empty{}, e.cfg.Images.Delete(ctx, r.Digest)
}

// usersOf lists the sandboxes that use an image, or a fork's that was made on it.
func (e *Edge) usersOf(digest string) (ids []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, s := range e.sandboxes {
		if s.packedOn == digest || s.image != nil && (slices.Contains(s.image.Digests(), digest) || slices.Contains(parentsOf(s.image), digest)) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func (e *Edge) serveImageList(ctx context.Context, s *aether.Stream, _ *msg.Empty) (*msg.Document, error) {
	list, err := e.cfg.Images.List(ctx)
	if err != nil {
		return nil, err
	}
	return inParts(ctx, s, list)
}

// streamReader reads a stream's data as bytes.
type streamReader struct {
	ctx  context.Context
	s    *aether.Stream
	rest []byte
}

func (r *streamReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		f, err := r.s.Recv(r.ctx)
		if err != nil {
			return 0, err
		}
		if f.IsMessage {
			return 0, errs.New(errs.ProtocolError, "edge.import", "a message where data belongs")
		}
		r.rest = f.Payload
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

var _ io.Reader = (*streamReader)(nil)
