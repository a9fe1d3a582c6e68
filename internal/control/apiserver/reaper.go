package apiserver

import (
	"context"
	"errors"
	"sync"
	"time"

	"dsec/api/v1/errs"
)

const (
	reapTimeout  = 60 * time.Second
	reapParallel = 64
	reapRetry    = 100 * time.Millisecond
	reapRetryMax = 5 * time.Second
)

// reaper removes sandboxes that nobody knows of: made for a client that went away, or by
// an edge whose answer was lost. It tries for a while; an edge that stays away loses its
// sandboxes anyway, or is asked by whoever lists them.
type reaper struct {
	s     *Server
	slots chan struct{}
	wg    sync.WaitGroup
}

func newReaper(s *Server) *reaper { return &reaper{s: s, slots: make(chan struct{}, reapParallel)} }

// removal is closed when a removal has ended, well or not.
type removal <-chan struct{}

// reap removes a sandbox in the background.
func (r *reaper) reap(nodeID, id string) removal {
	ended := make(chan struct{})
	r.wg.Go(func() {
		defer close(ended)
		// Detached from the request, and from the server's end too: it is bounded by itself.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.s.ctx), reapTimeout)
		defer cancel()
		select {
		case r.slots <- struct{}{}:
			defer func() { <-r.slots }()
		case <-ctx.Done():
		}
		if err := r.remove(ctx, nodeID, id); err != nil {
			r.s.cfg.Log.Error("a sandbox whose create was given up may be left", "sandbox", id, "node", nodeID, "err", err)
			r.s.metrics.reaps.WithLabelValues("error").Inc()
			return
		}
		r.s.metrics.reaps.WithLabelValues("ok").Inc()
	})
	return ended
}

func (r *reaper) remove(ctx context.Context, nodeID, id string) error {
	asked := false
	for wait := reapRetry; ; wait = min(2*wait, reapRetryMax) {
		node, err := r.s.cfg.Registry.Node(nodeID)
		if err != nil {
			return nil // the node is gone, and the sandbox with it
		}
		_, err = r.s.cfg.Edges.Delete(ctx, node, id)
		switch {
		case errors.Is(err, errs.NotFound) && !asked:
			asked = true // the create itself may still be on its way there: ask once more
		case err == nil, errors.Is(err, errs.NotFound), errors.Is(err, errs.Gone), errors.Is(err, errs.Lost):
			r.s.cfg.Registry.Remove(id)
			return nil
		case ctx.Err() != nil, r.s.ctx.Err() != nil:
			return err
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return err
		case <-r.s.ctx.Done():
			t.Stop()
			return err
		}
	}
}

func (r *reaper) wait() { r.wg.Wait() }
