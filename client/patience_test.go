package client

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	v1 "dsec/api/v1"
)

// A silent guest is given up when its command's limit and a while are over, but for what its
// sandbox is paused.
func TestPatience(t *testing.T) {
	const limit = 30 * time.Second
	for name, c := range map[string]struct {
		state func(since time.Duration) (v1.Sandbox, error)
		want  time.Duration
	}{
		"never paused": {func(time.Duration) (v1.Sandbox, error) { return v1.Sandbox{State: v1.StateRunning}, nil }, limit + guestGrace},
		"nobody knows": {func(time.Duration) (v1.Sandbox, error) { return v1.Sandbox{}, errors.New("no server") }, limit + guestGrace},
		"paused for an hour": {func(since time.Duration) (v1.Sandbox, error) {
			if since < time.Hour {
				return v1.Sandbox{State: v1.StatePaused, Pauses: 1}, nil
			}
			return v1.Sandbox{State: v1.StateRunning, Pauses: 1}, nil
		}, time.Hour + limit + guestGrace},
		"had been paused": {func(time.Duration) (v1.Sandbox, error) {
			return v1.Sandbox{State: v1.StateRunning, Pauses: 3}, nil
		}, 2 * (limit + guestGrace)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				ctx, p := patient(t.Context(), limit, 0, func(context.Context) (*v1.Sandbox, error) {
					v, err := c.state(time.Since(start))
					return &v, err
				})
				<-ctx.Done()
				if d := time.Since(start); context.Cause(ctx) != errSilent || d != c.want {
					t.Errorf("%v after %v, want after %v", context.Cause(ctx), d, c.want)
				}
				p.timer.Stop()
			})
		})
	}
}
