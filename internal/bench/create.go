package bench

import (
	"context"
	"time"
)

// Create measures from the create to the first answered exec of `true`. With hold all
// stay alive until the end and their removal is a second result, "rm"; without, each
// is removed by its worker at once, outside the latency but inside the rate.
func Create(ctx context.Context, t Target, l Load, hold bool) ([]Result, error) {
	var b boxes
	r, err := run(ctx, "create", t.Name(), l, func(ctx context.Context, _, _ int) (time.Duration, error) {
		if !hold {
			return cycle(ctx, t)
		}
		return timed(func() error {
			box, err := t.Create(ctx)
			if err != nil {
				return err
			}
			b.add(box)
			return box.Exec(ctx, "true")
		})
	})
	if !hold {
		r.Notes = append(r.Notes, "the rate includes the removal; --hold measures both apart")
		return []Result{r}, err
	}
	rm, rerr := b.remove(ctx, t.Name(), l.Parallel)
	if err == nil {
		err = rerr
	}
	return []Result{r, rm}, err
}

// cycle creates, runs a command and removes. It returns how long the first two took.
func cycle(ctx context.Context, t Target) (time.Duration, error) {
	var box Box
	d, err := timed(func() (err error) {
		if box, err = t.Create(ctx); err != nil {
			return err
		}
		return box.Exec(ctx, "true")
	})
	if box == nil {
		return d, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	if rerr := box.Remove(ctx); err == nil {
		err = rerr
	}
	return d, err
}
