package serve

import (
	"context"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
	"dsec/internal/guest/file"
	"dsec/internal/guest/port"
	"dsec/internal/guest/proc"
	"dsec/internal/guest/session"
)

// Config is what the guest is made of.
type Config struct {
	Procs    *proc.Table
	Sessions *session.Table
	Files    *file.FS
	Version  string
	User     string // the sandbox's default user, for guest.info
	Cwd      string
}

// Guest serves the methods of one sandbox.
type Guest struct {
	Config
	started time.Time
	last    atomic.Int64 // when the last operation began, for tidy
	armed   atomic.Bool

	collected atomic.Bool // there was a garbage collection

	open atomic.Int32 // operations under way
}

// New returns a guest.
func New(cfg Config) *Guest {
	g := &Guest{Config: cfg, started: time.Now()}
	runtime.AddCleanup(new([64]byte), func(b *atomic.Bool) { b.Store(true) }, &g.collected)
	return g
}

// Handlers returns the guest's methods.
func (g *Guest) Handlers() map[string]aether.Handler {
	m := map[string]aether.Handler{
		"process.exec":        aether.Unary(g.processExec),
		"process.start":       g.processStart,
		"process.attach":      g.processAttach,
		"process.list":        aether.Unary(g.processList),
		"process.input":       aether.Unary(g.processInput),
		"process.close_stdin": aether.Unary(g.processCloseStdin),
		"process.signal":      aether.Unary(g.processSignal),
		"process.resize":      aether.Unary(g.processResize),
		"process.wait":        aether.Unary(g.processWait),

		"session.open":  aether.Unary(g.sessionOpen),
		"session.run":   g.sessionRun,
		"session.exec":  aether.Unary(g.sessionExec),
		"session.close": aether.Unary(g.sessionClose),
		"session.list":  aether.Unary(g.sessionList),

		"file.stat":   aether.Unary(g.fileStat),
		"file.list":   aether.Unary(g.fileList),
		"file.mkdir":  aether.Unary(g.fileMkdir),
		"file.move":   aether.Unary(g.fileMove),
		"file.remove": aether.Unary(g.fileRemove),
		"file.chmod":  aether.Unary(g.fileChmod),
		"file.chown":  aether.Unary(g.fileChown),
		"file.get":    aether.Unary(g.fileGet),
		"file.put":    aether.Unary(g.filePut),
		"file.read":   g.fileRead,
		"file.write":  g.fileWrite,
		"file.pack":   g.filePack,
		"file.unpack": g.fileUnpack,
		"file.watch":  g.fileWatch,

		"port.dial": g.portDial,
		"port.list": aether.Unary(g.portList),

		"guest.info": aether.Unary(g.info),
	}
	for name, h := range m {
		m[name] = func(ctx context.Context, s *aether.Stream) (aether.Message, error) {
			g.tidyLater()
			g.open.Add(1)
			defer g.open.Add(-1)
			return h(ctx, s)
		}
	}
	// The edge's own, which are no use of the sandbox. A batch comes from a client and is
	// relayed whole.
	for name, h := range map[string]aether.Handler{
		"guest.resumed":  aether.Unary(g.resumed),
		"guest.activity": aether.Unary(g.activity),
	} {
		m[name] = func(ctx context.Context, s *aether.Stream) (aether.Message, error) {
			if s.Batched() {
				return nil, errs.New(errs.MissingRight, name, "the operation is for the edge")
			}
			return h(ctx, s)
		}
	}
	return m
}

func (g *Guest) resumed(_ context.Context, _ *aether.Stream, r *msg.ResumedRequest) (*msg.Empty, error) {
	g.Procs.Clock().Stood(time.Duration(min(r.StoodNs, 1<<62)))
	return &msg.Empty{}, nil
}

func (g *Guest) activity(context.Context, *aether.Stream, *msg.Empty) (*msg.Activity, error) {
	a := &msg.Activity{Commands: uint32(g.Procs.Commands()), Streams: uint32(g.open.Load())}
	for _, s := range g.Sessions.List() {
		if busy, _ := s.State(); busy {
			a.BusySessions++
		}
	}
	return a, nil
}

func (g *Guest) info(context.Context, *aether.Stream, *msg.Empty) (*msg.GuestInfo, error) {
	shell, err := g.Sessions.Shell("", proc.Spec{})
	if err != nil {
		shell = ""
	}
	return &msg.GuestInfo{
		Version: g.Version, UptimeMs: uint64(time.Since(g.started).Milliseconds()),
		Processes: uint32(g.Procs.Live()), Sessions: uint32(len(g.Sessions.List())),
		Shell: shell, DefaultUser: g.User, DefaultCwd: g.Cwd,
	}, nil
}

func (g *Guest) portList(context.Context, *aether.Stream, *msg.Empty) (*msg.PortList, error) {
	ports, err := port.List()
	if err != nil {
		return nil, err
	}
	out := &msg.PortList{}
	for _, p := range ports {
		out.Ports = append(out.Ports, &msg.PortInfo{Port: uint32(p.Port), Address: p.Address})
	}
	return out, nil
}

// idle is how long after the last operation memory is given back.
const idle = 3 * time.Second

// tidyLater sees to it that what a burst of work took is returned to the kernel once it
// is over. An idle guest has no timer running.
func (g *Guest) tidyLater() {
	g.last.Store(time.Now().UnixNano())
	if !g.armed.Swap(true) {
		time.AfterFunc(idle, g.tidy)
	}
}

func (g *Guest) tidy() {
	if left := idle - time.Duration(time.Now().UnixNano()-g.last.Load()); left > 0 {
		time.AfterFunc(left, g.tidy)
		return
	}
	g.armed.Store(false)
	g.Procs.Trim()
	// The first collection costs some 300 KiB of its own that stay, so a guest that has
	// done so little that there was none yet is better left alone. (To ask the runtime
	// for its statistics costs as much.)
	if g.collected.Load() {
		debug.FreeOSMemory()
	}
}
