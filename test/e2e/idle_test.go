package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

// awaitState waits until a sandbox is in a state, without being use of it.
func awaitState(t *testing.T, id string, want v1.State) v1.Sandbox {
	t.Helper()
	var sb v1.Sandbox
	bed.Eventually(t, "the sandbox is "+string(want), func() error {
		sb = bed.JSON[v1.Sandbox](t, shared, "inspect", "--json", id)
		if sb.State != want {
			return fmt.Errorf("it is %s", sb.State)
		}
		return nil
	})
	return sb
}

func TestIdleSandboxIsPausedAndWakes(t *testing.T) {
	t.Parallel()
	id := box(t, "--idle-ttl", "1s", "--on-idle", "pause")
	shared.Must(t, "exec", id, "--", "sh", "-c", "echo kept >/file")
	sb := awaitState(t, id, v1.StatePaused)
	if sb.PauseReason != v1.PauseIdle {
		t.Errorf("%+v", sb)
	}
	if text := shared.Must(t, "inspect", id); !strings.Contains(text, "nobody used it") || !strings.Contains(text, "1s, then pause") {
		t.Errorf("%s", text)
	}
	if got := shared.Must(t, "exec", id, "--", "cat", "/file"); got != "kept" {
		t.Errorf("%q", got)
	}
	// A command that runs is use, however long it takes, and whoever waits for it.
	if got := shared.Must(t, "exec", id, "--", "sh", "-c", "sleep 3; echo through"); got != "through" {
		t.Errorf("%q", got)
	}
	shared.Must(t, "exec", "-d", "--tag", "job", id, "--", "sh", "-c", "sleep 4; echo end >/end")
	bed.Eventually(t, "the detached command ends", func() error {
		if bed.JSON[v1.Sandbox](t, shared, "inspect", "--json", id).State != v1.StateRunning {
			if err := run(t, id, "test -e /end"); err != nil {
				t.Fatal("it was paused while a command ran")
			}
			return nil
		}
		return errors.New("it runs")
	})
	awaitState(t, id, v1.StateRunning) // the look at /end
	awaitState(t, id, v1.StatePaused)
}

func TestIdleSandboxIsRemovedAndSaysWhy(t *testing.T) {
	t.Parallel()
	id := box(t, "--idle-ttl", "1s")
	bed.Eventually(t, "it is gone", func() error {
		r := shared.CLI(t, "inspect", id)
		if r.Code == 0 {
			return errors.New("it is there")
		}
		if !strings.Contains(r.Stderr, "sandbox_gone") || !strings.Contains(r.Stderr, "nobody used it") {
			t.Fatalf("%s", r.Stderr)
		}
		return nil
	})
}

func TestHintPausesWhatIsNotNeededForLong(t *testing.T) {
	t.Parallel()
	id := box(t)
	if r := bed.JSON[v1.HintResult](t, shared, "hint", id, "--next-call", "10ms", "--json"); r.Action != "keep" || r.Why == "" || r.HoldCost >= r.MoveCost || r.Sandbox.State != v1.StateRunning {
		t.Errorf("%+v", r)
	}
	r := bed.JSON[v1.HintResult](t, shared, "hint", id, "--next-call", "24h", "--json")
	if r.Action != "pause" || r.HoldCost <= r.MoveCost || r.Sandbox.State != v1.StatePaused || r.Sandbox.PauseReason != v1.PauseHint {
		t.Errorf("%+v", r)
	}
	if got := stateOf(t, id); got != v1.StatePaused {
		t.Errorf("it is %s", got)
	}
	if text := shared.Must(t, "hint", id, "--next-call", "24h"); !strings.HasPrefix(text, "pause ") {
		t.Errorf("again: %s", text)
	}
	if got := shared.Must(t, "exec", id, "--", "echo", "awake"); got != "awake" {
		t.Errorf("%q", got)
	}
	// What is in use stays.
	shared.Must(t, "exec", "-d", id, "--", "sleep", "1000")
	if r := bed.JSON[v1.HintResult](t, shared, "hint", id, "--next-call", "24h", "--json"); r.Action != "keep" || !strings.Contains(r.Why, "runs in it") {
		t.Errorf("%+v", r)
	}
}
