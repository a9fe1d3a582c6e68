package main

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestIDsMayBeCutShort(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	lists := 0
	c.s.Before("GET /v1/sandboxes", func() { lists++ })
	id := c.ok("create", "busybox")
	c.ok("exec", id, "--", "true")
	if lists != 0 {
		t.Errorf("a whole id cost %d lists", lists)
	}
	short := id[:4]
	if out := c.ok("exec", short, "--", "echo", "hi"); out != "hi" || lists != 1 {
		t.Errorf("%q after %d lists", out, lists)
	}
	c.ok("exec", "-d", "--tag", "cat", "-i", short, "--", "cat")
	c.ok("ps", short)
	c.ok("logs", short, "cat")
	if out := c.ok("__complete", "kill", short, ""); !strings.Contains(out, "\ncat\t") {
		t.Errorf("completion of processes: %q", out)
	}
	c.ok("kill", short, "cat")
	c.ok("cp", short+":/tmp/", filepath.Join(t.TempDir(), "x"))
	other := c.ok("create", "busybox")
	if out := c.ok("inspect", "--json", other[12:]); !strings.Contains(out, other) {
		t.Errorf("the last ten characters: %s", out)
	}
	for _, args := range [][]string{{"ps", short}, {"inspect", short}, {"rm", short}, {"cp", short + ":/tmp", "/tmp"}} {
		if r := c.run(args...); r.code != 1 || !strings.Contains(r.err, id+", "+other) || !strings.Contains(r.err, "write more of the id") {
			t.Errorf("%v: %+v", args, r)
		}
	}
	c.fails(125, "beginning of 2 ids", "exec", short, "--", "true")
	lists = 0
	c.fails(1, "sandbox_not_found", "ps", "no/thing")
	c.fails(1, "beginning of an id, or of its last ten characters", "ps", "no/thing")
	c.fails(1, "http://127.0.0.1:7070", "--url", "127.0.0.1:7070", "ls")
	if lists != 0 {
		t.Error("what can be no id was looked for")
	}
	// What is not known keeps nothing else from being removed.
	if r := c.run("rm", "zzz", other[12:]); r.code != 1 || r.out != other+"\n" || !strings.Contains(r.err, "sandbox_not_found") {
		t.Errorf("%+v", r)
	}
	if got := c.ok("rm", short); got != id {
		t.Errorf("rm of %s removed %s", short, got)
	}
}
