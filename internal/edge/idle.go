package edge

import (
	"context"
	"errors"
	"time"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

const (
	// askTime is how long a guest may take to say what goes on in it.
	askTime = 2 * time.Second
	// turnTime is how long a pause that nobody waits for may wait for its turn.
	turnTime = 10 * time.Minute
)

// lookAgain is how soon a sandbox is looked at again that works by itself, or could not be paused.
func lookAgain(ttl time.Duration) time.Duration { return min(max(ttl/8, time.Second), time.Minute) }

// checkIdle does what is to be done with a sandbox that nobody has used for ttl, or looks again when
// that may be so. Uses only note their time: there may be thousands in a second.
func (e *Edge) checkIdle(s *sandbox, ttl time.Duration) {
	if e.stopping.Load() {
		return
	}
	s.mu.Lock()
	v, working := s.view, s.working
	seen := s.seen()
	left := seen.last.Add(ttl).Sub(e.cfg.Now())
	switch {
	case !live(v.State) || v.State == v1.StatePaused: // a resume begins anew
		s.mu.Unlock()
		return
	case seen.open > 0:
		left = ttl
	case v.State != v1.StateRunning || s.instance == nil:
		left = lookAgain(ttl)
	case working:
		left = 0
	}
	s.mu.Unlock()
	if left > 0 {
		s.lookIn(left)
		return
	}
	if e.works(s) {
		s.mu.Lock()
		s.working = true
		s.mu.Unlock()
		s.lastUse.Store(e.cfg.Now().UnixNano())
		s.lookIn(lookAgain(ttl))
		return
	}
	s.mu.Lock()
	s.working = false
	s.mu.Unlock()
	if left = seen.last.Add(ttl).Sub(e.cfg.Now()); left > 0 { // it has worked until the last look
		s.lookIn(left)
		return
	}
	if v.Spec.OnIdle != v1.OnIdlePause {
		e.expireUnless(s, v1.EndIdle, &seen)
		s.lookIn(lookAgain(ttl)) // if it was used in between; else it does no harm
		return
	}
	ctx, cancel := context.WithTimeout(s.life, turnTime)
	defer cancel()
	if _, err := e.pause(ctx, v.ID, v1.PauseIdle, &seen); err != nil {
		if !errors.Is(err, errs.StateConflict) && s.life.Err() == nil {
			e.cfg.Log.Warn("pause an idle sandbox", "sandbox", v.ID, "err", err)
		}
		s.lookIn(lookAgain(ttl))
	}
}

// lookIn has the sandbox's idle time checked in d.
func (s *sandbox) lookIn(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle != nil && live(s.view.State) {
		s.idle.Reset(d)
	}
}

// works asks the guest whether a command runs or a session is busy that no stream tells of. A guest that does not
// answer in time may well have too much to do; one that does not know the question has nothing of the kind.
func (e *Edge) works(s *sandbox) bool {
	ctx, cancel := context.WithTimeout(s.life, askTime)
	defer cancel()
	conn, err := s.connect(ctx)
	if err == nil {
		var a msg.Activity
		if err = conn.Call(ctx, "", "guest.activity", &msg.Empty{}, &a); err == nil {
			return a.Commands > 0 || a.BusySessions > 0 || a.Streams > 0
		}
	}
	return !errors.Is(err, errs.UnknownMethod) && !errors.Is(err, errs.NotSupported)
}

// expireUnless removes a sandbox unless it was used since it was seen.
func (e *Edge) expireUnless(s *sandbox, why v1.EndReason, seen *use) {
	ctx, cancel := context.WithTimeout(context.Background(), removeTime)
	defer cancel()
	id := s.snapshot().ID
	e.noteOOM(s, nil)
	s.mu.Lock()
	s.awake.Store(false) // whoever uses it from here on waits for mu
	if s.began.Load() != seen.began || s.view.State != v1.StateRunning || e.stopping.Load() {
		s.awake.Store(s.view.State == v1.StateRunning)
		s.mu.Unlock()
		return
	}
	err := e.become(s, v1.StateStopping, func(v *v1.Sandbox) { v.EndReason = why })
	s.mu.Unlock()
	if err == nil {
		e.cfg.Log.Info("removing a sandbox", "sandbox", id, "why", why)
		err = e.finishRemoval(ctx, s)
	}
	if err != nil {
		e.cfg.Log.Error("remove an idle sandbox", "sandbox", id, "err", err)
	}
}

// idlesHow fails if what is to happen when the sandbox is idle cannot.
func idlesHow(spec *v1.Spec, instance backend.Instance) error {
	if _, ok := instance.(backend.Pauser); !ok && spec.OnIdle == v1.OnIdlePause {
		return errs.New(errs.NotSupported, "edge.create", "sandboxes of the backend "+string(spec.Backend)+" cannot be paused: use on_idle stop").With("field", "on_idle")
	}
	return nil
}
