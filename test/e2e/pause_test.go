package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

// pause pauses a sandbox.
func pause(t *testing.T, id string) v1.PauseResult {
	t.Helper()
	r := bed.JSON[v1.PauseResult](t, shared, "pause", "--json", id)
	if r.State != v1.StatePaused || !r.Changed {
		t.Fatalf("%+v", r)
	}
	if got := stateOf(t, id); got != v1.StatePaused {
		t.Fatalf("it is %s after its pause", got)
	}
	return r
}

func stateOf(t *testing.T, id string) v1.State {
	t.Helper()
	return bed.JSON[v1.Sandbox](t, shared, "inspect", "--json", id).State
}

// holder keeps so many bytes in a variable, and says once more what they are when it is told to.
const holder = `x=$(head -c 24m /dev/urandom | base64 | tr -d '\n'); printf %s "$x" | md5sum >/tmp/before; mkfifo /tmp/go; : >/tmp/ready; read y </tmp/go; printf %s "$x" | md5sum >/tmp/after; : >/tmp/done`

func TestPauseFreesMemoryAndKeepsIt(t *testing.T) {
	t.Parallel()
	id := box(t, "--memory", "256m", "--label", "test="+t.Name())
	shared.Must(t, "exec", "-d", id, "--", "sh", "-c", holder)
	bed.Eventually(t, "the memory is in use", func() error { return run(t, id, "test -e /tmp/ready") })
	before := bed.JSON[v1.Sandbox](t, shared, "inspect", "--json", id).Usage.MemoryBytes
	r := pause(t, id)
	sb := bed.JSON[v1.Sandbox](t, shared, "inspect", "--json", id) // it wakes nothing
	if sb.State != v1.StatePaused || sb.PauseReason != v1.PauseRequested || sb.PausedAt == nil || sb.Pauses != 1 {
		t.Errorf("%+v", sb)
	}
	if r.FreedBytes < 24<<20 || sb.Usage.MemoryBytes > before/4 || sb.Usage.SwapBytes < 24<<20 {
		t.Errorf("of %d bytes %d are in memory and %d in swap; %+v", before, sb.Usage.MemoryBytes, sb.Usage.SwapBytes, r)
	}
	if text := shared.Must(t, "inspect", id); !strings.Contains(text, "somebody asked for it") {
		t.Errorf("%s", text)
	}
	for _, args := range [][]string{{"ls", "-q", "--state", "paused"}, {"ls", "-q"}} {
		if out := shared.Must(t, append(args, "--label", "test="+t.Name())...); strings.TrimSpace(out) != id {
			t.Errorf("%v: %q", args, out)
		}
	}
	if again := bed.JSON[v1.PauseResult](t, shared, "pause", "--json", id); again.Changed || again.State != v1.StatePaused {
		t.Errorf("%+v", again)
	}
	shared.Must(t, "exec", id, "--", "sh", "-c", "echo >/tmp/go")
	bed.Eventually(t, "the process goes on", func() error { return run(t, id, "test -e /tmp/done") })
	if err := run(t, id, "cmp /tmp/before /tmp/after"); err != nil {
		t.Errorf("its memory is not what it was: %v", err)
	}
	sb = bed.JSON[v1.Sandbox](t, shared, "inspect", "--json", id)
	if sb.State != v1.StateRunning || sb.PausedAt != nil || sb.Usage.PausedSeconds <= 0 {
		t.Errorf("%+v", sb)
	}
}

// run runs a script that should succeed.
func run(t *testing.T, id, script string) error {
	t.Helper()
	if r := shared.CLI(t, "exec", id, "--", "sh", "-c", script); r.Code != 0 {
		return fmt.Errorf("%s: exit code %d: %s", script, r.Code, r.Stderr)
	}
	return nil
}

func TestRequestsWakeAPausedSandbox(t *testing.T) {
	t.Parallel()
	id := box(t)
	shared.Must(t, "exec", "-d", "--tag", "web", id, "--", "nc", "-ll", "-p", "7777", "-e", "echo", "served")
	bed.Eventually(t, "the port is open", func() error {
		if !strings.Contains(shared.Must(t, "ports", "--json", id), "7777") {
			return errors.New("not yet")
		}
		return nil
	})
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("carried"), 0o600); err != nil {
		t.Fatal(err)
	}
	forward := shared.Command(t.Context(), "port-forward", "--json", id, ":7777")
	out, err := forward.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := forward.Start(); err != nil {
		t.Fatal(err)
	}
	defer forward.Wait()
	defer forward.Process.Kill()
	var at struct{ Local string }
	if err := json.NewDecoder(bufio.NewReader(out)).Decode(&at); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		do   func(t *testing.T)
	}{
		{"exec", func(t *testing.T) {
			if got := shared.Must(t, "exec", id, "--", "echo", "awake"); got != "awake" {
				t.Errorf("%q", got)
			}
		}},
		{"cp", func(t *testing.T) {
			shared.Must(t, "cp", file, id+":/tmp/file")
			back := filepath.Join(dir, "back")
			shared.Must(t, "cp", id+":/tmp/file", back)
			if b, err := os.ReadFile(back); err != nil || string(b) != "carried" {
				t.Errorf("%q, %v", b, err)
			}
		}},
		{"port-forward", func(t *testing.T) {
			conn, err := net.Dial("tcp", at.Local)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if b, err := io.ReadAll(conn); err != nil || string(b) != "served\n" {
				t.Errorf("%q, %v", b, err)
			}
		}},
		{"ps", func(t *testing.T) {
			if got := shared.Must(t, "ps", id); !strings.Contains(got, "web") {
				t.Errorf("%s", got)
			}
		}},
		{"resume", func(t *testing.T) {
			if r := bed.JSON[v1.PauseResult](t, shared, "resume", "--json", id); !r.Changed || r.State != v1.StateRunning {
				t.Errorf("%+v", r)
			}
		}},
	} {
		pause(t, id)
		t.Run(c.name, c.do)
		if got := stateOf(t, id); got != v1.StateRunning {
			t.Errorf("after %s it is %s", c.name, got)
		}
	}
	shared.Must(t, "exec", "-d", "--tag", "job", id, "--", "sh", "-c", "sleep 2; echo end; exit 7")
	pause(t, id)
	if r := shared.CLI(t, "attach", id, "job"); r.Code != 7 || r.Stdout != "end\n" {
		t.Errorf("attach: %+v", r)
	}
}

func TestAJobIsPausedByOneCall(t *testing.T) {
	t.Parallel()
	label := "job=" + t.Name()
	made := strings.Fields(shared.Must(t, "create", "--count", "20", "--label", label, "--memory", "64m", bed.Image))
	t.Cleanup(func() {
		for _, id := range made {
			bed.Remove(t, shared.Client(t).Sandbox(id))
		}
	})
	dead := made[0]
	shared.Must(t, "rm", dead)
	r := shared.CLI(t, "pause", "--label", label)
	if r.Code != 0 || len(strings.Fields(r.Stdout)) != 19 || !strings.Contains(r.Stderr, "paused 19 sandboxes, freed ") {
		t.Fatalf("%+v", r)
	}
	if got := strings.Fields(shared.Must(t, "ls", "-q", "--state", "paused", "--label", label)); len(got) != 19 {
		t.Errorf("%d are listed as paused", len(got))
	}
	events := shared.Must(t, "events", "--json", "--since", "1h", "--label", label)
	if n := strings.Count(events, `"state":"paused"`); n < 19 {
		t.Errorf("%d events of pauses", n)
	}
	var top struct {
		Nodes     []v1.Node
		Sandboxes []v1.SandboxUsage
	}
	if err := json.Unmarshal([]byte(shared.Must(t, "top", "--once", "--json", "--interval", "1s", "--label", label)), &top); err != nil || len(top.Nodes) != 1 || len(top.Sandboxes) != 19 {
		t.Fatalf("top: %+v, %v", top, err)
	}
	for _, s := range top.Sandboxes {
		if s.State != v1.StatePaused || s.Usage == nil || s.Usage.SwapBytes == 0 || s.Labels["job"] != t.Name() {
			t.Errorf("top shows %+v", s)
		}
	}
	if n := top.Nodes[0]; n.Paused < 19 || n.Swap.TotalBytes == 0 {
		t.Errorf("the node says %+v", n)
	}
	// Each of those that are named has an outcome, also those that are not there.
	r = shared.CLI(t, append([]string{"resume", "--json"}, made...)...)
	outcomes := map[string]int{}
	for _, o := range bed.Lines[v1.PauseResult](t, r.Stdout) {
		if o.Error != nil {
			outcomes[o.Error.Code]++
		} else {
			outcomes[string(o.State)]++
		}
	}
	if r.Code != 1 || outcomes["running"] != 19 || outcomes["sandbox_gone"] != 1 {
		t.Errorf("exit code %d, %v", r.Code, outcomes)
	}
	shared.Fails(t, 1, "sandbox_gone", "pause", dead)
	if table := shared.Must(t, "top", "--once", "--interval", "1s", "-n", "3", "--label", label); !strings.HasPrefix(table, "node ") || !strings.Contains(table, "and 16 more") {
		t.Errorf("%s", table)
	}
}

// Files of a paused sandbox are packed as it stands, and what is made of it has its spec, or with a
// create of its own another.
func TestForkAndSnapshotOfAPausedSandbox(t *testing.T) {
	t.Parallel()
	id := box(t, "--qos", "be", "--label", "test="+t.Name())
	shared.Must(t, "exec", id, "--", "sh", "-c", "echo kept >/file")
	pause(t, id)
	child := shared.Must(t, "fork", id)
	t.Cleanup(func() { bed.Remove(t, shared.Client(t).Sandbox(child)) })
	if got := shared.Must(t, "exec", child, "--", "cat", "/file"); got != "kept" {
		t.Errorf("%q", got)
	}
	if sb := bed.JSON[v1.Sandbox](t, shared, "inspect", "--json", child); sb.Spec.QoS != v1.QoSBest || sb.State != v1.StateRunning || sb.Pauses != 0 {
		t.Errorf("child %+v", sb)
	}
	name := strings.ToLower(t.Name())
	shared.Must(t, "snapshot", id, name)
	t.Cleanup(func() { shared.Run(context.WithoutCancel(t.Context()), nil, "snapshot", "rm", name) })
	made := shared.Must(t, "create", "--idle-ttl", "1h", "snap:"+name)
	t.Cleanup(func() { bed.Remove(t, shared.Client(t).Sandbox(made)) })
	sb := bed.JSON[v1.Sandbox](t, shared, "inspect", "--json", made)
	if s := sb.Spec; s.QoS != v1.QoSLatency || s.IdleTTL != 3600 || s.OnIdle != v1.OnIdleStop || s.Labels["test"] != t.Name() {
		t.Errorf("made of a snapshot: %+v", s)
	}
}
