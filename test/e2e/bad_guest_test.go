package e2e

import (
	"errors"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

// The guest keeps the limits of commands; a guest that is stopped keeps none.
func TestTimeLimitsHoldWhenTheGuestIsStopped(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	session, err := sb.OpenSession(t.Context(), client.SessionOptions{})
	if err != nil {
		t.Fatal(err)
	}
	running, err := sb.Start(t.Context(), client.Cmd{Path: "sleep", Args: []string{"1000"}, IdleTimeout: 2 * time.Second}, client.IO{})
	if err != nil {
		t.Fatal(err)
	}
	pid, err := shared.GuestPID(sb.ID())
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	cmd := client.Cmd{Path: "true", Timeout: 2 * time.Second}
	line := client.SessionCommand{Line: "true", Timeout: 2 * time.Second}
	var wg sync.WaitGroup
	for name, do := range map[string]func() error{
		"exec":         func() error { _, err := sb.Exec(t.Context(), cmd); return err },
		"start":        func() error { _, err := sb.Start(t.Context(), cmd, client.IO{}); return err },
		"wait":         func() error { _, err := running.Wait(); return err },
		"session exec": func() error { _, err := session.Exec(t.Context(), line); return err },
		"session run":  func() error { _, err := session.Run(t.Context(), line, nil, nil); return err },
	} {
		wg.Go(func() {
			start := time.Now()
			if err := do(); !errors.Is(err, errs.GuestUnreachable) || time.Since(start) > bed.Patience/2 {
				t.Errorf("%s: %v after %v", name, err, time.Since(start))
			}
		})
	}
	wg.Go(func() { shared.Fails(t, 125, "guest_unreachable", "exec", "--timeout", "2s", sb.ID(), "--", "true") })
	wg.Wait()
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if res, err := sb.Exec(t.Context(), cmd); err != nil || res.Code != 0 {
		t.Errorf("when it goes on: %v, %v", res, err)
	}
}
