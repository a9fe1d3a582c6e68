package edge

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

const (
	// reconcileEvery is about how long after a round the next one begins.
	reconcileEvery = time.Minute
	// reconcileTime bounds the listing of one backend.
	reconcileTime = 30 * time.Second
	// atOnce removals of one round are at work at the same time, of those that all the edge may have.
	atOnce = 8
)

// Reconciled counts what the reconciler found since the edge started.
type Reconciled struct {
	Rounds    int64 `json:"rounds"`
	Orphans   int64 `json:"orphans"`   // removed: no record explained them
	Lost      int64 `json:"lost"`      // of which nothing was left, though their record said that they ran
	Remnants  int64 `json:"remnants"`  // removed: what was left of failed sandboxes
	Forgotten int64 `json:"forgotten"` // journal lines of sandboxes that were gone
	Failed    int64 `json:"failed"`    // removals that failed, to be tried again in the next round
}

// reconciler compares records with what the backends have, both ways, in rounds. It acts on levels, not on
// events: whatever went wrong before, and however, a difference that is there in two rounds one after the
// other is one that nobody is at work on, and is ended. A round costs one listing for each backend and a look at each
// record in memory.
//
// It cannot take what is being made for an orphan: a sandbox is in the table before anything of it exists,
// and leaves it after. While an orphan is being removed, its id is refused to creates.
type reconciler struct {
	e *Edge

	rounds, orphans, lost, remnants, forgotten, failed atomic.Int64

	doubtful map[string]doubt // what the last round saw; of the one who runs rounds
	removing map[string]bool  // orphans, with the edge's mu
}

// doubt is a difference between a record and the machine.
type doubt int

const (
	orphan   doubt = 1 + iota // there, without a record
	vanished                  // not there, and its record says that it runs
	remnant                   // there, and its record says that it failed
	over                      // not there, and its record says that it failed: it may hold what it was admitted with
	stale                     // in the journal alone
)

func newReconciler(e *Edge) *reconciler {
	return &reconciler{e: e, doubtful: map[string]doubt{}, removing: map[string]bool{}}
}

func (r *reconciler) counts() Reconciled {
	return Reconciled{
		Rounds: r.rounds.Load(), Orphans: r.orphans.Load(), Lost: r.lost.Load(), Remnants: r.remnants.Load(),
		Forgotten: r.forgotten.Load(), Failed: r.failed.Load(),
	}
}

// run does rounds until the edge stops, between half and one and a half times every apart, so that the
// nodes of a cluster that started together do not go on together.
func (r *reconciler) run(every time.Duration) {
	for {
		wait := time.NewTimer(every/2 + time.Duration(r.e.cfg.Random()%uint64(every)))
		select {
		case <-wait.C:
		case <-r.e.stop:
			wait.Stop()
			return
		}
		r.round(context.Background())
	}
}

// round looks once and ends what was seen the last time too.
func (r *reconciler) round(ctx context.Context) {
	now := map[string]doubt{}
	for kind, b := range r.e.backends {
		lctx, cancel := context.WithTimeout(ctx, reconcileTime)
		ids, err := b.List(lctx)
		cancel()
		if err != nil { // nothing can be said of this backend's now
			r.e.cfg.Log.Error("list sandboxes", "backend", kind, "err", err)
			continue
		}
		r.look(b, ids, now)
	}
	for _, id := range r.e.journal.ids() {
		if r.e.get(id) == nil && now[id] == 0 {
			now[id] = stale
		}
	}
	var work []func()
	for id, d := range now {
		if r.doubtful[id] == d {
			work = append(work, func() { r.settle(id, d) })
		}
	}
	r.doubtful = now
	inParallel(work)
	r.rounds.Add(1)
}

// look adds to doubts what the ids that b has, and the records of b's sandboxes, do not agree on.
func (r *reconciler) look(b backend.Backend, ids []string, doubts map[string]doubt) {
	there := make(map[string]bool, len(ids))
	for _, id := range ids {
		there[id] = true
	}
	for _, id := range r.e.unexplained(ids) {
		doubts[id] = orphan
	}
	r.e.mu.Lock()
	all := make([]*sandbox, 0, len(r.e.sandboxes))
	for _, s := range r.e.sandboxes {
		if s.backend == b {
			all = append(all, s)
		}
	}
	r.e.mu.Unlock()
	for _, s := range all {
		s.mu.Lock()
		v, instance := s.view, s.instance
		s.mu.Unlock()
		switch {
		case v.State == v1.StateCreating || v.State == v1.StateStopping: // somebody is at work on it, and does not give up
		case v.State == v1.StateFailed && outOfReachNow(&v): // it may well run
		case v.State == v1.StateFailed && there[v.ID]:
			doubts[v.ID] = remnant
		case v.State == v1.StateFailed:
			doubts[v.ID] = over
		case v.State != v1.StateFailed && instance != nil && !there[v.ID]:
			doubts[v.ID] = vanished
		}
	}
}

// outOfReachNow tells whether v failed only in that this process cannot use it.
func outOfReachNow(v *v1.Sandbox) bool {
	return v.Error != nil && v.Error.Code == string(errs.BackendUnusable)
}

// settle ends a difference.
func (r *reconciler) settle(id string, d doubt) {
	e, s := r.e, r.e.get(id)
	switch d {
	case orphan:
		r.removeOrphan(id)
	case stale:
		if s != nil {
			return
		}
		e.cfg.Log.Warn("forgetting a record of a sandbox that is gone", "sandbox", id)
		if err := e.journal.note(record{Sandbox: v1.Sandbox{ID: id}, Removed: true}); err != nil {
			e.cfg.Log.Error("journal a removal", "sandbox", id, "err", err)
			return
		}
		r.forgotten.Add(1)
	case vanished:
		if s == nil {
			return
		}
		r.lost.Add(1)
		cause := errs.New(errs.SandboxLost, "edge.reconcile", "nothing of the sandbox is left on its node")
		cause.Node, cause.Sandbox = e.id, id
		e.fail(context.Background(), s, cause)
	case remnant:
		if s == nil || s.snapshot().State != v1.StateFailed {
			return
		}
		e.cfg.Log.Warn("removing what is left of a failed sandbox", "sandbox", id)
		if err := e.erase(context.Background(), s.backend, id); err != nil {
			r.failed.Add(1)
			e.cfg.Log.Error("clean up a failed sandbox", "sandbox", id, "err", err)
			return
		}
		r.remnants.Add(1)
		e.giveBack(s)
	case over:
		if s != nil && s.snapshot().State == v1.StateFailed {
			e.giveBack(s)
		}
	}
}

// removeOrphan removes what the backends have under an id, unless it has a record by now.
func (r *reconciler) removeOrphan(id string) {
	e := r.e
	e.mu.Lock()
	if e.sandboxes[id] != nil || r.removing[id] {
		e.mu.Unlock()
		return
	}
	r.removing[id] = true
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(r.removing, id)
		e.mu.Unlock()
	}()
	e.cfg.Log.Warn("removing a sandbox that no record explains", "sandbox", id)
	for _, b := range e.backends { // what one does not have it removes at once
		if err := e.erase(context.Background(), b, id); err != nil {
			r.failed.Add(1)
			e.cfg.Log.Error("remove a sandbox that no record explains", "sandbox", id, "backend", b.Kind(), "err", err)
			return
		}
	}
	r.orphans.Add(1)
}

// unexplained returns those of ids that no record explains.
func (e *Edge) unexplained(ids []string) (orphans []string) {
	e.mu.Lock()
	for _, id := range ids {
		if e.sandboxes[id] == nil {
			orphans = append(orphans, id)
		}
	}
	e.mu.Unlock()
	slices.Sort(orphans)
	return slices.Compact(orphans)
}

// inParallel does work, some of it at a time, and returns when all is done.
func inParallel(work []func()) {
	var wg sync.WaitGroup
	var next atomic.Int64
	for range min(atOnce, len(work)) {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(work) {
					return
				}
				work[i]()
			}
		})
	}
	wg.Wait()
}
