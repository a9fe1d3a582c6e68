package client

import (
	"context"
	"errors"
	"time"

	"dsec/api/v1/errs"
)

// Renew renews the lease of a sandbox that was created with Spec.Lease: it is removed when
// it was not renewed for so long. [Sandbox.KeepAlive] does it again and again.
func (s *Sandbox) Renew(ctx context.Context) error {
	return s.manage(ctx, "renew", nil, nil)
}

// renewals are how often a lease is renewed: some may fail.
const renewals = 4

// KeepAlive renews the sandbox's lease until ctx ends, when it returns nil, or the sandbox
// is gone. While the server does not answer it goes on trying, more often. The sandbox must
// come from a create, which says how long its lease is; without one KeepAlive only waits.
func (s *Sandbox) KeepAlive(ctx context.Context) error {
	every := s.info.Spec.Lease.Duration() / renewals
	if every <= 0 {
		<-ctx.Done()
		return nil
	}
	for wait := every; sleep(ctx, wait); {
		rctx, cancel := context.WithTimeout(ctx, every)
		err := s.Renew(rctx)
		cancel()
		switch {
		case err == nil:
			wait = every
		case errors.Is(err, errs.Gone) || errors.Is(err, errs.Lost) || errors.Is(err, errs.NotFound) ||
			errors.Is(err, errs.Unauthenticated) || errors.Is(err, errs.Forbidden):
			if ctx.Err() != nil {
				return nil
			}
			return err
		default:
			wait = min(every/renewals, time.Second)
		}
	}
	return nil
}
