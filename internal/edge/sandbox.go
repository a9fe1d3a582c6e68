package edge

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dsec/aether"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// next says which states may follow which. Stopping may follow all.
var next = map[v1.State][]v1.State{
	v1.StateCreating: {v1.StateRunning, v1.StateFailed, v1.StateStopping},
	v1.StateRunning:  {v1.StateFailed, v1.StateStopping},
	v1.StateFailed:   {v1.StateStopping},
	v1.StateStopping: {v1.StateStopped},
}

// sandbox is one sandbox of this edge.
type sandbox struct {
	backend  backend.Backend // nil: not usable since this process started
	image    *v1.Image
	need     v1.Resources
	admitted sync.Once       // done when need was given back
	create   context.Context // of its create or adoption; ends with the caller or a removal
	cancel   context.CancelFunc
	created  chan struct{}     // closed when its create, or its adoption, has ended, well or not
	removed  chan struct{}     // closed when nothing of it is left
	secrets  map[string]string // environment that is for the backend's create alone
	packedOn string            // digest of the image that a pack is being made on, with the edge's mu
	life     context.Context   // ends when its removal begins or it died
	stop     context.CancelFunc
	erasing  chan struct{} // holds a token while the backend removes it
	packs    chan struct{} // holds a token while the sandbox is packed
	last     *lastPack     // its last pack, for whoever holds the token; it is set with the edge's mu

	mu       sync.Mutex
	view     v1.Sandbox // replaced as a whole; what was given out never changes
	instance backend.Instance
	guest    *aether.Conn
	expiry   *time.Timer
	lease    *time.Timer
	renewed  time.Time // when its lease was

	unadopted error // why it could not be adopted yet; of who tries only

	dial sync.Mutex // held by whoever connects to the guest
}

// newSandbox returns a sandbox that lives until stop.
func newSandbox(b backend.Backend, img *v1.Image, need v1.Resources, view v1.Sandbox) *sandbox {
	s := &sandbox{
		backend: b, image: img, need: need, view: view, cancel: func() {}, created: make(chan struct{}), removed: make(chan struct{}), packs: make(chan struct{}, 1), erasing: make(chan struct{}, 1),
	}
	s.life, s.stop = context.WithCancel(context.Background())
	return s
}

// snapshot returns what to tell of the sandbox.
func (s *sandbox) snapshot() v1.Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.view
}

// transition moves the sandbox to a state if its present state allows that, after
// recording it, and tells those who watch. change may set further fields.
func (e *Edge) transition(s *sandbox, to v1.State, change func(*v1.Sandbox)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	from := s.view.State
	if !slices.Contains(next[from], to) {
		return errs.New(errs.StateConflict, "edge.transition", "the sandbox is "+string(from)+" and cannot become "+string(to)).With("state", string(from))
	}
	v := s.view
	v.State = to
	v.Generation++
	v.Steps = maps.Clone(v.Steps)
	if change != nil {
		change(&v)
	}
	if to == v1.StateRunning {
		if err := e.record(s, v); err != nil {
			return err
		}
	} else if err := e.journal.note(s.recordAs(v)); err != nil {
		// It is so all the same: a full disk must not keep sandboxes from being removed.
		e.cfg.Log.Error("journal a transition", "sandbox", v.ID, "to", to, "err", err)
	}
	s.view = v
	e.feed.changed(v)
	return nil
}

// record writes v to the journal. With s.mu held, or before s is shared.
func (e *Edge) record(s *sandbox, v v1.Sandbox) error {
	err := e.journal.put(s.recordAs(v))
	code := errs.InternalError
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		code = errs.DiskFull
	}
	return errs.Wrap(code, "edge.journal", "keep the sandbox's record", err)
}

// recordAs is what to keep of s as v.
func (s *sandbox) recordAs(v v1.Sandbox) record {
	rec := record{Sandbox: v, Image: s.image}
	if s.instance != nil {
		rec.Handle = s.instance.Handle()
	}
	return rec
}

// connect returns the connection to the sandbox's guest, dialling if there is none.
func (s *sandbox) connect(ctx context.Context) (*aether.Conn, error) {
	if err := s.adopted(ctx); err != nil {
		return nil, err
	}
	if c, err := s.connected(); c != nil || err != nil {
		return c, err
	}
	s.dial.Lock()
	defer s.dial.Unlock()
	c, err := s.connected() // someone else may have
	if c != nil || err != nil {
		return c, err
	}
	s.mu.Lock()
	instance, id := s.instance, s.view.ID
	s.mu.Unlock()
	conn, err := instance.DialGuest(ctx)
	if err != nil {
		return nil, err
	}
	c, err = aether.NewClient(ctx, conn, aether.ClientConfig{Agent: "dsec-edge", KeepAlive: -1}) // its death is seen by its socket's end
	if err != nil {
		e := errs.Of(errs.Wrap(errs.GuestUnreachable, "edge.connect", "handshake with the guest", err))
		e.Sandbox = id
		return nil, e
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.instance == nil { // removed meanwhile
		c.Close()
		return nil, notRunning(s.view)
	}
	s.guest = c
	return c, nil
}

// limitCPU sees to it that the sandbox's limit of CPU time is set, before the first of what is asked of it.
func (s *sandbox) limitCPU() error {
	s.mu.Lock()
	instance, v := s.instance, s.view
	s.mu.Unlock()
	l, ok := instance.(backend.CPULimiter)
	if !ok {
		return nil
	}
	err := l.LimitCPU()
	if err != nil && s.snapshot().State != v1.StateRunning { // it ended meanwhile
		return notRunning(s.snapshot())
	}
	if err != nil {
		x := *errs.Of(err)
		x.Node, x.Sandbox = v.Node, v.ID
		return &x
	}
	return nil
}

// adopted waits until it is clear whether a sandbox that ran before its edge did can be
// taken over, which has its own time limit.
func (s *sandbox) adopted(ctx context.Context) error {
	s.mu.Lock()
	wait, v := s.instance == nil && s.view.State == v1.StateRunning, s.view
	s.mu.Unlock()
	if !wait {
		return nil
	}
	select {
	case <-s.created:
		return nil
	case <-ctx.Done():
		e := errs.New(errs.GuestUnreachable, "edge.adopt", "the node has started anew and cannot reach the sandbox yet").Because(context.Cause(ctx))
		e.Node, e.Sandbox = v.Node, v.ID
		return e
	}
}

// connected returns the live connection, nil if there is none, or why there can be none.
func (s *sandbox) connected() (*aether.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.instance == nil || (s.view.State != v1.StateRunning && s.view.State != v1.StateCreating) {
		return nil, notRunning(s.view)
	}
	if s.guest != nil {
		select {
		case <-s.guest.Done():
			s.guest = nil
		default:
		}
	}
	return s.guest, nil
}

func notRunning(v v1.Sandbox) error {
	if v.State == v1.StateStopping || v.State == v1.StateStopped {
		return goneNow(v)
	}
	e := errs.New(errs.SandboxNotRunning, "edge.connect", "the sandbox is "+string(v.State)).With("state", string(v.State))
	e.Sandbox = v.ID
	if v.Error != nil {
		e.Infra = v.Error.Infra
		e.Cause = v.Error.Err()
	}
	return e
}

// endings say why a sandbox is removed.
var endings = map[v1.EndReason]string{
	v1.EndRequest: "somebody asked for it", v1.EndTTL: "it reached its time to live", v1.EndLease: "nobody renewed its lease",
}

// goneNow is the error of whatever the removal of v meets.
func goneNow(v v1.Sandbox) *errs.Error {
	text := "the sandbox is removed"
	if why := endings[v.EndReason]; why != "" {
		text += ": " + why
	}
	e := errs.New(errs.SandboxGone, "edge.remove", text)
	e.Node, e.Sandbox = v.Node, v.ID
	if v.EndReason != "" {
		e.With("end_reason", string(v.EndReason))
	}
	if v.Error != nil { // it had failed before
		e.Cause = v.Error.Err()
	}
	return e
}

// release closes what this process holds of the sandbox; it keeps running. why is what
// operations that go on in it are told; nil: that the connection is lost.
func (s *sandbox) release(why *errs.Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.guest != nil {
		if why != nil {
			s.guest.Fail(why)
		} else {
			s.guest.Close()
		}
		s.guest = nil
	}
	s.instance = nil
}
