package edge

import (
	"context"
	"sync"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
)

// tellEach does something with each of ids, some at a time, and tells each outcome as it is known.
// When whoever asked goes away, those that have not begun are left.
func tellEach[R any](ctx context.Context, s *aether.Stream, ids []string, parallel int, do func(ctx context.Context, id string) R) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan string)
	var mu sync.Mutex // one word at a time
	var wg sync.WaitGroup
	for range min(parallel, len(ids)) {
		wg.Go(func() {
			for id := range next {
				r := do(ctx, id)
				mu.Lock()
				d, err := document(r)
				if err == nil {
					err = s.SendMessage(ctx, d)
				}
				mu.Unlock()
				if err != nil {
					cancel(err)
				}
			}
		})
	}
	for _, id := range ids {
		select {
		case next <- id:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(next)
	wg.Wait()
	return context.Cause(ctx)
}

// removeWait bounds how long one of many removals waits for its turn: several may be asked for at once.
const removeWait = 2 * time.Minute

// serveDeleteMany removes sandboxes; what has begun goes on without the caller.
func (e *Edge) serveDeleteMany(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.EdgeDelete](s)
	if err != nil {
		return nil, err
	}
	return &msg.Empty{}, tellEach(ctx, s, req.IDs, removals, func(ctx context.Context, id string) v1.EdgeDeleted {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWait)
		defer cancel()
		r := v1.EdgeDeleted{DeleteResult: v1.DeleteResult{ID: id}}
		gone, err := e.remove(ctx, id, v1.EndRequest)
		if err == nil {
			last := gone.snapshot()
			r.Sandbox = &last
		}
		r.Error = v1.ProblemOf(err)
		return r
	})
}
