package watcher

import (
	"context"
	"fmt"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// ring keeps the last events; revisions are consecutive.
type ring struct {
	buf   []v1.Event
	cap   int
	first uint64 // revision of the oldest kept (or, when empty, of the next)
	start int    // its position
}

func (g *ring) add(e v1.Event) {
	if len(g.buf) < g.cap {
		g.buf = append(g.buf, e)
		return
	}
	g.buf[g.start] = e
	g.start = (g.start + 1) % g.cap
	g.first++
}

func (g *ring) at(rev uint64) *v1.Event {
	return &g.buf[(g.start+int(rev-g.first))%len(g.buf)]
}

func (r *Registry) emit(e v1.Event) {
	r.rev++
	e.Revision, e.Time = r.rev, r.cfg.Now().UTC()
	r.events.add(e)
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

// Revision returns the newest revision.
func (r *Registry) Revision() uint64 {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.rev
}

// EventFilter selects events.
type EventFilter struct {
	Labels map[string]string // of the sandbox; node events then do not match
}

func (f *EventFilter) match(e *v1.Event) bool {
	return len(f.Labels) == 0 || e.Sandbox != nil && hasLabels(e.Sandbox, f.Labels)
}

// Events returns events after revision from (0: from the oldest kept on), at most max,
// and the revision to go on from. It does not wait. errs.RevisionCompacted: events after
// from are no longer kept, or from is not of this server.
func (r *Registry) Events(from uint64, f EventFilter, max int) ([]v1.Event, uint64, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if from == 0 {
		from = r.events.first - 1
	}
	if from < r.events.first-1 || from > r.rev {
		return nil, 0, errs.New(errs.RevisionCompacted, "events",
			fmt.Sprintf("revision %d is not kept; kept are those from %d to %d", from, r.events.first-1, r.rev))
	}
	var out []v1.Event
	for from < r.rev && len(out) < max {
		from++
		if e := r.events.at(from); f.match(e) {
			out = append(out, *e)
		}
	}
	return out, from, nil
}

// Wait returns once the revision is above rev.
func (r *Registry) Wait(ctx context.Context, rev uint64) error {
	return r.waitFor(ctx, func() bool { return r.rev > rev })
}

// WaitNodes returns once a node event came after revision *rev, and moves *rev on.
func (r *Registry) WaitNodes(ctx context.Context, rev *uint64) error {
	return r.waitFor(ctx, func() bool {
		from := *rev
		*rev = r.rev
		if from < r.events.first-1 {
			return true // it may have been among those no longer kept
		}
		for from < r.rev {
			from++
			if r.events.at(from).Type == v1.EventNode {
				return true
			}
		}
		return false
	})
}

// WaitSynced returns once every registered edge has told all it has, or was found not
// to answer.
func (r *Registry) WaitSynced(ctx context.Context) error {
	return r.waitFor(ctx, func() bool {
		for _, n := range r.nodes {
			if !n.synced {
				return false
			}
		}
		return r.listed
	})
}

// waitFor waits for a condition that can only change with poke or emit.
func (r *Registry) waitFor(ctx context.Context, ok func() bool) error {
	for {
		r.mu.Lock()
		if ok() {
			r.mu.Unlock()
			return nil
		}
		if r.changed == nil {
			r.changed = make(chan struct{})
		}
		ch := r.changed
		r.mu.Unlock()
		select {
		case <-ch:
		case <-ctx.Done():
			return errs.Wrap(errs.DeadlineExceeded, "wait", "wait for the registry", ctx.Err())
		}
	}
}

// poke wakes waiters when something changed that is not an event.
func (r *Registry) poke() {
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}
