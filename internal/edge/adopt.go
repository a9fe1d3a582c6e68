package edge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

const (
	// adoptTime is how long a sandbox that cannot be adopted at once is tried again.
	adoptTime = 30 * time.Second
	adoptMin  = 50 * time.Millisecond // between the first tries; each wait is twice the last
	adoptMax  = 3 * time.Second
)

// recover compares the journal with what the backends have, both ways: it adopts what
// runs, ends what was half-made or half-removed, and removes what has no record.
func (e *Edge) recover(ctx context.Context) error {
	j, records, err := openJournal(e.path("journal"))
	if errors.Is(err, errs.DataCorrupt) && e.anew {
		// None of its sandboxes is left anyway, and power that fails may tear more than a line.
		e.cfg.Log.Error("the journal of the time before the machine restarted is put aside as journal.damaged", "err", err)
		if err := os.Rename(e.path("journal"), e.path("journal.damaged")); err != nil {
			return err
		}
		j, records, err = openJournal(e.path("journal"))
	}
	if err != nil {
		return err
	}
	e.journal = j
	e.loadMeters()
	for _, rec := range records {
		e.recoverOne(ctx, rec)
	}
	e.meters = nil
	// Before anything is served, so nobody is at work on what has no record.
	for kind, b := range e.backends {
		ids, err := b.List(ctx)
		if err != nil {
			return fmt.Errorf("list sandboxes of %s: %w", kind, err)
		}
		var work []func()
		for _, id := range e.unexplained(ids) {
			work = append(work, func() { e.reconciler.removeOrphan(id) })
		}
		inParallel(work)
	}
	return e.dropTemporaries(ctx)
}

func (e *Edge) recoverOne(ctx context.Context, rec record) {
	v := rec.Sandbox
	b := e.backends[v.Spec.Backend]
	_, epoch, err := v1.ParseSandboxID(v.ID)
	drop := func(why string) {
		e.cfg.Log.Info("dropping a sandbox's record", "sandbox", v.ID, "why", why)
		if err := e.journal.note(record{Sandbox: v1.Sandbox{ID: v.ID}, Removed: true}); err != nil {
			e.cfg.Log.Error("journal a removal", "sandbox", v.ID, "err", err)
		}
	}
	switch {
	case err != nil:
		drop("its id is not one")
		return
	case epoch != e.epoch:
		drop("the machine restarted") // whatever is left on disk is removed as unexplained
		return
	case v.State == v1.StateCreating:
		drop("its create never finished")
		return
	}
	stood := e.recoverState(&v)
	s := newSandbox(b, rec.Image, v)
	e.hear(s)
	s.stood = rec.Stood + stood
	e.countPaused("", v.State)
	s.meter.restore(e.meters[v.ID])
	e.mu.Lock()
	e.sandboxes[v.ID] = s
	if v.IdempotencyKey != "" {
		e.keys[v.IdempotencyKey] = v.ID
	}
	e.mu.Unlock()
	e.admit.force(&s.share, v.State == v1.StatePaused)
	switch {
	case b == nil:
		e.cfg.Log.Error("a sandbox is out of reach: its backend is not usable now", "sandbox", v.ID, "backend", v.Spec.Backend)
		e.outOfReach(s, rec.Handle, nil)
	case v.State == v1.StateStopping:
		e.retryLater(s)
	case !live(v.State):
		e.giveBack(s)
		e.limit(s)
	default:
		limit := e.cfg.AdoptTime
		if limit <= 0 {
			limit = adoptTime
		}
		s.create, s.cancel = context.WithTimeout(context.WithoutCancel(ctx), limit)
		e.limit(s)
		if !e.adopt(ctx, s, rec.Handle, stood) {
			e.adoptLater(s, rec.Handle, stood)
			return
		}
		s.cancel()
	}
	close(s.created)
}

// adopt tries to take over a sandbox that ran. It returns false if it may do so later.
func (e *Edge) adopt(ctx context.Context, s *sandbox, handle json.RawMessage, stood time.Duration) (settled bool) {
	v := s.snapshot()
	instance, err := s.backend.Adopt(ctx, backend.Spec{ID: v.ID, Generation: 1, Sandbox: v.Spec, Image: s.image, Paused: v.State == v1.StatePaused}, handle)
	switch {
	case errors.Is(err, errs.SandboxLost):
		e.ended(ctx, s, err)
		return true
	case err != nil:
		e.cfg.Log.Error("a sandbox cannot be adopted now", "sandbox", v.ID, "err", err)
		s.unadopted = err
		return false
	}
	s.mu.Lock()
	if live(s.view.State) { // else it is being removed, which the backend does by its id
		s.instance = instance
	}
	s.mu.Unlock()
	e.noteOOM(s, nil) // while nobody looked
	e.watch(s)
	if stood > 0 {
		e.wg.Go(func() { e.tellStood(s, stood) })
	}
	return true
}

// adoptLater tries again until the time for it is over or the sandbox is removed. Until
// then it is shown as it was, and what is asked of it waits.
func (e *Edge) adoptLater(s *sandbox, handle json.RawMessage, stood time.Duration) {
	e.wg.Go(func() {
		defer s.cancel()
		defer close(s.created)
		ctx := s.create
		for wait := adoptMin; ; wait = min(2*wait, adoptMax) {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				if live(s.snapshot().State) {
					e.outOfReach(s, handle, s.unadopted)
				}
				return
			case <-e.stop:
				return
			}
			if e.adopt(ctx, s, handle, stood) {
				return
			}
		}
	})
}

// ended records that a sandbox did not survive its edge's absence and cleans up.
func (e *Edge) ended(ctx context.Context, s *sandbox, err error) {
	cause := errs.New(errs.SandboxLost, "edge.adopt", "the sandbox ended while its edge was away").Because(err)
	cause.Node, cause.Sandbox = e.id, s.snapshot().ID
	e.fail(ctx, s, cause)
}

// fail records that nothing of a sandbox works any more, and removes what is left of it; its record stays
// until somebody removes it. What cannot be removed now the reconciler tries again.
func (e *Edge) fail(ctx context.Context, s *sandbox, cause *errs.Error) {
	id := cause.Sandbox
	e.cfg.Log.Warn("a sandbox is lost", "sandbox", id, "err", cause)
	if terr := e.transition(s, v1.StateFailed, func(v *v1.Sandbox) {
		now := e.cfg.Now()
		v.EndedAt = &now
		v.Error = v1.ProblemOf(cause)
	}); terr != nil {
		e.cfg.Log.Error("record a lost sandbox", "sandbox", id, "err", terr)
		if s.snapshot().State == v1.StateStopping { // its removal does the rest
			return
		}
	}
	s.stopPacks()
	s.release(cause)
	if derr := e.erase(ctx, s.backend, id); derr != nil {
		e.cfg.Log.Error("clean up a lost sandbox", "sandbox", id, "err", derr)
		return
	}
	e.giveBack(s)
}

// outOfReach shows a sandbox that may well run, but cannot be used by this process. Its
// record stays as it is: a later start adopts it, or finishes its removal.
func (e *Edge) outOfReach(s *sandbox, handle json.RawMessage, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := errs.New(errs.BackendUnusable, "edge.adopt", "the sandbox is out of reach: its backend did not work when the node started").Because(cause)
	x.Node, x.Sandbox = e.id, s.view.ID
	x.With("backend", string(s.view.Spec.Backend))
	v := s.view
	v.Generation++
	if err := e.journal.note(record{Sandbox: v, Image: s.image, Handle: handle, Stood: s.stood}); err != nil {
		e.cfg.Log.Error("journal a sandbox out of reach", "sandbox", v.ID, "err", err)
	}
	v.Error = v1.ProblemOf(x)
	if live(v.State) {
		v.State = v1.StateFailed
	}
	e.show(s, v)
}

// recoverState makes of a pause or resume that the edge's death cut off a sandbox that runs, as the
// backend does when it adopts it, and returns for how long it has stood still.
func (e *Edge) recoverState(v *v1.Sandbox) (stood time.Duration) {
	if v.State != v1.StatePausing && v.State != v1.StateResuming {
		return 0
	}
	v.State = v1.StateRunning
	if v.PausedAt != nil {
		stood = max(0, e.cfg.Now().Sub(*v.PausedAt))
	}
	v.PausedAt, v.PauseReason = nil, ""
	return stood
}
