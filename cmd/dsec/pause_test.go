package main

import (
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/clienttest"
)

func TestPauseResume(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "--qos", "be", "--priority", "-7", "--idle-ttl", "10m", "--on-idle", "pause", "--label", "job=a", "busybox")
	if s := into[v1.Sandbox](t, c.ok("inspect", "--json", id)).Spec; s.QoS != v1.QoSBest || s.Priority != -7 || s.IdleTTL != 600 || s.OnIdle != v1.OnIdlePause {
		t.Errorf("%+v", s)
	}
	r := c.run("pause", id)
	if r.code != 0 || r.out != id+"\n" || !strings.Contains(r.err, "paused 1 sandbox, freed 64 MiB, in ") {
		t.Errorf("%+v", r)
	}
	if r := c.run("pause", id); r.code != 0 || !strings.Contains(r.err, "paused 0 sandboxes, 1 more were so before, in ") || strings.Contains(r.err, "freed") {
		t.Errorf("again: %+v", r)
	}
	if got := c.ok("ls", "-q", "--state", "paused"); got != id {
		t.Errorf("ls: %q", got)
	}
	if out := c.ok("inspect", id); !strings.Contains(out, "somebody asked for it") || !strings.Contains(out, "be, priority -7") || !strings.Contains(out, "10m0s, then pause") ||
		!strings.Contains(out, "3 MiB in swap") || !strings.Contains(out, "12.5 GiB·s") || !strings.Contains(out, "4 MiB read, 5 MiB written") || !strings.Contains(out, "1, 1m30s in all") {
		t.Errorf("%s", out)
	}
	if out := c.ok("node", "ls"); !strings.Contains(out, "64 MiB/8 GiB") {
		t.Errorf("%s", out)
	}
	if got := into[v1.PauseResult](t, c.ok("resume", "--json", id)); got.ID != id || got.State != v1.StateRunning || !got.Changed {
		t.Errorf("%+v", got)
	}
	if out := c.ok("inspect", id); strings.Contains(out, "somebody asked for it") {
		t.Errorf("a resumed one: %s", out)
	}
	c.ok("pause", id)
	if out := c.ok("exec", id, "--", "echo", "awake"); out != "awake" {
		t.Errorf("%q", out)
	}
	if got := c.ok("ls", "-q", "--state", "running"); got != id {
		t.Errorf("it was not resumed: %q", got)
	}
}

func TestPauseOfManyTellsEachOutcome(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	c.ok("create", "--count", "5", "--label", "job=a", "busybox")
	other := c.ok("create", "busybox")
	c.s.Fail("one of turn", 2, errs.New(errs.SwapFull, "container.pause", "the node's swap is full"))
	r := c.run("pause", "--label", "job=a")
	if r.code != 1 || strings.Count(r.out, "\n") != 3 || !strings.Contains(r.err, "paused 3 sandboxes, freed 192 MiB") ||
		!strings.Contains(r.err, "2 of 5 sandboxes were not paused") || !strings.Contains(r.err, "swap_full") {
		t.Errorf("%+v", r)
	}
	// Those that run, and no others.
	r = c.run("pause", "--all", "--json")
	if lines := strings.Split(strings.TrimSpace(r.out), "\n"); r.code != 0 || len(lines) != 3 || r.err != "" || into[v1.PauseResult](t, lines[0]).FreedBytes != clienttest.Freed {
		t.Errorf("%+v", r)
	}
	c.s.Fail("one of turn", 1, errs.New(errs.NodeFull, "edge.admit", "the node is full: memory_bytes"))
	r = c.run("resume", other, "nonsense")
	if r.code != 1 || r.out != "" || !strings.Contains(r.err, "2 of 2 sandboxes were not resumed") || !strings.Contains(r.err, "nonsense") {
		t.Errorf("%+v", r)
	}
	if r := c.run("resume", "--all"); r.code != 0 || strings.Count(r.out, "\n") != 6 {
		t.Errorf("%+v", r)
	}
	if r := c.run("resume", "--all"); r.code != 0 || !strings.Contains(r.err, "no sandbox is paused") {
		t.Errorf("%+v", r)
	}
	if r := c.run("pause", "-l", "job=none"); r.code != 0 || !strings.Contains(r.err, "no sandbox has these labels") {
		t.Errorf("%+v", r)
	}
	c.s.Fail("turn breaks off", 1, errs.New(errs.InternalError, "test", ""))
	c.fails(1, "connection_lost", "pause", other)
	c.fails(2, "name sandboxes", "pause")
	c.fails(2, "only one of", "resume", "--all", other)
	c.fails(1, "qos", "create", "--qos", "best", "busybox")
}

func TestHint(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "busybox")
	if out := c.ok("hint", id, "--next-call", "5s"); !strings.HasPrefix(out, "keep ") || !strings.Contains(out, "the next call is near") {
		t.Errorf("%q", out)
	}
	if r := into[v1.HintResult](t, c.ok("hint", id, "--next-call", "90s", "--json")); r.Action != "pause" || r.HoldCost != 90 || r.Sandbox.State != v1.StatePaused {
		t.Errorf("%+v", r)
	}
	c.fails(2, "--next-call is missing", "hint", id)
	c.fails(2, "has no unit", "hint", id, "--next-call", "90")
	c.fails(1, "sandbox_not_found", "hint", "nonsense", "--next-call", "1s")
}
