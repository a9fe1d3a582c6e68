package robustness

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

// A server that is told to stop in the middle of creates: what it said was made is there
// for the next start, what it said was not made is gone, and there is nothing else.
func TestStoppedServerLeavesNoHalfMadeSandbox(t *testing.T) {
	t.Parallel()
	random := bed.Random(t)
	b := bed.New(t, bed.Options{})
	made := map[string]bool{}
	for round := range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		var mu sync.Mutex
		var refused []*errs.Error
		var wg sync.WaitGroup
		for range 8 {
			c := b.Client(t)
			wg.Go(func() {
				for ctx.Err() == nil {
					sb, err := c.Create(t.Context(), client.Spec{Image: bed.Image})
					mu.Lock()
					if err == nil {
						made[sb.ID()] = true
					} else {
						refused = append(refused, client.ErrorOf(err))
					}
					mu.Unlock()
					if err != nil {
						return
					}
				}
			})
		}
		runs := b.Sandbox(t, b.Client(t), client.Spec{})
		mu.Lock()
		made[runs.ID()] = true
		mu.Unlock()
		held := make(chan error, 1) // an operation that is under way holds up nothing
		go func() { held <- func() error { _, err := runs.Run(t.Context(), "sleep", "600"); return err }() }()
		time.Sleep(time.Duration(random.Int64N(int64(300 * time.Millisecond))))
		begin := time.Now()
		if err := syscall.Kill(b.PID(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		<-b.Exited()
		if took := time.Since(begin); took > 15*time.Second {
			t.Errorf("it took %v to stop", took)
		}
		cancel()
		wg.Wait()
		if err := <-held; err == nil || errors.Is(err, errs.SandboxLost) || errors.Is(err, errs.SandboxGone) {
			t.Errorf("a command while the server stops: %v", err)
		}
		if err := b.Up(t.Context()); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		c := b.Client(t)
		for _, e := range refused {
			if !e.Retryable {
				t.Errorf("round %d: a create that the stop met: %+v", round, e)
			}
			if e.Sandbox == "" {
				continue
			}
			if _, err := c.Get(t.Context(), e.Sandbox); !errors.Is(err, errs.SandboxGone) && !errors.Is(err, errs.SandboxNotFound) {
				t.Errorf("round %d: %s was not made (%v), and is asked for: %v", round, e.Sandbox, e, err)
			}
		}
		there := 0
		for sb, err := range c.All(t.Context(), client.ListOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			if there++; !made[sb.ID] {
				t.Errorf("round %d: %s, %s, is there and nobody was told", round, sb.ID, sb.State)
			}
		}
		if there != len(made) {
			t.Errorf("round %d: %d sandboxes are there, %d were made", round, there, len(made))
		}
		for id := range made {
			if res, err := c.Sandbox(id).Run(t.Context(), "true"); err != nil || res.Code != 0 {
				t.Errorf("round %d: %s: %v", round, id, err)
			}
			if err := c.Delete(t.Context(), id); err != nil {
				t.Error(err)
			}
			delete(made, id)
		}
		bed.Eventually(t, "nothing is held", func() error {
			held, err := b.Held()
			if err == nil && held["directory"] != 0 {
				err = errs.New(errs.InternalError, "test", "directories are left")
			}
			return err
		})
		if t.Failed() {
			t.Fatalf("in round %d:\n%s", round, b.Log())
		}
	}
}
