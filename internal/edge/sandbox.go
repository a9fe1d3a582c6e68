package edge

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
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
	v1.StateRunning:  {v1.StatePausing, v1.StateFailed, v1.StateStopping},
	v1.StatePausing:  {v1.StatePaused, v1.StateRunning, v1.StateFailed, v1.StateStopping},
	v1.StatePaused:   {v1.StateResuming, v1.StateFailed, v1.StateStopping},
	v1.StateResuming: {v1.StateRunning, v1.StatePaused, v1.StateFailed, v1.StateStopping},
	v1.StateFailed:   {v1.StateStopping},
	v1.StateStopping: {v1.StateStopped},
}

// live tells whether a sandbox in that state runs, or will when it is wanted.
func live(state v1.State) bool {
	switch state {
	case v1.StateRunning, v1.StatePausing, v1.StatePaused, v1.StateResuming:
		return true
	}
	return false
}

// sandbox is one sandbox of this edge.
type sandbox struct {
	backend  backend.Backend // nil: not usable since this process started
	image    *v1.Image
	share    share
	create   context.Context // of its create or adoption; ends with the caller or a removal
	cancel   context.CancelFunc
	created  chan struct{}     // closed when its create, or its adoption, has ended, well or not
	removed  chan struct{}     // closed when nothing of it is left
	secrets  map[string]string // environment that is for the backend's create alone
	packedOn string            // digest of the image that a pack is being made on, with the edge's mu
	life     context.Context   // ends when its removal begins or it died
	stop     context.CancelFunc
	packs    chan struct{} // holds a token while the sandbox is packed, paused or resumed: one at a time lets it stand still
	last     *lastPack     // its last pack, for whoever holds the token; it is set with the edge's mu

	using
	onInput, onEnd func()        // what relays of its streams call
	inputs         atomic.Uint64 // that came for it while it did not run
	waking         atomic.Bool   // somebody resumes it for these

	mu       sync.Mutex
	move     *move         // under way, or about to begin; nil: none
	stood    time.Duration // that it was paused, added up, without the pause that goes on
	view     v1.Sandbox    // replaced as a whole; what was given out never changes
	instance backend.Instance
	guest    *aether.Conn
	expiry   *time.Timer
	lease    *time.Timer
	renewed  time.Time // when its lease was
	idle     *time.Timer
	ahead    *time.Timer // resumes it ahead of the call that a hint told of
	freed    int64       // what its last pause moved out, as far as this process knows
	working  bool        // when its guest was asked last, it worked by itself
	oomTold  int64       // its OOM kills that watchers were told of

	meter meter

	unadopted error // why it could not be adopted yet; of who tries only

	dial sync.Mutex // held by whoever connects to the guest
}

// newSandbox returns a sandbox that lives until stop.
func newSandbox(b backend.Backend, img *v1.Image, view v1.Sandbox) *sandbox {
	s := &sandbox{
		backend: b, image: img, share: shareOf(&view.Spec), view: view, cancel: func() {}, created: make(chan struct{}), removed: make(chan struct{}), packs: make(chan struct{}, 1),
		oomTold: view.OOMKills,
	}
	s.awake.Store(view.State == v1.StateRunning)
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
	return e.become(s, to, change)
}

// become is transition with s.mu held.
func (e *Edge) become(s *sandbox, to v1.State, change func(*v1.Sandbox)) error {
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
	if to == v1.StateRunning && from == v1.StateCreating || to == v1.StatePaused && from == v1.StatePausing {
		if err := e.record(s, v); err != nil {
			return err
		}
	} else if err := e.journal.note(s.recordAs(v)); err != nil {
		// It is so all the same: a full disk must not keep sandboxes from being removed.
		e.cfg.Log.Error("journal a transition", "sandbox", v.ID, "to", to, "err", err)
	}
	e.leaves(s)
	e.show(s, v)
	return nil
}

// show makes v what is known of s. With s.mu held.
func (e *Edge) show(s *sandbox, v v1.Sandbox) {
	e.countPaused(s.view.State, v.State)
	s.view = v
	s.awake.Store(v.State == v1.StateRunning)
	e.feed.changed(v)
}

func (e *Edge) countPaused(from, to v1.State) {
	if from == v1.StatePaused {
		e.paused.Add(-1)
	}
	if to == v1.StatePaused {
		e.paused.Add(1)
	}
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
	rec := record{Sandbox: v, Image: s.image, Stood: s.stood}
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
	if c, err := s.connected(false); c != nil || err != nil {
		return c, err
	}
	return s.dialGuest(ctx, false)
}

// dialGuest is connect for who knows that the sandbox is adopted. standing: also while it does not run.
func (s *sandbox) dialGuest(ctx context.Context, standing bool) (*aether.Conn, error) {
	s.dial.Lock()
	defer s.dial.Unlock()
	c, err := s.connected(standing) // someone else may have
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
	c, err = aether.NewClient(ctx, counted(conn, &s.meter.sent), aether.ClientConfig{
		Agent: "dsec-edge", KeepAlive: -1, WriteTimeout: -1, // its death is seen by its socket's end; paused, it takes nothing for long
	})
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

// adopted waits until it is clear whether a sandbox that ran before its edge did can be
// taken over, which has its own time limit.
func (s *sandbox) adopted(ctx context.Context) error {
	s.mu.Lock()
	wait, v := s.instance == nil && live(s.view.State), s.view
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
func (s *sandbox) connected(standing bool) (*aether.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if state := s.view.State; s.instance == nil || state != v1.StateRunning && state != v1.StateCreating && !(standing && live(state)) {
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

// goneNow is the error of whatever the removal of v meets.
func goneNow(v v1.Sandbox) *errs.Error {
	text := "the sandbox is removed"
	if why := v.EndReason.Words(); why != "" {
		text += ": " + why
	}
	e := errs.New(errs.SandboxGone, "edge.remove", text)
	e.Node, e.Sandbox = v.Node, v.ID
	if v.EndReason != "" {
		e.With("end_reason", string(v.EndReason))
	}
	v1.Blame(e, v.EndReason)
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
