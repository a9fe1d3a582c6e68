package lazy

import (
	"context"
	"time"

	"dsec/api/v1/errs"
)

// Abandoned stands in for a process that died and does not come back, so that no
// reader waits for ever: what is filled is served, all else fails with EIO. It lets
// go of each blob once it is not mounted any more, and returns when ctx ends or
// nothing is held. A keeper calls it.
func Abandoned(ctx context.Context, dir string, opts Options) error {
	if err := ctx.Err(); err != nil {
		return nil
	}
	opts.Reopen = func(context.Context, string, int64) (Filler, error) {
		e := errs.New(errs.EdgeUnreachable, phase, "the edge is gone")
		e.Retryable = false
		return nil, e
	}
	opts.SaveEvery = time.Second
	c, err := Open(ctx, dir, opts)
	if err != nil {
		return err
	}
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return c.Close()
		case <-t.C:
		}
		if len(c.Unclaimed()) == 0 {
			return c.Close()
		}
	}
}
