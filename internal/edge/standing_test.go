package edge

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// standings is a backend whose sandboxes can stand still: then their guests take nothing from their
// sockets. It outlives the edges of a bed, as real sandboxes do.
type standings struct {
	backend.Backend
	t *testing.T

	// Set by tests before they are used.
	onPause  func(ctx context.Context, id string) error // between the freeze and the end of a pause
	onResume func(ctx context.Context, id string) error // before the thaw
	activity func(id string) (*msg.Activity, error)

	mu     sync.Mutex
	guests map[string]*standingGuest
}

// standingGuest is what there is of one sandbox beside its edge.
type standingGuest struct {
	mu      sync.Mutex
	thawed  chan struct{} // closed while it runs
	frozen  bool
	busy    atomic.Bool // a Pause or Resume is at work
	pauses  atomic.Int64
	resumes atomic.Int64
	execs   atomic.Int64
	server  *aether.Server
	gone    bool
	heard   []time.Duration // of guest.resumed
}

func newStandings(b *bed) *standings {
	s := &standings{t: b.t, guests: map[string]*standingGuest{}}
	b.wrap = func(be backend.Backend) backend.Backend { s.Backend = be; return s }
	return s
}

func (s *standings) guest(id string) *standingGuest {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.guests[id]
	if g == nil {
		g = &standingGuest{thawed: make(chan struct{})}
		close(g.thawed)
		g.server = aether.NewServer(aether.ServerConfig{KeepAlive: -1, Handlers: map[string]aether.Handler{
			"guest.info": aether.Unary(func(context.Context, *aether.Stream, *msg.Empty) (*msg.GuestInfo, error) {
				return &msg.GuestInfo{Version: "standing"}, nil
			}),
			"guest.resumed": aether.Unary(func(_ context.Context, _ *aether.Stream, r *msg.ResumedRequest) (*msg.Empty, error) {
				g.mu.Lock()
				defer g.mu.Unlock()
				g.heard = append(g.heard, time.Duration(r.StoodNs))
				return &msg.Empty{}, nil
			}),
			"guest.activity": aether.Unary(func(context.Context, *aether.Stream, *msg.Empty) (*msg.Activity, error) {
				if s.activity == nil {
					return &msg.Activity{}, nil
				}
				return s.activity(id)
			}),
			"process.exec": aether.Unary(func(context.Context, *aether.Stream, *msg.ExecRequest) (*msg.ExecResult, error) {
				g.execs.Add(1)
				return &msg.ExecResult{}, nil
			}),
			"process.attach": func(ctx context.Context, st *aether.Stream) (aether.Message, error) { // gives back what it gets
				for {
					f, err := st.Recv(ctx)
					if errors.Is(err, io.EOF) {
						return &msg.Exit{}, nil
					}
					if err == nil {
						err = st.Send(ctx, aether.KindStdout, f.Payload)
					}
					if err != nil {
						return nil, err
					}
				}
			},
		}})
		s.guests[id] = g
		s.t.Cleanup(func() { g.freeze(false); g.server.Close() })
	}
	return g
}

func (s *standings) Create(ctx context.Context, spec backend.Spec, r backend.StepReport) (backend.Instance, error) {
	i, err := s.Backend.Create(ctx, spec, r)
	if err != nil {
		return nil, err
	}
	return &standingInstance{i, s, s.guest(spec.ID)}, nil
}

func (s *standings) Adopt(ctx context.Context, spec backend.Spec, handle json.RawMessage) (backend.Instance, error) {
	i, err := s.Backend.Adopt(ctx, spec, handle)
	if err != nil {
		return nil, err
	}
	g := s.guest(spec.ID)
	if !spec.Paused {
		g.freeze(false)
	}
	return &standingInstance{i, s, g}, nil
}

func (s *standings) Delete(ctx context.Context, id string) error {
	g := s.guest(id)
	g.mu.Lock()
	g.gone = true
	g.mu.Unlock()
	if g.busy.Load() {
		s.t.Error("a sandbox is removed while it is paused or resumed")
	}
	g.freeze(false) // as the dead take nothing
	g.server.Close()
	return s.Backend.Delete(ctx, id)
}

func (g *standingGuest) freeze(frozen bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.frozen == frozen {
		return
	}
	if g.frozen = frozen; frozen {
		g.thawed = make(chan struct{})
	} else {
		close(g.thawed)
	}
}

func (g *standingGuest) stands() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.frozen
}

func (g *standingGuest) notices() []time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]time.Duration(nil), g.heard...)
}

type standingInstance struct {
	backend.Instance
	s *standings
	g *standingGuest
}

var _ backend.Pauser = (*standingInstance)(nil)

func (i *standingInstance) Usage(context.Context) (v1.Usage, error) {
	return v1.Usage{MemoryBytes: 512 << 20}, nil
}

func (i *standingInstance) DialGuest(context.Context) (net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	var ends [2]net.Conn
	for k, fd := range fds {
		f := os.NewFile(uintptr(fd), "guest")
		if ends[k], err = net.FileConn(f); err != nil {
			return nil, err
		}
		f.Close()
	}
	go i.g.server.ServeConn(context.Background(), &standingConn{ends[1], i.g})
	return ends[0], nil
}

// standingConn is a guest's end of its connection.
type standingConn struct {
	net.Conn
	g *standingGuest
}

func (c *standingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	for c.g.stands() {
		c.g.mu.Lock()
		thawed := c.g.thawed
		c.g.mu.Unlock()
		<-thawed
	}
	return n, err
}

func (i *standingInstance) one() func() {
	if i.g.busy.Swap(true) {
		i.s.t.Error("a pause or a resume while another is at work")
	}
	return func() { i.g.busy.Store(false) }
}

func (i *standingInstance) Pause(ctx context.Context) (backend.Paused, error) {
	defer i.one()()
	if i.g.stands() {
		return backend.Paused{}, nil
	}
	i.g.freeze(true)
	err := ctx.Err()
	if f := i.s.onPause; err == nil && f != nil {
		err = f(ctx, i.ID())
	}
	if err != nil {
		i.g.freeze(false)
		if errors.Is(err, errs.SwapFull) {
			return backend.Paused{}, err
		}
		return backend.Paused{}, errs.Wrap(errs.RequestCanceled, "test.pause", "pause", err)
	}
	i.g.pauses.Add(1)
	return backend.Paused{FreedBytes: 500 << 20, SwapBytes: 400 << 20}, nil
}

func (i *standingInstance) Resume(ctx context.Context, _ time.Duration) error {
	defer i.one()()
	if f := i.s.onResume; f != nil {
		if err := f(ctx, i.ID()); err != nil {
			return errs.Wrap(errs.InternalError, "test.resume", "resume", err)
		}
	}
	i.g.resumes.Add(1)
	i.g.freeze(false)
	return nil
}
