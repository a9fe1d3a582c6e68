package robustness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

func TestKilledGuestIsFailedAtOnce(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	before, err := b.Held()
	if err != nil {
		t.Fatal(err)
	}
	sb := b.Sandbox(t, c, client.Spec{})
	p, err := sb.Start(t.Context(), client.Command("sleep", "1000"), client.IO{})
	if err != nil {
		t.Fatal(err)
	}
	list, err := c.List(t.Context(), client.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pid, err := b.GuestPID(sb.ID())
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), bed.Patience)
	defer cancel()
	var failed *v1.Sandbox
	for e, err := range c.Events(ctx, client.EventOptions{From: list.Revision, Follow: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == v1.EventState && e.Sandbox.State == v1.StateFailed {
			failed = e.Sandbox
			break
		}
	}
	if failed == nil || failed.Error == nil || failed.Error.Message == "" || failed.EndedAt == nil {
		t.Fatalf("failed: %+v after %v", failed, time.Since(begin))
	}
	t.Logf("known after %v", time.Since(begin))
	if _, err := p.Wait(); err == nil {
		t.Error("the process's stream has no error")
	}
	if _, err := sb.Run(t.Context(), "true"); !errors.Is(err, errs.SandboxNotRunning) {
		t.Errorf("exec: %v", err)
	}
	got, err := sb.Get(t.Context())
	if err != nil || got.State != v1.StateFailed || got.Error == nil {
		t.Errorf("get: %+v, %v", got, err)
	}
	// Its resources are free though its record stays.
	same(t, b, before)
	if nodes, err := c.Nodes(t.Context()); err != nil {
		t.Error(err)
	} else {
		bed.Eventually(t, "its slot is free", func() error {
			if nodes, err = c.Nodes(t.Context()); err == nil && nodes[0].Allocated.Slots != 0 {
				err = fmt.Errorf("allocated: %+v", nodes[0].Allocated)
			}
			return err
		})
	}
	if err := sb.Delete(t.Context()); err != nil {
		t.Errorf("remove: %v", err)
	}
	if _, err := sb.Get(t.Context()); !errors.Is(err, errs.SandboxGone) {
		t.Errorf("get after the removal: %v", err)
	}
}

// same waits until the node holds what it held before.
func same(t *testing.T, b *bed.Bed, before map[string]int) {
	t.Helper()
	bed.Eventually(t, "all resources are free", func() error {
		now, err := b.Held()
		if err == nil && !maps.Equal(now, before) {
			err = fmt.Errorf("%v, before: %v", now, before)
		}
		return err
	})
}

// A guest that dies while the server is away is found out at the next start.
func TestGuestKilledWhileTheServerIsAway(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	before, err := b.Held()
	if err != nil {
		t.Fatal(err)
	}
	c := b.Client(t)
	dead, err := c.Create(t.Context(), client.Spec{Image: bed.Image})
	if err != nil {
		t.Fatal(err)
	}
	alive, err := c.Create(t.Context(), client.Spec{Image: bed.Image})
	if err != nil {
		t.Fatal(err)
	}
	pid, err := b.GuestPID(dead.ID())
	if err != nil {
		t.Fatal(err)
	}
	b.Kill(t)
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	bed.Eventually(t, "it is dead", func() error {
		if err := unix.Kill(pid, 0); err == nil {
			if _, err := b.GuestPID(dead.ID()); err != nil {
				return nil // a zombie that is not collected yet
			}
			return errors.New("alive")
		}
		return nil
	})
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	c = b.Client(t)
	got, err := c.Get(t.Context(), dead.ID())
	if err != nil || got.State != v1.StateFailed || got.Error == nil || !got.Error.Infra {
		t.Errorf("get: %+v, %v", got, err)
	}
	if res, err := c.Sandbox(alive.ID()).Run(t.Context(), "true"); err != nil || res.Code != 0 {
		t.Errorf("the other one: %v", err)
	}
	for _, id := range []string{dead.ID(), alive.ID()} {
		if err := c.Delete(t.Context(), id); err != nil {
			t.Errorf("remove %s: %v", id, err)
		}
	}
	same(t, b, before)
}

// A guest has a thread to spare before a sandbox can be at its limit of processes: the Go
// runtime would end the guest if it could make none.
func TestGuestHasASpareThread(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	sb := b.Sandbox(t, b.Client(t), client.Spec{})
	if _, err := sb.Run(t.Context(), "true"); err != nil {
		t.Fatal(err)
	}
	pid, err := b.GuestPID(sb.ID())
	if err != nil {
		t.Fatal(err)
	}
	threads := func() int {
		list, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	// Main, the runtime's monitor, the waiter, one at work and the spare one.
	bed.Eventually(t, "the guest has a spare thread", func() error {
		if n := threads(); n < 5 {
			return fmt.Errorf("%d threads", n)
		}
		return nil
	})
}

func TestForkBombHurtsNobodyElse(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	other := b.Sandbox(t, c, client.Spec{})
	bomb := b.Sandbox(t, c, client.Spec{PIDs: 64, CPUMillis: 300})
	// A shell ends when it cannot fork; this one goes on as another, which needs no fork.
	script := `echo 'trap "exec sh /tmp/bomb" EXIT; b() { b | b & }; b; b; b; while :; do b; usleep 1000; done' >/tmp/bomb; exec sh /tmp/bomb`
	if _, err := bomb.StartDetached(t.Context(), client.Command("sh", "-c", script)); err != nil {
		t.Fatal(err)
	}
	bed.Eventually(t, "the bomb reaches its limit", func() error {
		sb, err := bomb.Get(t.Context())
		if err == nil && (sb.Usage == nil || sb.Usage.ForksRefused == 0) {
			err = fmt.Errorf("%+v", sb.Usage)
		}
		return err
	})
	for range 20 {
		if res, err := other.Run(t.Context(), "sh", "-c", "echo a | cat"); err != nil || string(res.Stdout) != "a\n" {
			t.Fatalf("another sandbox beside a fork bomb: %+v, %v", res, err)
		}
	}
	sb, err := bomb.Get(t.Context())
	if err != nil || sb.Usage.Processes > 64 || sb.State != v1.StateRunning {
		t.Errorf("the bomb: %+v, %v", sb, err)
	}
	// Its guest answers, even if no process can be started: with an error of the table.
	if _, err := bomb.Guest(t.Context()); err != nil {
		t.Errorf("the bomb's guest: %v", err)
	}
	if _, err := bomb.Run(t.Context(), "true"); err != nil && (!errors.Is(err, errs.SandboxLimit) || client.ErrorOf(err).Infra) {
		t.Errorf("exec in the bomb: %v", err)
	}
	// A guest that ends of it is no fault of the node.
	pid, err := b.GuestPID(bomb.ID())
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	bed.Eventually(t, "the bomb has failed", func() error {
		sb, err := bomb.Get(t.Context())
		if err == nil && (sb.State != v1.StateFailed || sb.Error == nil || errs.Code(sb.Error.Code) != errs.SandboxLimit || sb.Error.Infra || sb.Error.Retryable) {
			err = fmt.Errorf("%s: %+v", sb.State, sb.Error)
		}
		return err
	})
	if err := bomb.Delete(t.Context()); err != nil {
		t.Errorf("remove the bomb: %v", err)
	}
}

func TestOutOfMemoryKillsTheCommandOnly(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	other := b.Sandbox(t, c, client.Spec{})
	sb := b.Sandbox(t, c, client.Spec{MemoryBytes: 32 << 20})
	for range 3 {
		// tail keeps all of an endless line in memory.
		res, err := sb.Run(t.Context(), "sh", "-c", "tail -n 1 < /dev/zero; echo code $?")
		if err != nil || string(res.Stdout) != "code 137\n" && res.Code != 137 {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	got, err := sb.Get(t.Context())
	if err != nil || got.State != v1.StateRunning || got.Usage.OOMKills < 3 || got.Usage.PeakMemoryBytes > 32<<20 {
		t.Errorf("%+v, %v", got, err)
	}
	for _, s := range []*client.Sandbox{sb, other} {
		if res, err := s.Run(t.Context(), "true"); err != nil || res.Code != 0 {
			t.Errorf("afterwards: %v", err)
		}
	}
}

// What goes on in a sandbox may take all of its memory, or all of its processors: its guest serves all the same.
func TestGuestServesAtTheLimits(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	for name, load := range map[string]string{
		// What is in /dev/shm cannot be given up, and the rest is touched until something is killed, again and again.
		"memory": "head -c 30m /dev/zero > /dev/shm/fill; while :; do tail /dev/zero; done",
		"cpu":    "i=0; while [ $i -lt 100 ]; do (while :; do :; done) & i=$((i+1)); done; wait",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sb := b.Sandbox(t, c, client.Spec{MemoryBytes: 64 << 20})
			if _, err := sb.StartDetached(t.Context(), client.Command("sh", "-c", load)); err != nil {
				t.Fatal(err)
			}
			bed.Eventually(t, "it is at the limit", func() error {
				got, err := sb.Get(t.Context())
				if err == nil && (name == "memory" && got.Usage.OOMKills == 0 || name == "cpu" && got.Usage.Processes < 100) {
					err = fmt.Errorf("%+v", got.Usage)
				}
				return err
			})
			killed := 0
			for range 10 {
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				res, err := sb.Run(ctx, "true")
				switch { // the limit may take the command itself, and says so
				case err != nil && !errors.Is(err, errs.SandboxLimit):
					t.Fatalf("a command: %v", err)
				case err != nil || res.OOMKilled:
					killed++
				case res.Code != 0:
					t.Errorf("a command: %+v", res)
				}
				if text, err := sb.ReadFile(ctx, "/etc/hostname"); err != nil || len(text) == 0 {
					t.Errorf("a file: %q, %v", text, err)
				}
				cancel()
			}
			if got, err := sb.Get(t.Context()); err != nil || got.State != v1.StateRunning || killed > 5 {
				t.Errorf("%d of 10 commands were killed; %+v, %v", killed, got, err)
			}
		})
	}
}
