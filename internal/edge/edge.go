package edge

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"dsec/aether"
	v1 "dsec/api/v1"
	"dsec/internal/backend"
	"dsec/internal/capability"
	"dsec/internal/edge/pressure"
	"dsec/internal/swap"
)

// Cluster is what an edge needs from the control plane.
type Cluster interface {
	// AllocateEpoch returns the next epoch of a node that is above one it has had; no two
	// calls get the same.
	AllocateEpoch(ctx context.Context, nodeID string, above uint64) (uint64, error)
	// Register publishes the node until Withdraw.
	Register(ctx context.Context, node v1.Node) (Registration, error)
	// SigningKey is the key of capability tokens.
	SigningKey(ctx context.Context) ([]byte, error)
}

// Registration is a published node.
type Registration interface {
	Withdraw(ctx context.Context) error
	// Superseded is closed when a later epoch of this node was registered: this process
	// must stop serving.
	Superseded() <-chan struct{}
}

// Images is the node's image store.
type Images interface {
	// Import makes an image of the archive; format is one of the API's, or "auto".
	Import(ctx context.Context, archive io.Reader, format string, progress func(v1.ImageProgress)) (v1.Image, error)
	// Delete removes an image by digest.
	Delete(ctx context.Context, digest string) error
	List(ctx context.Context) ([]v1.Image, error)
	// Ready fails if the image cannot be run here: errs.ImageNotFound, ImageCorrupt (a
	// snapshot's layers are not on what they were made on).
	Ready(img *v1.Image) error
	// Has tells whether the image was made or used here, and not removed since.
	Has(digest string) bool
	// Pull makes an image of a registry's.
	Pull(ctx context.Context, req v1.RegistryRequest, progress func(v1.ImageProgress)) (v1.Image, error)
	// Push sends an image to a registry.
	Push(ctx context.Context, img *v1.Image, req v1.RegistryRequest, progress func(v1.ImageProgress)) (v1.Pushed, error)
	// Export writes an image in one of the API's formats.
	Export(ctx context.Context, img *v1.Image, format string, w io.Writer) error
	// Pack stores a snapshot: the layers of what it is made on and one more. Too long a
	// chain of layers is flattened. On error nothing is left.
	Pack(ctx context.Context, p Pack) (v1.Image, error)
	// Collapse merges neighbouring layers that are both smaller than below, if the image then
	// has at least so many less; otherwise it returns the image as it is. Name, digest and what
	// the image shows stay. What it replaces stays for as long as somebody may be told of it.
	Collapse(ctx context.Context, img *v1.Image, below int64, least int, progress func(v1.ImageProgress)) (v1.Image, error)
	// Roots are the layers of images made here that the catalogue may not have yet.
	Roots() ([]v1.Layer, error)
	// Cache says what is here; with layers, of these and no others.
	Cache(layers []v1.Layer) v1.ImageCache
	// Warm fetches what earlier starts of the image read, or all of it, and says whether
	// that is known.
	Warm(ctx context.Context, img *v1.Image, all bool, progress func(done, total int64)) (traced bool, err error)
	// Evict removes what is here of layers that are not in use, and counts those that are.
	Evict(layers []v1.Layer) (freed int64, inUse int, err error)
	// Trim removes what is here and not in use of all but some images and layers.
	Trim(keep v1.EdgeKeep) error
}

// Config of an Edge.
type Config struct {
	Dir       string // the edge's own state
	Listen    string // "unix:PATH" or "tcp:HOST:PORT"
	Hostname  string
	Version   string
	Backends  []backend.Backend
	Images    Images
	Cluster   Cluster
	Capacity  v1.Resources // of all sandboxes together, after overcommit
	Largest   v1.Resources // of one sandbox; 0: as Capacity
	Reserve   Reserve
	Costs     Costs // of pauses, where hints begin
	Swap      Swap  // of paused sandboxes; nil: nothing is told of it
	Log       *slog.Logger
	Now       func() time.Time
	Random    func() uint64 // of ids and secrets
	FreeSpace func() (disk, memory int64)
	// Memory reads how short of memory the machine is; nil: nobody is paused or evicted for that. The levels
	// are those of Reserve.
	Memory func() (pressure.Reading, error)
	// BusyTime is how long the machine's processors were busy since it started, together; nil: it is not told.
	BusyTime func() time.Duration
	// Shortage names what else of the machine has too little left for another sandbox, with what to do; "": nothing
	// has. It is asked at most ten times a second. nil: nothing else is looked at.
	Shortage func() (resource, text, advice string)
	BootID   string // changes when the machine starts: processes do not outlive it
	// AdoptTime is how long a sandbox that cannot be adopted at the start is tried again; 0: 30 s.
	AdoptTime time.Duration
	// ReconcileEvery is about how often records are compared with what is there; 0: 1 minute.
	ReconcileEvery time.Duration
}

// Swap tells where paused sandboxes' memory goes.
type Swap interface {
	Stat() v1.Swap
	// Devices are those that the node made.
	Devices() []swap.Device
}

// Reserve is what admission leaves free for the node itself, by looking at what really is free.
type Reserve struct {
	MemoryBytes int64
	DiskBytes   int64
}

// Edge runs the sandboxes of one node.
type Edge struct {
	cfg      Config
	id       string
	epoch    uint64
	anew     bool // the epoch began with this process: what ran before is gone
	started  time.Time
	address  string
	backends map[v1.Backend]backend.Backend
	usable   []v1.Backend
	journal  *journal
	admit    *admission
	pressure *pressure.Policy
	feed     *feed
	signer   *capability.Signer
	server   *aether.Server
	listener net.Listener
	reg      Registration
	stopping atomic.Bool
	stop     chan struct{}
	removing chan struct{} // holds one for each removal at work
	pausing  chan struct{} // holds one for each pause at work
	paused   atomic.Int64  // sandboxes
	merging  chan struct{} // holds one while an image's layers are merged
	wg       sync.WaitGroup

	createsOK, createsFailed atomic.Int64
	creates, moves           sync.WaitGroup // added to under mu, unless stopping

	usages     usages
	room       room
	costs      *costs
	reconciler *reconciler

	packMemory memory
	tempMu     sync.Mutex     // no image of a fork is removed while one is taken into use
	temps      map[string]int // forks under way, by their image's digest

	meters     map[string]metered // of an earlier process, until its sandboxes are there
	metersKept bool               // the file has some; of the one that writes it

	mu        sync.Mutex
	sandboxes map[string]*sandbox
	past      Totals            // of sandboxes that are gone
	keys      map[string]string // idempotency key → id, of live sandboxes
}

// Node describes this edge and its load.
func (e *Edge) Node() v1.Node {
	e.mu.Lock()
	n := int64(len(e.sandboxes))
	e.mu.Unlock()
	disk, memory := e.admit.freeSpace()
	var swap v1.Swap
	if e.cfg.Swap != nil {
		swap = e.cfg.Swap.Stat()
	}
	return v1.Node{
		ID: e.id, Epoch: e.epoch, Address: e.address, Hostname: e.cfg.Hostname, Version: e.cfg.Version, Backends: e.usable,
		StartedAt: e.started, Ready: !e.stopping.Load(), Capacity: e.cfg.Capacity, Largest: e.cfg.Largest, Allocated: e.admit.allocated(),
		FreeDisk: disk, FreeMemory: memory, Sandboxes: n, Paused: e.paused.Load(), Swap: swap, CreatesOK: e.createsOK.Load(), CreatesFail: e.createsFailed.Load(), Pressure: e.pressure.Level().String(),
	}
}

// ID is the node's id.
func (e *Edge) ID() string { return e.id }

// Address is where the edge listens, in the form of Config.Listen.
func (e *Edge) Address() string { return e.address }

// Done is closed when the edge stopped serving, by Close or because another process
// registered this node.
func (e *Edge) Done() <-chan struct{} { return e.stop }

func (e *Edge) get(id string) *sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sandboxes[id]
}

// Close stops serving and lets go of the sandboxes, which keep running for the next
// start to adopt. Creates that are under way are undone.
func (e *Edge) Close(ctx context.Context) error {
	if e.stopping.Swap(true) {
		return nil
	}
	if e.reg != nil {
		if err := e.reg.Withdraw(ctx); err != nil {
			e.cfg.Log.Warn("withdraw registration", "err", err)
		}
	}
	e.endCreates(ctx)
	close(e.stop)
	e.mu.Lock()
	for _, s := range e.sandboxes {
		s.stop() // no sandbox stays frozen for a pack, and a pause that is not done is undone
	}
	e.mu.Unlock()
	waitFor(ctx, &e.moves, func() {
		e.cfg.Log.Error("pauses and resumes have not ended yet; the next start lets their sandboxes run")
	})
	if e.server != nil {
		if err := e.server.Shutdown(ctx); err != nil {
			e.cfg.Log.Warn("operations that had not ended are cut off", "err", err)
		}
	}
	e.wg.Wait()
	e.saveMeters()
	e.mu.Lock()
	for _, s := range e.sandboxes {
		s.unlimit()
		s.release(nil)
	}
	e.mu.Unlock()
	if e.journal != nil {
		return e.journal.close()
	}
	return nil
}

// endCreates undoes what is being created and waits for that, so that the journal knows.
func (e *Edge) endCreates(ctx context.Context) {
	e.mu.Lock()
	for _, s := range e.sandboxes {
		if s.snapshot().State == v1.StateCreating {
			s.cancel()
		}
	}
	e.mu.Unlock()
	waitFor(ctx, &e.creates, func() { e.cfg.Log.Error("creates are not undone yet; the next start does it") })
}

// waitFor waits for wg, or for the end of ctx, which is late then.
func waitFor(ctx context.Context, wg *sync.WaitGroup, late func()) {
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		late()
	}
}

// Audit lists everything that belongs to sandboxes on this node, and the ids that no
// record explains.
func (e *Edge) Audit(ctx context.Context) (resources []backend.Resource, orphans []string, err error) {
	for _, b := range e.backends {
		r, err := b.Audit(ctx)
		if err != nil {
			return nil, nil, err
		}
		resources = append(resources, r...)
	}
	if e.cfg.Swap != nil {
		for _, d := range e.cfg.Swap.Devices() {
			resources = append(resources, backend.Resource{Kind: "swap", Name: d.Path})
		}
	}
	var ids []string
	for _, r := range resources {
		if r.Sandbox != "" {
			ids = append(ids, r.Sandbox)
		}
	}
	return resources, e.unexplained(ids), nil
}

func readBootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(b), err
}

func (e *Edge) path(name string) string { return filepath.Join(e.cfg.Dir, name) }
