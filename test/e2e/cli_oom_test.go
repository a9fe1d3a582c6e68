package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/client"
	"dsec/test/bed"
)

// hog takes memory until it is killed.
const hog = "tail /dev/zero"

// A trainer can tell the memory limit from a timeout, from a signal of the command's own
// and from each other, wherever it looks.
func TestMemoryLimitIsTold(t *testing.T) {
	t.Parallel()
	label := "test=" + t.Name()
	id := shared.Must(t, "create", "--memory", "64m", "--label", label, bed.Image)
	defer shared.Must(t, "rm", id)
	type outcome struct {
		ExitCode     *int  `json:"exit_code"`
		Signal       *int  `json:"signal"`
		TimedOut     *bool `json:"timed_out"`
		IdleTimedOut *bool `json:"idle_timed_out"`
		OOMKilled    *bool `json:"oom_killed"`
		OOMKills     *int  `json:"oom_kills"`
	}
	for _, c := range []struct {
		name   string
		flags  []string
		script string
		want   string // exit code, signal, timed out, idle, killed by the limit, kills
	}{
		{"the command", nil, "exec " + hog, "137 9 false false true 1"},
		{"the last command of a shell", nil, hog + "; exit $?", "137 0 false false true 1"},
		{"a command within", nil, hog + "; exit 3", "3 0 false false false 1"},
		{"its own signal", nil, "kill -9 $$", "137 9 false false false 0"},
		{"timeout", []string{"--timeout", "200ms"}, "sleep 100", "137 9 true false false 0"},
		{"idle timeout", []string{"--idle-timeout", "200ms"}, "sleep 100", "137 9 false true false 0"},
		{"success", nil, "true", "0 0 false false false 0"},
	} {
		r := shared.CLI(t, append(append([]string{"exec", "--json"}, c.flags...), id, "--", "sh", "-c", c.script)...)
		var o outcome
		if err := json.Unmarshal([]byte(r.Stdout), &o); err != nil {
			t.Fatalf("%s: %v in %+v", c.name, err, r)
		}
		for _, missing := range []bool{o.ExitCode == nil, o.Signal == nil, o.TimedOut == nil, o.IdleTimedOut == nil, o.OOMKilled == nil, o.OOMKills == nil} {
			if missing {
				t.Fatalf("%s: a field is left out of %s", c.name, r.Stdout)
			}
		}
		if got := fmt.Sprint(*o.ExitCode, *o.Signal, *o.TimedOut, *o.IdleTimedOut, *o.OOMKilled, *o.OOMKills); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		if r.Stderr != "" { // the object says it
			t.Errorf("%s: stderr %q", c.name, r.Stderr)
		}
	}
	for script, told := range map[string]bool{"exec " + hog: true, hog + "; exit 3": true, "exit 3": false} {
		if r := shared.CLI(t, "exec", id, "--", "sh", "-c", script); strings.Contains(r.Stderr, "memory limit 64 MiB") != told {
			t.Errorf("%q without --json: stderr %q", script, r.Stderr)
		}
	}
	states := map[string]bool{}
	for _, p := range bed.JSON[[]psRow](t, shared, "ps", "--json", id) {
		if p.Signal == nil || p.TimedOut == nil || p.IdleTimedOut == nil || p.OOMKilled == nil || p.EndedAt == nil || p.User != "root" {
			t.Errorf("ps --json leaves something out: %+v", p)
			continue
		}
		states[fmt.Sprint(*p.ExitCode, *p.OOMKilled, *p.TimedOut, *p.IdleTimedOut)] = true
	}
	for _, want := range []string{"137 true false false", "137 false false false", "137 false true false", "137 false false true", "0 false false false"} {
		if !states[want] {
			t.Errorf("ps --json has no process with %s: %v", want, states)
		}
	}
	table := shared.Must(t, "ps", id)
	for _, want := range []string{"memory limit", "KILL", " timeout", "idle timeout", "exit 3"} {
		if !strings.Contains(table, want) {
			t.Errorf("ps without %q:\n%s", want, table)
		}
	}
	bed.Eventually(t, "there is an event", func() error {
		n := int64(0)
		for _, e := range bed.Lines[v1.Event](t, shared.Must(t, "events", "--json", "--label", label)) {
			if e.Type == v1.EventOOM && e.Sandbox.ID == id && e.Sandbox.State == v1.StateRunning {
				n = e.Sandbox.OOMKills
			}
		}
		if n != 5 {
			return fmt.Errorf("the last event of type oom counts %d processes", n)
		}
		return nil
	})
	if text := shared.Must(t, "events", "--label", label); !strings.Contains(text, "memory limit 64 MiB: 5 processes killed so far") {
		t.Errorf("events:\n%s", text)
	}
}

// Of a sandbox that is removed right after, too.
func TestMemoryLimitOfRunIsTold(t *testing.T) {
	t.Parallel()
	label := "test=" + t.Name()
	r := shared.CLI(t, "run", "--memory", "64m", "--label", label, bed.Image, "--", "tail", "/dev/zero")
	if r.Code != 137 || r.Stderr != "dsec: the command was killed: memory limit 64 MiB\n" {
		t.Errorf("%+v", r)
	}
	bed.Eventually(t, "the events tell of the kill and then of the end", func() error {
		var types []string
		for _, e := range bed.Lines[v1.Event](t, shared.Must(t, "events", "--json", "--label", label)) {
			types = append(types, string(e.Type))
		}
		if s := strings.Join(types, " "); !strings.Contains(s, "oom") || !strings.HasSuffix(s, " removed") {
			return fmt.Errorf("events: %s", s)
		}
		return nil
	})
}

func TestMemoryLimitInTheSDK(t *testing.T) {
	t.Parallel()
	c := shared.Client(t)
	sb, err := c.Create(t.Context(), client.Spec{Image: bed.Image, MemoryBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer sb.Delete(t.Context())
	r, err := sb.Run(t.Context(), "tail", "/dev/zero")
	if err != nil || !r.OOMKilled || r.OOMKills != 1 || r.MemoryLimit != 64<<20 || r.Signal != 9 {
		t.Errorf("%+v, %v", r, err)
	}
	s, err := sb.OpenSession(t.Context(), client.SessionOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if r, err := s.Sh(t.Context(), hog); err != nil || !r.OOMKilled || r.OOMKills != 1 || r.MemoryLimit != 64<<20 {
		t.Errorf("in a session: %+v, %v", r, err)
	}
	if r, err := s.Sh(t.Context(), "true"); err != nil || r.OOMKilled || r.OOMKills != 0 {
		t.Errorf("after it: %+v, %v", r, err)
	}
}

// Who looks at the sandbox or its events reads which process it was and what it met.
func TestMemoryLimitNamesWhatItKilled(t *testing.T) {
	t.Parallel()
	label := "test=" + t.Name()
	c := shared.Client(t)
	sb, err := c.Create(t.Context(), client.Spec{Image: bed.Image, MemoryBytes: 64 << 20, Labels: map[string]string{"test": t.Name()}})
	if err != nil {
		t.Fatal(err)
	}
	defer sb.Delete(t.Context())
	r, err := sb.Run(t.Context(), "sh", "-c", "tail /dev/zero & echo $!; wait; true")
	if err != nil || r.OOMKilled || r.OOMKills != 1 {
		t.Fatalf("%+v, %v", r, err)
	}
	pid := strings.TrimSpace(string(r.Stdout))
	bed.Eventually(t, "it is named", func() error {
		got, err := sb.Get(t.Context())
		if err != nil {
			return err
		}
		o := got.LastOOM
		if o == nil || o.Command != "tail" || o.LimitBytes != 64<<20 || o.MemoryBytes < 32<<20 || got.OOMKills != 1 {
			return fmt.Errorf("%d kills, the last %+v", got.OOMKills, o)
		}
		if o.PID != 0 && fmt.Sprint(o.PID) != pid { // 0: it was gone already
			t.Errorf("pid %d, it was %s", o.PID, pid)
		}
		return nil
	})
	if text := shared.Must(t, "inspect", sb.ID()); !strings.Contains(text, "last oom kill") {
		t.Errorf("inspect:\n%s", text)
	}
	if text := shared.Must(t, "events", "--label", label); !strings.Contains(text, "1 process killed so far, last tail") {
		t.Errorf("events:\n%s", text)
	}
}
