package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/creack/pty"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/clienttest"
)

func TestTopOnce(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	busy := c.ok("create", "--label", "job=train7", "--qos", "be", "busybox")
	c.ok("create", "--count", "3", "busybox")
	out := c.ok("top", "--once", "--interval", "1s", "-n", "2", "--label", "job=train7")
	if lines := strings.Split(out, "\n"); len(lines) != 3 || !strings.HasPrefix(lines[0], "node "+clienttest.Node+": cpu ") || !strings.Contains(lines[0], " of 2 cores, memory 14 GiB/24 GiB, swap 0 B/8 GiB, pressure none, 4 sandboxes, 0 paused") ||
		!strings.HasPrefix(lines[1], "ID ") || !strings.HasPrefix(lines[2], busy) || !strings.Contains(lines[2], "train7") || !strings.Contains(lines[2], " be") {
		t.Errorf("%s", out)
	}
	var r topReading
	if err := json.Unmarshal([]byte(c.ok("top", "--once", "--json", "--interval", "1s", "-n", "3")), &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Sandboxes) != 3 || r.LeftOut != 1 || len(r.Nodes) != 1 || r.Nodes[0].Cores == nil || r.Nodes[0].CPU != 2000 {
		t.Fatalf("%+v", r)
	}
	for _, s := range r.Sandboxes {
		if s.Cores == nil || *s.Cores <= 0 || *s.Cores > 0.5 || s.IO == nil || *s.IO <= 0 || s.Usage.SwapBytes != 3<<20 || s.State != v1.StateRunning {
			t.Errorf("%+v", s)
		}
	}
	c.s.Fail("GET /v1/sandboxes/usage", 1, errs.New(errs.EdgeUnreachable, "edge.dial", "no answer"))
	c.fails(1, "edge_unreachable", "top", "--once")
	c.fails(2, "--sort", "top", "--sort", "colour")
	c.fails(2, "at least 1s", "top", "--interval", "10ms")
	c.fails(2, "must not be negative", "top", "-n", "-1")
}

func TestTopSorts(t *testing.T) {
	t.Parallel()
	f := func(v float64) *float64 { return &v }
	rows := map[string]topRow{
		"cpu":    {Cores: f(9), SandboxUsage: v1.SandboxUsage{ID: "cpu", Usage: &v1.Usage{}}},
		"memory": {Cores: f(1), SandboxUsage: v1.SandboxUsage{ID: "memory", Usage: &v1.Usage{MemoryBytes: 9}}},
		"swap":   {SandboxUsage: v1.SandboxUsage{ID: "swap", Usage: &v1.Usage{SwapBytes: 9}}},
		"io":     {IO: f(9), SandboxUsage: v1.SandboxUsage{ID: "io", Usage: &v1.Usage{}}},
		"none":   {SandboxUsage: v1.SandboxUsage{ID: "none"}},
	}
	for _, by := range topSorts {
		top := top{sort: by}
		for id, r := range rows {
			if id != by && top.weight(r) >= top.weight(rows[by]) {
				t.Errorf("by %s, %s comes before", by, id)
			}
		}
		if top.weight(rows["none"]) >= 0 {
			t.Errorf("by %s, one that cannot be read is not last", by)
		}
	}
}

// A node that has not read again has no new rates, and keeps the old ones.
func TestTopKeepsRatesOfACachedReading(t *testing.T) {
	t.Parallel()
	r := topReading{Sandboxes: make([]topRow, 5)}
	r.limit(7)
	if r.LeftOut != 0 || len(r.Sandboxes) != 5 {
		t.Errorf("%+v", r)
	}
	c := newCLI(t)
	c.ok("create", "busybox")
	a := &app{stdin: strings.NewReader(""), stdout: io.Discard, stderr: io.Discard, url: c.s.URL, token: clienttest.Token}
	conn, err := a.client()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	x := top{app: a, c: conn, sort: "cpu"}
	read := func() topRow {
		t.Helper()
		r, err := x.read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return r.Sandboxes[0]
	}
	if got := read(); got.Cores != nil || got.IO != nil {
		t.Errorf("the first reading has rates: %+v", got)
	}
	want := read()
	if want.Cores == nil || want.IO == nil {
		t.Fatalf("the second has none: %+v", want)
	}
	c.s.Freeze()
	if got := read(); got.Cores == nil {
		t.Errorf("%+v", got)
	}
	frozen := *read().Cores
	if again := *read().Cores; again != frozen {
		t.Errorf("%v, then %v of the same reading", frozen, again)
	}
}

// screen collects what a terminal shows.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

func TestTopOnATerminal(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	c.ok("create", "--count", "30", "--label", "job=a", "busybox")
	for _, key := range []string{"q", "\x03"} {
		p, tty, err := pty.Open()
		if err != nil {
			t.Fatal(err)
		}
		if err := pty.Setsize(p, &pty.Winsize{Rows: 12, Cols: 60}); err != nil {
			t.Fatal(err)
		}
		var shown screen
		copied := make(chan struct{})
		go func() {
			defer close(copied)
			io.Copy(&shown, p)
		}()
		a := &app{stdin: tty, stdout: tty, stderr: io.Discard}
		done := make(chan int)
		go func() { done <- a.main(t.Context(), c.args("top", "--interval", "1s")) }()
		eventually(t, "a table is shown", func() bool { return strings.Contains(shown.String(), "q quits") })
		first := shown.String()
		if !strings.HasPrefix(first, altScreen+toTop) || !strings.Contains(first, "and 22 more") {
			t.Errorf("%q", first)
		}
		for _, l := range strings.Split(strings.TrimPrefix(first, altScreen+toTop), "\r\n") {
			if l = strings.TrimSuffix(strings.TrimSuffix(l, allBelow), restOfLine); len(l) > 60 {
				t.Errorf("a line of %d: %q", len(l), l)
			}
		}
		if n := strings.Count(first, "\r\n"); n > 11 {
			t.Errorf("%d lines on 12", n+1)
		}
		c.s.Fail("GET /v1/sandboxes/usage", 1, errs.New(errs.EdgeUnreachable, "edge.dial", "the server restarts"))
		eventually(t, "the failure is told, and the table stays", func() bool { return strings.Contains(shown.String(), "the server restarts") })
		io.WriteString(p, key)
		if code := <-done; code != 0 {
			t.Errorf("exit code %d at %q", code, key)
		}
		tty.Close()
		p.Close()
		<-copied
		if !strings.HasSuffix(shown.String(), mainScreen) {
			t.Errorf("the terminal is left as it is: %q", shown.String()[max(0, len(shown.String())-80):])
		}
	}
}

// In a pipe each refresh follows the one before, until somebody ends it.
func TestTopInAPipe(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	c.ok("create", "busybox")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	a := &app{stdin: strings.NewReader(""), stdout: w, stderr: io.Discard}
	done := make(chan int)
	go func() {
		defer w.Close()
		done <- a.main(ctx, c.args("top", "--json", "--interval", "1s"))
	}()
	dec := json.NewDecoder(r)
	for range 2 {
		var reading topReading
		if err := dec.Decode(&reading); err != nil {
			t.Fatal(err)
		}
		if len(reading.Sandboxes) != 1 || reading.Sandboxes[0].Cores == nil {
			t.Errorf("%+v", reading)
		}
	}
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit code %d", code)
	}
}
