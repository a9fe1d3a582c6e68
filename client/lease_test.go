package client_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/client"
)

// A server that does not answer for a while does not end the renewals; the sandbox's end does.
func TestKeepAliveRenewsUntilTheSandboxIsGone(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	sb, err := c.Create(t.Context(), client.Spec{Image: "busybox", Lease: 1})
	if err != nil {
		t.Fatal(err)
	}
	const renew = "POST /v1/sandboxes/{id}/renew"
	s.Fail(renew, 2, errs.New(errs.EdgeUnreachable, "test", "no answer"))
	var renewed atomic.Int32
	s.Before(renew, func() { renewed.Add(1) })
	done := make(chan error, 1)
	go func() { done <- sb.KeepAlive(t.Context()) }()
	for deadline := time.Now().Add(20 * time.Second); renewed.Load() < 5; time.Sleep(5 * time.Millisecond) {
		select {
		case err := <-done:
			t.Fatalf("it ended: %v", err)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d renewals", renewed.Load())
		}
	}
	if err := sb.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, errs.Gone) {
		t.Errorf("after the removal: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, x := range []*client.Sandbox{sb, c.Sandbox(sb.ID())} {
		if err := x.KeepAlive(ctx); err != nil {
			t.Errorf("after the caller's end: %v", err)
		}
	}
}
