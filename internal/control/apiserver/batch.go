package apiserver

import (
	"context"
	"slices"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/watcher"
)

const (
	// askMost is how many ids an edge is asked for in one call: their list must fit a message.
	askMost = 10000
	// askTimeout is how long an edge that was asked may tell no outcome.
	askTimeout = 2 * time.Minute
)

// chosen returns the sandboxes that ids or labels select.
func (s *Server) chosen(ids []string, labels map[string]string) ([]string, error) {
	switch {
	case len(ids) > 0 && len(labels) > 0:
		return nil, badField("labels", "give ids or labels, not both")
	case len(ids) == 0 && len(labels) == 0:
		return nil, badField("ids", "give ids or labels")
	case len(ids) == 0:
		for _, sb := range s.cfg.Registry.List(watcher.Filter{Labels: labels}).Items {
			ids = append(ids, sb.ID)
		}
	}
	return ids, nil
}

// batch is one operation on many sandboxes.
type batch[E, R any] struct {
	// ask makes one call of an edge, which tells an outcome for each id.
	ask func(ctx context.Context, node v1.Node, ids []string, each func(E) error) error
	// id says of which sandbox an edge's outcome is.
	id func(of E) string
	// take turns an edge's outcome into the answer.
	take func(node v1.Node, of E) R
	// fail is the answer for an id of which no edge told an outcome.
	fail func(id string, err error) R
}

// answerEach answers a request with a line for each id, in the order in which they end.
func answerEach[E, R any](ctx context.Context, s *Server, req *request, ids []string, b batch[E, R]) error {
	out := s.newLines(req, "application/x-ndjson")
	defer out.end()
	if err := out.start(); err != nil {
		return err
	}
	return onEdges(ctx, s, ids, b, func(r R) error { return out.write(r) })
}

// onEdges asks each edge that has some of ids, all at once, and tells exactly one answer for
// each id: as often as it is among ids. A failure to tell ends all calls, and is returned.
func onEdges[E, R any](ctx context.Context, s *Server, ids []string, b batch[E, R], tell func(R) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	times := make(map[string]int, len(ids))
	var mu sync.Mutex // one word at a time
	say := func(id string, r R) error {
		mu.Lock()
		defer mu.Unlock()
		for range times[id] {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			if err := tell(r); err != nil {
				cancel(err)
				return err
			}
		}
		return nil
	}
	type part struct {
		node v1.Node
		ids  []string
	}
	parts := map[string]*part{}
	absent := map[string]error{}
	for _, id := range ids {
		if times[id]++; times[id] > 1 {
			continue
		}
		node, _, err := s.cfg.Registry.Locate(id)
		if err != nil {
			absent[id] = err
			continue
		}
		p := parts[node.ID]
		if p == nil {
			p = &part{node: node}
			parts[node.ID] = p
		}
		p.ids = append(p.ids, id)
	}
	var wg sync.WaitGroup
	for _, p := range parts {
		wg.Go(func() {
			for ids := range slices.Chunk(p.ids, askMost) {
				askEdge(ctx, p.node, ids, b, say)
			}
		})
	}
	for id, err := range absent {
		if say(id, b.fail(id, err)) != nil {
			break
		}
	}
	wg.Wait()
	return context.Cause(ctx)
}

// askEdge makes one call of an edge. What the edge leaves without an outcome has failed, with the
// call's error.
func askEdge[E, R any](ctx context.Context, node v1.Node, ids []string, b batch[E, R], say func(string, R) error) {
	left := make(map[string]bool, len(ids))
	for _, id := range ids {
		left[id] = true
	}
	call, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := errs.New(errs.DeadlineExceeded, "edge.call", "the edge told no outcome for "+askTimeout.String())
	silent.Node = node.ID
	timer := time.AfterFunc(askTimeout, func() { cancel(silent) })
	defer timer.Stop()
	err := b.ask(call, node, ids, func(r E) error {
		timer.Reset(askTimeout)
		id := b.id(r)
		if !left[id] { // told before, or never asked for
			return nil
		}
		delete(left, id)
		return say(id, b.take(node, r))
	})
	if ctx.Err() != nil {
		return // nobody is there
	}
	if cause := context.Cause(call); cause != nil {
		err = cause
	}
	if err == nil && len(left) > 0 {
		err = errs.New(errs.ProtocolError, "edge.call", "the edge told no outcome for the sandbox")
	}
	for _, id := range ids {
		if !left[id] {
			continue
		}
		e := *errs.Of(err)
		e.Node, e.Sandbox = node.ID, id
		if say(id, b.fail(id, &e)) != nil {
			return
		}
	}
}

// completeProblem takes what an edge said of one sandbox of a call, if it was a failure.
func (s *Server) completeProblem(req *request, node v1.Node, id string, p *v1.Problem) {
	if p == nil {
		return
	}
	s.noteGone(id, p.Err())
	p.RequestID, p.Node, p.Sandbox = req.id, node.ID, id
}
