package main

import (
	"encoding/base64"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// What is kept is the begin and the end of what was written, however it came in pieces.
func TestCaptureKeepsBothEnds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := capture{limit: rapid.IntRange(1, 40).Draw(t, "limit")}
		var all []byte
		for _, p := range rapid.SliceOf(rapid.SliceOfN(rapid.ByteRange('a', 'z'), 0, 50)).Draw(t, "pieces") {
			if n, err := c.Write(p); n != len(p) || err != nil {
				t.Fatal(n, err)
			}
			all = append(all, p...)
		}
		want := all
		if len(all) > c.limit {
			want = append(append([]byte(nil), all[:c.limit-c.limit/2]...), all[len(all)-c.limit/2:]...)
		}
		if text, _ := c.content(); text == nil || *text != string(want) || c.cut() != (len(all) > c.limit) || c.total != uint64(len(all)) {
			t.Fatalf("limit %d: kept %v of %q, want %q", c.limit, text, all, want)
		}
	})
}

func TestCaptureCutsNoCharacter(t *testing.T) {
	t.Parallel()
	for limit := 1; limit < 30; limit++ {
		c := capture{limit: limit}
		c.Write([]byte(strings.Repeat("aä€😀", 5)))
		if text, raw := c.content(); text == nil {
			t.Errorf("limit %d: %q is called no text", limit, raw)
		}
	}
	c := capture{limit: 10}
	c.Write([]byte("ok\xff\xfe"))
	if text, raw := c.content(); text != nil || string(raw) != "ok\xff\xfe" {
		t.Errorf("%v, %q", text, raw)
	}
}

func TestExecJSON(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "busybox")
	outcomeOf := func(code int, args ...string) resultJSON {
		t.Helper()
		r := c.with(t.Context(), "in", args...)
		if r.code != code || strings.Count(r.out, "\n") != 1 {
			t.Errorf("%v: exit code %d, want %d: %s%s", args, r.code, code, r.out, r.err)
		}
		j := into[resultJSON](t, r.out)
		if j.ExitCode != code {
			t.Errorf("%v: exit_code %d, want %d", args, j.ExitCode, code)
		}
		return j
	}
	j := outcomeOf(3, "exec", "--json", "-i", id, "--", "sh", "-c", "cat; echo err >&2; exit 3")
	if j.Sandbox != id || j.PID == 0 || *j.Stdout != "in" || *j.Stderr != "err\n" || j.StdoutBytes != 2 || j.Truncated || j.DurationMS <= 0 || j.Error != nil {
		t.Errorf("%+v", j)
	}
	if j = outcomeOf(0, "run", "--json", "busybox", "--", "true"); j.Sandbox == "" || *j.Stdout != "" || *j.Stderr != "" {
		t.Errorf("%+v", j)
	}
	if j = outcomeOf(0, "exec", "--json", id, "--", "printf", `a\377`); j.Stdout != nil || base64.StdEncoding.EncodeToString(j.StdoutBase64) != "Yf8=" {
		t.Errorf("%+v", j)
	}
	if j = outcomeOf(0, "exec", "--json", "--max-output", "10", id, "--", "seq", "-s", " ", "1000"); *j.Stdout != "1 2 31000\n" || !j.Truncated || j.StdoutBytes < 3000 {
		t.Errorf("%q %+v", *j.Stdout, j)
	}
	if j = outcomeOf(137, "exec", "--json", "--timeout", "50ms", id, "--", "sleep", "60"); j.Signal != 9 || !j.TimedOut {
		t.Errorf("%+v", j)
	}
	if j = outcomeOf(127, "exec", "--json", id, "--", "no-such-command"); j.Error == nil || j.Error.Code != "command_not_found" {
		t.Errorf("%+v", j)
	}
	if j = outcomeOf(125, "run", "--json", "none", "--", "true"); j.Error == nil || j.Error.Code != "image_not_found" || j.Stdout == nil {
		t.Errorf("%+v", j)
	}
	c.fails(2, "cannot be used with -t", "exec", "--json", "-t", id, "--", "true")
	c.fails(2, "is for --json", "run", "--max-output", "1m", "busybox", "--", "true")
	c.fails(2, "is for --json", "exec", "-d", "--json", "--max-output", "1m", id, "--", "true")
	c.fails(2, "--max-output", "run", "--json", "--max-output", "0", "busybox", "--", "true")
}
