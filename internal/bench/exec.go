package bench

import (
	"context"
	"time"
)

// Exec measures `true` in n sandboxes, spread over the workers. Each sandbox has run one
// command before the clock starts.
func Exec(ctx context.Context, t Target, l Load, n int) (r Result, err error) {
	b, err := fill(ctx, t, n, l.Parallel)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = removed(ctx, b, t.Name(), l.Parallel, err) }()
	for _, x := range b.all {
		if err := x.Exec(ctx, "true"); err != nil {
			return Result{}, err
		}
	}
	r, err = run(ctx, "exec", t.Name(), l, func(ctx context.Context, worker, _ int) (time.Duration, error) {
		return timed(func() error { return b.all[worker%n].Exec(ctx, "true") })
	})
	r.extra("sandboxes", float64(n))
	return r, err
}

// removed cleans up after a benchmark and reports a removal that did not work.
func removed(ctx context.Context, b *boxes, target string, parallel int, err error) error {
	rm, rerr := b.remove(ctx, target, parallel)
	if err == nil && rerr != nil {
		return rerr
	}
	if err == nil && rm.Errors > 0 {
		return errNotRemoved(rm)
	}
	return err
}
