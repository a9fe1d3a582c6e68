// Package backend holds the contract of what runs sandboxes. Its implementations are
// the packages beside it; backendtest is the one conformance suite that all pass.
//
// It must not know of HTTP, Aether methods or the control plane: an edge drives it.
package backend

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/image/layer"
	"dsec/internal/snapshot"
)

// Spec is one sandbox to run, with everything resolved.
type Spec struct {
	ID         string
	Generation uint64 // of the create; a name may never be reused by another generation
	Sandbox    v1.Spec
	SecretEnv  map[string]string // for Create: over the others', and kept nowhere
	Image      *v1.Image         // nil for backends that need none
	Paused     bool              // for Adopt: it is paused, and stays so
}

// Backend runs sandboxes of one kind on this node.
//
// Every resource it takes has a name derived from the sandbox id, so that Delete and
// List need no memory of what was made. All methods may be called at any time from
// several goroutines; calls for one id are serialised by the caller.
type Backend interface {
	Kind() v1.Backend

	// Check says whether this node can run this backend at all, by trying. The error
	// tells what is missing and how to get it.
	Check(ctx context.Context) error

	// Create makes and starts the sandbox that spec describes and returns once its
	// guest answers. It is idempotent for one (id, generation): a second call finds
	// what the first made. On error nothing of the sandbox is left (the audit checks).
	// report is told how long each step took.
	// Errors: errs.BadSpec, errs.NodeFull, errs.ImageNotFound, errs.ImageCorrupt,
	// errs.DiskFull; anything else is errs.InternalError, retryable elsewhere.
	Create(ctx context.Context, spec Spec, report StepReport) (Instance, error)

	// Adopt finds a sandbox that an earlier process of this edge created, by the handle
	// it left. errs.SandboxLost: it does not run any more; Delete then cleans up.
	Adopt(ctx context.Context, spec Spec, handle json.RawMessage) (Instance, error)

	// Delete ends the sandbox and removes all that its id names, whatever state it is
	// in, also if Create never finished or an edge died half-way. Deleting what does
	// not exist succeeds.
	Delete(ctx context.Context, id string) error

	// List returns the ids of all sandboxes of which anything is left on this node.
	List(ctx context.Context) ([]string, error)

	// Audit counts what the backend holds on this node, by kind of resource, for the
	// leak audit: names follow [Resource].
	Audit(ctx context.Context) ([]Resource, error)

	// Close releases what the process holds; sandboxes keep running.
	Close() error
}

// Instance is one running sandbox.
type Instance interface {
	ID() string

	// Handle is what Adopt needs, to be kept in the sandbox's record.
	Handle() json.RawMessage

	// DialGuest connects to the guest's channel.
	DialGuest(ctx context.Context) (net.Conn, error)

	// Done is closed when the sandbox has ended by itself (its guest died).
	Done() <-chan struct{}

	// Usage reads the sandbox's resource counters.
	Usage(ctx context.Context) (v1.Usage, error)
}

// Counter is implemented by instances whose Usage does more than to read counters.
type Counter interface {
	// Counters is Usage without DiskBytes. It is cheap, and may be asked of thousands.
	Counters(ctx context.Context) (v1.Usage, error)
}

// OOMCounter is implemented by instances of backends with a memory limit that kills.
type OOMCounter interface {
	// OOMKills counts the sandbox's processes that its memory limit has killed. It is cheap.
	OOMKills() (int64, error)
}

// MemoryCounter is implemented by instances that can tell how much memory they have (as in Usage) at little cost.
type MemoryCounter interface {
	MemoryBytes() (int64, error)
}

// OOMWatcher is implemented by backends that hear at once of what was killed for want of memory, with
// no work for sandboxes in which nothing was.
type OOMWatcher interface {
	// WatchOOM calls told for each process of a sandbox that was killed, one at a time, until ctx ends.
	WatchOOM(ctx context.Context, told func(OOMKill)) error
}

// OOMKill is one process that the kernel killed for want of memory, in a sandbox as it seems: the
// sandbox's count (OOMCounter) tells for sure.
type OOMKill struct {
	Sandbox     string // empty: something was killed of which no more is known; look at all
	Command     string
	PID         int // inside; 0: not known
	MemoryBytes int64
	Node        bool // the node ran out of memory, not the sandbox
}

// Pauser is implemented by instances that can stand still without memory. Its methods are called one at
// a time, and each may be repeated: pausing what is paused, and resuming what runs, succeeds at once.
type Pauser interface {
	// Pause lets all processes stand still and then moves their memory out; the sandbox's connections stay
	// open, unanswered. On error, and if ctx ends first, it runs as before. Errors: errs.SwapFull,
	// errs.StateConflict (a process would not stand still, retryable), errs.NotSupported (this node has no swap
	// or no freezer), errs.RequestCanceled.
	Pause(ctx context.Context) (Paused, error)
	// Resume lets them run again; what the guest needs to serve is back in memory first, and the rest is fetched
	// behind that. The caller has told the guest before, over a connection that it has, for how long they stood
	// still: it reads that before anything else. stood is the same for a backend whose guests' clocks stand still too.
	Resume(ctx context.Context, stood time.Duration) error
}

// Paused is what a Pause did.
type Paused struct {
	FreedBytes int64 // less memory in use than before
	SwapBytes  int64 // of it, in swap
}

// Packer is implemented by instances whose changes can be packed into a layer.
type Packer interface {
	// Pack writes what the sandbox changed of its image as one more layer. The sandbox
	// stands still for a part of that, a minute at most, and runs on whatever comes of it; of large
	// changes, most is read before. Errors: those of snapshot.Packing and freeze.Group.Freeze.
	Pack(ctx context.Context, o PackOptions) (layer.Result, snapshot.Manifest, error)
}

// PackOptions of a Pack.
type PackOptions struct {
	Data     layer.Blob
	Meta     io.Writer
	LeaveOut []string // patterns, as of snapshot.Options
	// Since and Next are those of snapshot.Options: with Since the layer has what changed
	// since that pack, and goes on top of its layer.
	Since, Next *snapshot.Seen
	Progress    func(bytes, entries int64)
	Times       *PackTimes // filled if set
}

// PackTimes is how long a Pack took of what.
type PackTimes struct {
	Frozen time.Duration // the longest time that the sandbox stood still
	Ahead  time.Duration // reading before that, while it ran
}

// StepReport is told the name and duration of each finished step.
type StepReport func(step string, took time.Duration)

// Resource is one kernel or disk object that belongs to a sandbox.
type Resource struct {
	Kind    string `json:"kind"`    // process, cgroup, mount, directory, socket, swap …
	Name    string `json:"name"`    // path, pid or number
	Sandbox string `json:"sandbox"` // owner; empty: shared by the node
}
