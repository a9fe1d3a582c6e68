package controltest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/capability"
	"dsec/internal/control/store"
)

// Config of a fake edge. The zero value of each field but Store has a default.
type Config struct {
	Store interface {
		store.Nodes
		store.Keys
	}
	ID       string       // node id of v1.NodeIDLen characters; "fakeaa"
	Backends []v1.Backend // container and hollow
	Capacity v1.Resources // 10000 slots
	Images   []v1.Image   // present at the start
	Stubborn bool         // creates are finished even if they were canceled meanwhile
}

// Edge is a fake edge.
type Edge struct {
	cfg    Config
	tb     testing.TB
	node   v1.Node
	path   string
	signer *capability.Signer
	reg    store.Registration

	mu        sync.Mutex
	server    *aether.Server
	stop      context.CancelFunc
	served    chan struct{}
	onCreate  func(context.Context, *v1.EdgeCreate) error
	onEach    func(ctx context.Context, method string, n int) error
	asks      []Ask
	onExport  func(context.Context, *aether.Stream, *v1.Image) error
	onImport  func(context.Context, *aether.Stream, *msg.ImageImportRequest) (v1.Image, error)
	sandboxes map[string]*v1.Sandbox
	creating  map[string]chan struct{} // closed when the create is over
	removed   map[string]bool
	images    map[string]v1.Image
	roots     []v1.Layer
	kept      *v1.EdgeKeep
	seq       uint64
	log       []v1.EdgeEvent // since the start; seq of log[i] is i+1 (0 is the empty start)
	changed   chan struct{}
	creates   int
	renewals  int
	requests  []string // request ids seen
}

// Start registers and serves a fake edge until the test ends.
func Start(tb testing.TB, cfg Config) *Edge {
	tb.Helper()
	if cfg.ID == "" {
		cfg.ID = "fakeaa"
	}
	if cfg.Backends == nil {
		cfg.Backends = []v1.Backend{v1.BackendContainer, v1.BackendHollow}
	}
	if cfg.Capacity == (v1.Resources{}) {
		cfg.Capacity.Slots = 10000
	}
	e := &Edge{
		cfg: cfg, tb: tb, sandboxes: map[string]*v1.Sandbox{}, creating: map[string]chan struct{}{}, removed: map[string]bool{},
		images: map[string]v1.Image{}, changed: make(chan struct{}),
	}
	for _, img := range cfg.Images {
		e.images[img.Digest] = img
	}
	ctx := context.Background()
	key, err := cfg.Store.SigningKey(ctx)
	if err != nil {
		tb.Fatal(err)
	}
	if e.signer, err = capability.NewSigner(key, nil); err != nil {
		tb.Fatal(err)
	}
	epoch, err := cfg.Store.AllocateEpoch(ctx, cfg.ID, 0)
	if err != nil {
		tb.Fatal(err)
	}
	// Not tb.TempDir: its path can be too long for a socket.
	dir, err := os.MkdirTemp("", "edge")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { os.RemoveAll(dir) })
	e.path = filepath.Join(dir, "s")
	e.node = v1.Node{
		ID: cfg.ID, Epoch: epoch, Address: "unix:" + e.path, Hostname: "fake", Version: "test", Backends: cfg.Backends,
		StartedAt: time.Now().UTC(), Ready: true, Capacity: cfg.Capacity,
	}
	e.Serve()
	tb.Cleanup(e.Stop)
	e.Register()
	tb.Cleanup(e.Withdraw)
	return e
}

// Node returns the edge's registration.
func (e *Edge) Node() v1.Node { return e.node }

// Register publishes the edge (Start does).
func (e *Edge) Register() {
	reg, err := e.cfg.Store.Register(context.Background(), e.node)
	if err != nil {
		e.tb.Error(err)
		return
	}
	e.reg = reg
}

// Withdraw ends the edge's registration; it goes on serving.
func (e *Edge) Withdraw() {
	if e.reg != nil {
		// The store may be closed by now.
		_ = e.reg.Withdraw(context.Background())
	}
}

// Serve starts answering on the socket (Start does).
func (e *Edge) Serve() {
	l, err := net.Listen("unix", e.path)
	if err != nil {
		e.tb.Error(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	srv := aether.NewServer(aether.ServerConfig{
		Node: e.node.ID, Generation: e.node.Epoch, Auth: e.auth,
		Handlers: map[string]aether.Handler{
			"sandbox.create":      aether.Unary(e.create),
			"sandbox.get":         aether.Unary(e.get),
			"sandbox.renew":       aether.Unary(e.renew),
			"sandbox.delete":      aether.Unary(e.delete),
			"sandbox.delete_many": e.deleteMany,
			"sandbox.pause":       e.pause,
			"sandbox.resume":      e.resume,
			"sandbox.hint":        aether.Unary(e.hint),
			"sandbox.usage":       aether.Unary(e.usage),
			"edge.watch":          e.watch,
			"image.import":        e.imageImport,
			"image.export":        e.imageExport,
			"image.delete":        aether.Unary(e.imageDelete),
			"image.list":          aether.Unary(e.imageList),
			"image.roots":         aether.Unary(e.imageRoots),
			"image.cache":         aether.Unary(e.imageCache),
			"image.warm":          e.imageWarm,
			"image.collapse":      e.imageCollapse,
			"image.evict":         aether.Unary(e.imageEvict),
			"image.trim":          aether.Unary(e.imageTrim),
			"process.exec":        aether.Unary(e.exec),
			"process.start":       e.start,
		},
	})
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := srv.Serve(ctx, l); err != nil {
			e.tb.Errorf("fake edge: %v", err)
		}
	}()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.server, e.stop, e.served = srv, cancel, served
}

// Stop breaks all connections and answers nobody until Serve.
func (e *Edge) Stop() {
	e.mu.Lock()
	srv, stop, served := e.server, e.stop, e.served
	e.server = nil
	e.mu.Unlock()
	if srv == nil {
		return
	}
	stop()
	srv.Close()
	<-served
}

// OnCreate is asked before each create; its error is the create's.
func (e *Edge) OnCreate(f func(context.Context, *v1.EdgeCreate) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.onCreate = f
}

// Ask is one call for several sandboxes.
type Ask struct {
	Method string
	IDs    []string
}

// Asks returns the calls for several sandboxes, in order.
func (e *Edge) Asks() []Ask {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.asks)
}

// OnEach is asked before the nth outcome of a call for several sandboxes; its error ends the call.
func (e *Edge) OnEach(f func(ctx context.Context, method string, n int) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.onEach = f
}

// Need makes the edge say that it needs layers.
func (e *Edge) Need(layers ...v1.Layer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.roots = layers
}

// Kept is what the edge was told last to keep; nil: nothing was said.
func (e *Edge) Kept() *v1.EdgeKeep {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.kept
}

// OnImport replaces what an import does.
func (e *Edge) OnImport(f func(context.Context, *aether.Stream, *msg.ImageImportRequest) (v1.Image, error)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.onImport = f
}

// OnExport says what an export sends; without it there is nothing to export.
func (e *Edge) OnExport(f func(context.Context, *aether.Stream, *v1.Image) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.onExport = f
}

// Sandboxes returns what exists on the edge.
func (e *Edge) Sandboxes() []v1.Sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.all()
}

func (e *Edge) all() []v1.Sandbox {
	out := make([]v1.Sandbox, 0, len(e.sandboxes))
	for _, sb := range e.sandboxes {
		out = append(out, *sb)
	}
	slices.SortFunc(out, func(a, b v1.Sandbox) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return out
}

// Creates counts the creates that reached the edge.
func (e *Edge) Creates() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.creates
}

// Requests returns the request ids of the operations seen, in order.
func (e *Edge) Requests() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.requests)
}

// Set changes a sandbox as the edge would by itself, and tells the watch.
func (e *Edge) Set(id string, change func(*v1.Sandbox)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	sb := *e.sandboxes[id]
	sb.Generation++
	change(&sb)
	e.sandboxes[id] = &sb
	e.emit(v1.EdgeEvent{Sandboxes: []v1.Sandbox{sb}})
}

func (e *Edge) emit(ev v1.EdgeEvent) {
	e.seq++
	ev.Seq = e.seq
	e.log = append(e.log, ev)
	close(e.changed)
	e.changed = make(chan struct{})
}

func (e *Edge) auth(_ context.Context, hello *msg.Hello) (any, error) {
	claims, err := e.signer.Verify(hello.Token)
	if err != nil {
		return nil, err
	}
	return claims, nil
}

// WantEmpty waits until the edge holds nothing.
func (e *Edge) WantEmpty(tb testing.TB) {
	tb.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		left := e.Sandboxes()
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			tb.Fatalf("%d sandboxes left on the edge, the first is %s", len(left), left[0].ID)
		}
	}
}

var errNotHere = errors.New("not on this edge")

func (e *Edge) missing(id string) error {
	code := errs.SandboxNotFound
	if e.removed[id] {
		code = errs.SandboxGone
	}
	err := errs.New(code, "edge", fmt.Sprintf("no sandbox %s", id)).Because(errNotHere)
	err.Sandbox, err.Node = id, e.node.ID
	return err
}
