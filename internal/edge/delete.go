package edge

import (
	"context"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// removeTime bounds the removal of one sandbox, whoever asked for it, once it has its turn.
const removeTime = 30 * time.Second

// removals are at work at once; others wait in the order that they came. Each frees a filter from
// a queue of the kernel, which must not get thousands at once (see container/seccomp.go).
const removals = 128

// erase makes the backend remove what it has of a sandbox, when that is the next one's turn.
// ctx bounds the wait alone: what has begun goes on.
func (e *Edge) erase(ctx context.Context, b backend.Backend, id string) error {
	select {
	case e.removing <- struct{}{}:
	default: // one that need not wait goes on even if its caller has left
		select {
		case e.removing <- struct{}{}:
		case <-ctx.Done():
			return errs.Wrap(errs.DeadlineExceeded, "edge.remove", "wait for earlier removals", ctx.Err())
		case <-e.stop:
			return errs.New(errs.ShuttingDown, "edge.remove", "the node stops; its next start goes on with the removal")
		}
	}
	defer func() { <-e.removing }()
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTime)
	defer cancel()
	return b.Delete(rctx, id)
}

// remove ends a sandbox in any state and returns when nothing of it is left. Once begun
// it goes on without the caller.
func (e *Edge) remove(ctx context.Context, id string, why v1.EndReason) (*sandbox, error) {
	s := e.get(id)
	if s == nil {
		return nil, e.absent(id)
	}
	e.noteOOM(s, nil)
	return s, e.end(ctx, s, why)
}

func (e *Edge) end(ctx context.Context, s *sandbox, why v1.EndReason) error {
	if s.backend == nil { // nothing can end it now, and nothing may forget it
		return s.snapshot().Error.Err()
	}
	err := e.transition(s, v1.StateStopping, func(v *v1.Sandbox) { v.EndReason = why })
	if err == nil {
		return e.finishRemoval(ctx, s)
	}
	if s.snapshot().State != v1.StateStopping {
		return err
	}
	select { // someone else removes it
	case <-s.removed:
		return nil
	case <-ctx.Done():
		return errs.Wrap(errs.DeadlineExceeded, "edge.remove", "wait for the removal", ctx.Err())
	}
}

// finishRemoval takes a stopping sandbox to its end. Also run for those that a crash
// left stopping. If ctx ends before its turn comes, it is tried again later.
func (e *Edge) finishRemoval(ctx context.Context, s *sandbox) error {
	s.cancel()
	select { // a create under way undoes itself; then there is one owner again
	case <-s.created:
	case <-time.After(removeTime):
		e.retryLater(s) // nobody else would: it is stopping, and later removals wait for this one
		return errs.New(errs.DeadlineExceeded, "edge.remove", "the create that was under way does not end")
	}
	v := s.snapshot()
	s.stopPacks()
	s.release(goneNow(v))
	if err := e.erase(ctx, s.backend, v.ID); err != nil {
		// Still stopping: the reconciler and the next removal try again.
		e.retryLater(s)
		return err
	}
	e.forget(s)
	return nil
}

// retryEvery is how soon a removal that failed is tried again.
const retryEvery = 2 * time.Second

func (e *Edge) retryLater(s *sandbox) {
	e.wg.Go(func() {
		select {
		case <-time.After(retryEvery):
		case <-e.stop:
			return
		}
		if err := e.finishRemoval(context.Background(), s); err != nil {
			e.cfg.Log.Error("remove sandbox", "sandbox", s.snapshot().ID, "err", err)
		}
	})
}

// forget drops a sandbox of which nothing is left from the table and the journal.
func (e *Edge) forget(s *sandbox) {
	v := s.snapshot()
	if e.get(v.ID) != s { // done already
		return
	}
	// On record before it leaves the table, so that its id is never one that nobody has heard of.
	if err := e.journal.note(removal(v.ID, v1.EndingOf(&v, e.cfg.Now()))); err != nil {
		e.cfg.Log.Error("journal a removal", "sandbox", v.ID, "err", err) // the next start finds nothing left and forgets it too
	}
	e.mu.Lock()
	if e.sandboxes[v.ID] != s {
		e.mu.Unlock()
		return
	}
	delete(e.sandboxes, v.ID)
	e.past.add(s, e.cfg.Now())
	if e.keys[v.IdempotencyKey] == v.ID {
		delete(e.keys, v.IdempotencyKey)
	}
	e.mu.Unlock()
	s.unlimit()
	e.giveBack(s)
	e.forgetPack(s)
	e.dropTemporary(s.image)
	e.feed.removed(v.ID)
	close(s.removed)
}

// giveBack returns what the sandbox was admitted with.
func (e *Edge) giveBack(s *sandbox) { e.admit.put(&s.share) }

// absent says what became of an id that is not in the table.
func (e *Edge) absent(id string) error {
	node, epoch, err := v1.ParseSandboxID(id)
	how, gone := e.journal.removed(id)
	x := errs.New(errs.SandboxNotFound, "edge.find", "no sandbox has this id")
	switch {
	case err == nil && node == e.id && epoch < e.epoch:
		x = errs.New(errs.SandboxLost, "edge.find", "the sandbox was lost when its node restarted")
	case gone:
		x = how.Err("edge.find", id)
	}
	x.Node, x.Sandbox = e.id, id
	return x
}
