package e2e

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

type psRow struct {
	PID      uint32  `json:"pid"`
	Tag      string  `json:"tag"`
	Running  bool    `json:"running"`
	ExitCode *int32  `json:"exit_code"`
	Signal   *int    `json:"signal"`
	User     string  `json:"user"`
	EndedAt  *string `json:"ended_at"`

	TimedOut     *bool `json:"timed_out"`
	IdleTimedOut *bool `json:"idle_timed_out"`
	OOMKilled    *bool `json:"oom_killed"`

	StdoutBytes    uint64 `json:"stdout_bytes"`
	StdoutKeptFrom uint64 `json:"stdout_kept_from"`
}

// intoBrokenPipe runs dsec until it has printed a line, then stops reading.
func intoBrokenPipe(t *testing.T, args ...string) (code int, stderr string) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := shared.Command(t.Context(), args...)
	var errOut strings.Builder
	cmd.Stdout, cmd.Stderr = w, &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	r.Close()
	return exitCode(cmd.Wait()), errOut.String()
}

// intoFullDisk runs dsec with an output that takes nothing.
func intoFullDisk(t *testing.T, args ...string) (code int, stderr string) {
	t.Helper()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	cmd := shared.Command(t.Context(), args...)
	var errOut strings.Builder
	cmd.Stdout, cmd.Stderr = full, &errOut
	return exitCode(cmd.Run()), errOut.String()
}

// Whoever looks at a process never ends it, however the looking ends.
func TestLookingNeverEndsAProcess(t *testing.T) {
	t.Parallel()
	id := shared.Must(t, "create", bed.Image)
	defer shared.Must(t, "rm", id)
	shared.Must(t, "exec", "--detach", "--tag", "a", id, "--", "sh", "-c", "while :; do echo line; sleep 0.01; done")
	shared.Must(t, "exec", "--detach", "--tag", "quiet", id, "--", "sh", "-c", "echo once; sleep 1000")
	bed.Eventually(t, "there is output", func() error {
		if logs := shared.Must(t, "logs", id); !strings.Contains(logs, "a | line") || !strings.Contains(logs, "quiet | once") {
			return errors.New(logs)
		}
		return nil
	})
	for _, args := range [][]string{
		{"logs", "-f", id, "a"}, {"logs", "-f", id}, {"logs", "-f", "--json", id}, {"attach", id, "a"}, {"attach", "--no-stdin", id, "a"},
	} {
		if code, stderr := intoBrokenPipe(t, args...); code != 141 || stderr != "" {
			t.Errorf("dsec %s | head -1: exit code %d, want 141; %s", strings.Join(args, " "), code, stderr)
		}
	}
	for _, args := range [][]string{{"logs", id}, {"logs", id, "a"}, {"logs", "--json", id, "a"}, {"logs", "-f", id}, {"attach", id, "a"}} {
		if code, stderr := intoFullDisk(t, args...); code == 0 || code == 137 || !strings.Contains(stderr, "no space left") {
			t.Errorf("dsec %s >/dev/full: exit code %d; %s", strings.Join(args, " "), code, stderr)
		}
	}
	time.Sleep(100 * time.Millisecond) // for a kill to be seen
	for _, p := range bed.JSON[[]psRow](t, shared, "ps", "--json", id) {
		if !p.Running {
			t.Errorf("process %s was ended: %+v", p.Tag, p)
		}
	}
}

// What exec and run started themselves ends with who reads it.
func TestBrokenPipeEndsOwnCommand(t *testing.T) {
	t.Parallel()
	id := shared.Must(t, "create", bed.Image)
	defer shared.Must(t, "rm", id)
	if code, stderr := intoBrokenPipe(t, "exec", id, "--", "yes"); code != 141 || stderr != "" {
		t.Errorf("exec yes | head -1: exit code %d; %s", code, stderr)
	}
	for _, p := range bed.JSON[[]psRow](t, shared, "ps", "--json", id) {
		if p.Running {
			t.Errorf("still runs: %+v", p)
		}
	}
	label := "test=" + t.Name()
	if code, stderr := intoBrokenPipe(t, "run", "--label", label, bed.Image, "--", "yes"); code != 141 || stderr != "" {
		t.Errorf("run yes | head -1: exit code %d; %s", code, stderr)
	}
	if left := shared.Must(t, "ls", "-q", "--label", label); left != "" {
		t.Errorf("run left %s", left)
	}
}

// Ids that cannot be printed: rm goes on, create leaves nothing that nobody knows of.
func TestUnprintableIDs(t *testing.T) {
	t.Parallel()
	label := "test=" + t.Name()
	for _, args := range [][]string{{"create", "--label", label, bed.Image}, {"create", "--json", "--count", "3", "--label", label, bed.Image}} {
		if code, _ := intoFullDisk(t, args...); code != 1 {
			t.Errorf("%v: exit code %d, want 1", args, code)
		}
		if left := shared.Must(t, "ls", "-q", "--label", label); left != "" {
			t.Errorf("%v left %s", args, left)
		}
	}
	shared.Must(t, "create", "--count", "4", "--label", label, bed.Image)
	if n := len(bed.JSON[[]v1.Sandbox](t, shared, "ls", "--json", "--label", label)); n != 4 {
		t.Fatalf("%d sandboxes", n)
	}
	if code, _ := intoFullDisk(t, "rm", "--label", label); code != 1 {
		t.Errorf("rm: exit code %d, want 1", code)
	}
	if left := shared.Must(t, "ls", "-q", "--label", label); left != "" {
		t.Errorf("rm left %s", left)
	}
}
