package bench

import (
	"context"
	"fmt"
	"time"

	"dsec/client"
)

// Session measures the command line in persistent shells: one session for each worker,
// spread over n sandboxes.
func Session(ctx context.Context, d DSec, l Load, n int, line string) (r Result, err error) {
	if err := l.validate(); err != nil {
		return Result{}, err
	}
	b, err := fill(ctx, d, n, l.Parallel)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = removed(ctx, b, d.Name(), l.Parallel, err) }()
	sessions := make([]*client.Session, l.Parallel)
	for i := range sessions {
		if sessions[i], err = b.all[i%n].(dsecBox).sb.OpenSession(ctx, client.SessionOptions{}); err != nil {
			return Result{}, err
		}
		if err := sessionOp(ctx, sessions[i], line); err != nil {
			return Result{}, err
		}
	}
	r, err = run(ctx, "session", d.Name(), l, func(ctx context.Context, worker, _ int) (time.Duration, error) {
		return timed(func() error { return sessionOp(ctx, sessions[worker], line) })
	})
	r.extra("sandboxes", float64(n))
	return r, err
}

func sessionOp(ctx context.Context, s *client.Session, line string) error {
	res, err := s.Sh(ctx, line)
	if err == nil && res.Code != 0 {
		err = fmt.Errorf("%q: exit code %d: %s", line, res.Code, res.Stderr)
	}
	return err
}

func errNotRemoved(rm Result) error {
	return fmt.Errorf("%d of %d sandboxes were not removed; the first: %w", rm.Errors, rm.N, rm.first)
}
