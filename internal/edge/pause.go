package edge

import (
	"context"
	"errors"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

const (
	// pauseParallel pauses are at work on a node at once: each keeps a core or the swap device busy.
	pauseParallel = 8
	// moveParallel sandboxes of one request are at work, or wait for one of these.
	moveParallel = 32

	pauseTime  = 2 * time.Minute // of one pause, once it has its turn
	resumeTime = 30 * time.Second
	// noticeTime is how long a resumed guest may take to say that it has heard for how long it stood still.
	noticeTime = time.Second
	// sendTime is how long it may take to put that into the guest's socket, which has room unless much input waits in it.
	sendTime = 20 * time.Millisecond
)

// move is a pause or a resume under way. It goes on without whoever asked for it.
type move struct {
	resume bool
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{} // closed at its end
	// Set before done is closed.
	err   error
	freed int64
}

func newMove(ctx context.Context, limit time.Duration, resume bool) *move {
	m := &move{resume: resume, done: make(chan struct{})}
	m.ctx, m.cancel = context.WithTimeout(ctx, limit)
	return m
}

// hold keeps the edge from closing until letGo. It must not be called with a sandbox's mu held.
func (e *Edge) hold() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopping.Load() {
		return errs.New(errs.ShuttingDown, "edge.pause", "the node is stopping")
	}
	e.moves.Add(1)
	return nil
}

func (e *Edge) letGo() { e.moves.Done() }

// pause takes a sandbox from running to paused and returns when it is, with what its memory was less.
// seen is what was known of its use when it was decided that nobody needs it: whatever was used since,
// or resumed, is not paused (errs.StateConflict). Nil: somebody asked for it, and it is paused whatever goes on in it.
func (e *Edge) pause(ctx context.Context, id string, why v1.PauseReason, seen *use) (r v1.PauseResult, err error) {
	r.ID = id
	s := e.get(id)
	if s == nil {
		return r, e.absent(id)
	}
	if err := e.hold(); err != nil {
		return r, err
	}
	defer e.letGo()
	if err := s.adopted(ctx); err != nil {
		return r, err
	}
	for {
		m, begun, err := e.beginPause(ctx, s, why, seen)
		if err != nil || m == nil {
			return r, err
		}
		if err := m.wait(ctx); err != nil {
			return r, err
		}
		if !m.resume { // else it is somebody's wish that came before this one
			r.Changed, r.FreedBytes = begun && m.err == nil, m.freed
			return r, m.err
		}
	}
}

// beginPause begins a pause, or returns the move that is under way; none if it is paused already.
func (e *Edge) beginPause(ctx context.Context, s *sandbox, why v1.PauseReason, seen *use) (m *move, begun bool, err error) {
	if m, done, err := s.pausable(seen); m != nil || done || err != nil {
		return m, false, err
	}
	// One after another, since a pack lets it stand still too.
	give := func() {}
	defer func() { give() }()
	for _, turn := range []chan struct{}{s.packs, e.pausing} {
		select {
		case turn <- struct{}{}:
			before := give
			give = func() { <-turn; before() }
		case <-s.life.Done():
			return nil, false, e.cutOff(s)
		case <-ctx.Done():
			return nil, false, errs.Wrap(errs.DeadlineExceeded, "edge.pause", "wait for the sandbox's turn to be paused", context.Cause(ctx))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// Whoever uses it from here on finds it not awake, and waits for s.mu.
	s.awake.Store(false)
	defer func() { s.awake.Store(s.view.State == v1.StateRunning) }()
	if m, done, err := s.pausableNow(seen); m != nil || done || err != nil {
		return m, false, err
	}
	m = newMove(s.life, pauseTime, false)
	at := e.cfg.Now()
	if err := e.become(s, v1.StatePausing, func(v *v1.Sandbox) { v.PausedAt, v.PauseReason = &at, why }); err != nil {
		return nil, false, err
	}
	s.move = m
	e.moves.Add(1) // held
	instance, release := s.instance.(backend.Pauser), give
	give = func() {}
	go func() {
		defer e.letGo()
		defer release()
		e.runPause(s, m, instance, at)
	}()
	return m, true, nil
}

// pausable says what a pause of s meets: a move under way, or that it is done already; else it may begin.
func (s *sandbox) pausable(seen *use) (m *move, done bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pausableNow(seen)
}

func (s *sandbox) pausableNow(seen *use) (m *move, done bool, err error) {
	v := s.view
	if seen != nil {
		if now := s.seen(); now.began != seen.began || s.move != nil && s.move.resume {
			return nil, false, errs.New(errs.StateConflict, "edge.pause", "the sandbox was used since its pause was decided").With("state", string(v.State))
		}
	}
	switch {
	case s.move != nil:
		return s.move, false, nil
	case v.State == v1.StatePaused:
		return nil, true, nil
	case v.State != v1.StateRunning || s.instance == nil:
		return nil, false, notRunning(v)
	}
	if _, ok := s.instance.(backend.Pauser); !ok {
		return nil, false, errs.New(errs.NotSupported, "edge.pause", "sandboxes of the backend "+string(v.Spec.Backend)+" cannot be paused")
	}
	return nil, false, nil
}

// runPause does a pause that has begun, with the sandbox's token.
func (e *Edge) runPause(s *sandbox, m *move, instance backend.Pauser, at time.Time) {
	start := time.Now()
	paused, err := instance.Pause(m.ctx)
	if err == nil {
		e.costs.paused(paused.FreedBytes, time.Since(start))
		if err = e.transition(s, v1.StatePaused, func(v *v1.Sandbox) { v.Pauses++ }); err == nil {
			e.admit.rest(&s.share)
			m.freed = paused.FreedBytes
			s.mu.Lock()
			s.freed = paused.FreedBytes
			s.mu.Unlock()
			s.finish(m, nil)
			return
		}
		if !s.standing() { // it is being removed, or has died
			s.finish(m, e.cutOff(s))
			return
		}
		// A pause that is on no record would end with this process, untold.
		ctx, cancel := context.WithTimeout(context.Background(), resumeTime)
		defer cancel()
		if rerr := instance.Resume(ctx, e.cfg.Now().Sub(at)); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}
	if m.ctx.Err() != nil && s.life.Err() == nil && !errors.Is(m.ctx.Err(), context.DeadlineExceeded) {
		err = errs.New(errs.StateConflict, "edge.pause", "a request came for the sandbox before it was paused").With("state", string(v1.StateRunning)).Because(err)
	}
	stood := e.cfg.Now().Sub(at)
	e.tellStood(s, stood)
	terr := e.moved(s, v1.StateRunning, stood)
	if terr != nil {
		err = e.cutOff(s)
	}
	s.finish(m, s.name(err))
}

// moved ends the time that a sandbox stood still.
func (e *Edge) moved(s *sandbox, to v1.State, stood time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.stood
	s.stood += stood
	err := e.become(s, to, func(v *v1.Sandbox) { v.PausedAt, v.PauseReason = nil, "" })
	if err != nil {
		s.stood = before
		return err
	}
	s.lastUse.Store(e.cfg.Now().UnixNano())
	if idle := s.view.Spec.IdleTTL.Duration(); s.idle != nil && idle > 0 {
		s.idle.Reset(idle)
	}
	return nil
}

// wake lets a sandbox that is paused, or about to be, run again, and returns when it runs. However
// many ask for that, it is resumed once. The caller has counted the use that it is for.
func (e *Edge) wake(ctx context.Context, s *sandbox) error {
	_, err := e.wakeUp(ctx, s)
	return err
}

func (e *Edge) wakeUp(ctx context.Context, s *sandbox) (changed bool, err error) {
	if err := e.hold(); err != nil {
		return false, err
	}
	defer e.letGo()
	if err := s.adopted(ctx); err != nil {
		return false, err
	}
	for {
		m, err := e.beginWake(s)
		if m == nil || err != nil {
			return changed, err
		}
		changed = true
		if err := m.wait(ctx); err != nil {
			return false, err
		}
		if m.resume { // it ran; it may be paused again by now, by who came later
			return m.err == nil, m.err
		}
	}
}

// beginWake begins a resume if none is under way. It returns what to wait for; nothing if the sandbox runs.
func (e *Edge) beginWake(s *sandbox) (*move, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.view.State {
	case v1.StateCreating, v1.StateRunning:
		return nil, nil
	case v1.StatePausing:
		s.move.cancel() // it ends sooner, one way or the other
	case v1.StatePaused:
		if s.move != nil { // it waits for its turn
			break
		}
		instance, ok := s.instance.(backend.Pauser)
		if !ok {
			return nil, notRunning(s.view)
		}
		s.move = newMove(context.Background(), resumeTime, true) // only a removal cancels it
		e.moves.Add(1)                                           // held
		go func(m *move) {
			defer e.letGo()
			s.finish(m, s.name(e.resume(s, m, instance)))
		}(s.move)
	case v1.StateResuming:
	default:
		return nil, notRunning(s.view)
	}
	return s.move, nil
}

// resume takes a sandbox from paused to running. If it fails it stays paused.
func (e *Edge) resume(s *sandbox, m *move, instance backend.Pauser) error {
	select { // a pack of the paused sandbox comes first
	case s.packs <- struct{}{}:
		defer func() { <-s.packs }()
	case <-m.ctx.Done():
		return errs.Wrap(errs.DeadlineExceeded, "edge.resume", "wait for the end of the sandbox's snapshot", m.ctx.Err())
	}
	if err := e.admit.rejoin(&s.share); err != nil {
		return e.inItsPlace(err)
	}
	if err := e.transition(s, v1.StateResuming, nil); err != nil {
		return e.cutOff(s)
	}
	var stood time.Duration
	if at := s.snapshot().PausedAt; at != nil {
		stood = max(0, e.cfg.Now().Sub(*at))
	}
	start := time.Now()
	// What the guest hears of first waits for it in its socket.
	nctx, stop := context.WithCancel(m.ctx)
	defer stop()
	heard := e.notify(nctx, s.present(), stood)
	if err := instance.Resume(m.ctx, stood); err != nil {
		stop()
		if terr := e.transition(s, v1.StatePaused, nil); terr != nil {
			return e.cutOff(s)
		}
		e.admit.rest(&s.share)
		return err
	}
	if heard == nil {
		if conn, err := s.dialGuest(m.ctx, true); err == nil {
			heard = e.notify(nctx, conn, stood)
		}
	}
	if heard != nil {
		heard()
	}
	if err := e.moved(s, v1.StateRunning, stood); err != nil {
		return e.cutOff(s)
	}
	s.mu.Lock()
	freed := s.freed
	s.mu.Unlock()
	e.costs.resumed(freed, time.Since(start))
	return nil
}

// finish ends a move and lets those that wait for it go on.
func (s *sandbox) finish(m *move, err error) {
	m.err = err
	m.cancel()
	s.mu.Lock()
	s.move = nil
	s.mu.Unlock()
	close(m.done)
}

func (m *move) wait(ctx context.Context) error {
	select {
	case <-m.done:
		return nil
	case <-ctx.Done():
		what := "wait for the sandbox to be paused"
		if m.resume {
			what = "wait for the sandbox to be resumed"
		}
		return errs.Wrap(errs.DeadlineExceeded, "edge.pause", what, context.Cause(ctx))
	}
}

// cutOff says why a sandbox does not go on.
func (e *Edge) cutOff(s *sandbox) error {
	v := s.snapshot()
	if e.stopping.Load() && live(v.State) {
		return errs.New(errs.ShuttingDown, "edge.pause", "the node is stopping")
	}
	return notRunning(v)
}

// name adds to an error whose it is.
func (s *sandbox) name(err error) error {
	if err == nil {
		return nil
	}
	v := s.snapshot()
	x := *errs.Of(err)
	x.Node, x.Sandbox = v.Node, v.ID
	return &x
}

// present returns the connection to the guest, if there is one.
func (s *sandbox) present() *aether.Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.guest
}

// notify tells the guest for how long it stood still. It returns when that is in the guest's socket, or the socket
// takes nothing, and a function that waits, not long, until the guest has heard; nil if there is no connection.
func (e *Edge) notify(ctx context.Context, conn *aether.Conn, stood time.Duration) (heard func()) {
	if conn == nil {
		return nil
	}
	select {
	case <-conn.Done():
		return nil
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, noticeTime)
	sent, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		st, err := conn.Open(ctx, "", "guest.resumed", &msg.ResumedRequest{StoodNs: uint64(max(0, stood))})
		close(sent)
		for err == nil {
			_, err = st.Recv(ctx) // it ends with an error in any case; a guest that does not know of it has nothing to put off
		}
	}()
	late := time.NewTimer(sendTime)
	defer late.Stop()
	select {
	case <-sent:
	case <-late.C:
	}
	return func() {
		<-done
		cancel()
	}
}

// tellStood tells a guest that runs already for how long it has stood still.
func (e *Edge) tellStood(s *sandbox, stood time.Duration) {
	ctx, cancel := context.WithTimeout(s.life, noticeTime)
	defer cancel()
	conn, err := s.dialGuest(ctx, true)
	if err != nil {
		e.cfg.Log.Warn("tell a guest that it has stood still", "sandbox", s.snapshot().ID, "err", err)
		return
	}
	if heard := e.notify(ctx, conn, stood); heard != nil {
		heard()
	}
}

// servePause and serveResume answer for each sandbox as it ends.
func (e *Edge) servePause(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	return e.serveMoves(ctx, st, func(ctx context.Context, id string, why v1.PauseReason) (v1.PauseResult, error) {
		if why == "" {
			why = v1.PauseRequested
		}
		return e.pause(ctx, id, why, nil)
	})
}

func (e *Edge) serveResume(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	return e.serveMoves(ctx, st, func(ctx context.Context, id string, _ v1.PauseReason) (r v1.PauseResult, err error) {
		s := e.get(id)
		if s == nil {
			return r, e.absent(id)
		}
		s.touch(e.cfg.Now()) // a pause that was decided before is off
		r.Changed, err = e.wakeUp(ctx, s)
		return r, err
	})
}

func (e *Edge) serveMoves(ctx context.Context, st *aether.Stream, do func(context.Context, string, v1.PauseReason) (v1.PauseResult, error)) (aether.Message, error) {
	req, err := asked[v1.EdgePause](st)
	if err != nil {
		return nil, err
	}
	return &msg.Empty{}, tellEach(ctx, st, req.IDs, moveParallel, func(ctx context.Context, id string) v1.EdgePaused {
		start := time.Now()
		r, err := do(ctx, id, req.Why)
		r.ID, r.TookMS, r.Error = id, milliseconds(time.Since(start)), v1.ProblemOf(err)
		answer := v1.EdgePaused{PauseResult: r}
		if s := e.get(id); s != nil {
			v := s.snapshot()
			answer.State, answer.Sandbox = v.State, &v
		}
		return answer
	})
}
