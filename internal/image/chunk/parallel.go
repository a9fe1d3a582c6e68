package chunk

import (
	"context"
	"sync"

	"dsec/api/v1/errs"
)

// each does f for every item, n at a time, and returns the first error, after which
// no more is begun.
func each[T any](ctx context.Context, n int, items []T, f func(context.Context, T) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan T)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var first error
	for range min(n, len(items)) {
		wg.Go(func() {
			for item := range next {
				if err := f(ctx, item); err != nil {
					mu.Lock()
					if first == nil {
						first = err
					}
					mu.Unlock()
					cancel(err)
				}
			}
		})
	}
feed:
	for _, item := range items {
		select {
		case next <- item:
		case <-ctx.Done():
			break feed
		}
	}
	close(next)
	wg.Wait()
	if first != nil {
		return first
	}
	return errs.Wrap(errs.StoreUnavailable, phase, "go through the store", ctx.Err())
}
