package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

// output is what a process wrote, to be looked at while it runs.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// pause pauses sb; what is on its way to it may prevent that, for a moment.
func pause(t *testing.T, sb *client.Sandbox) {
	t.Helper()
	bed.Eventually(t, "pause", func() error {
		r, err := sb.Pause(t.Context())
		if err != nil && !errors.Is(err, errs.StateConflict) {
			t.Fatal(err)
		}
		if err == nil && r.State != v1.StatePaused {
			err = fmt.Errorf("%+v", r)
		}
		return err
	})
}

func resume(t *testing.T, sb *client.Sandbox) {
	t.Helper()
	if _, err := sb.Resume(t.Context()); err != nil {
		t.Fatalf("resume: %v", err)
	}
}

// A stream that is attached to a process stays so over many pauses: nothing is lost or comes twice, and what is written
// to it while the sandbox is paused wakes it and arrives.
func TestStreamOverManyPauses(t *testing.T) {
	t.Parallel()
	const cycles = 100
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	var out, errOut output
	gaps := func(stderr bool, from, to uint64) { t.Errorf("a gap from %d to %d", from, to) }
	// It answers each line with many, so that it is at work when it stops.
	p, err := sb.Start(t.Context(), client.Command("sh", "-c", `n=0; while read x; do seq $n $((n+1999)); n=$((n+2000)); echo $x >&2; done; exit 7`),
		client.IO{OpenStdin: true, Stdout: &out, Stderr: &errOut, OnGap: gaps})
	if err != nil {
		t.Fatal(err)
	}
	in := p.Stdin()
	for i := range cycles {
		line := fmt.Sprintln("line", i)
		if i%2 == 0 { // at work when it is paused
			if _, err := io.WriteString(in, line); err != nil {
				t.Fatal(err)
			}
		}
		pause(t, sb)
		if i%2 == 0 {
			resume(t, sb)
			continue
		}
		if _, err := io.WriteString(in, line); err != nil {
			t.Fatal(err)
		}
		bed.Eventually(t, "stdin wakes the sandbox", func() error {
			if !strings.HasSuffix(errOut.String(), line) {
				return fmt.Errorf("it has read %d lines of %d", strings.Count(errOut.String(), "\n"), i+1)
			}
			return nil
		})
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	exit, err := p.Wait()
	if err != nil || exit.Code != 7 {
		t.Errorf("%+v, %v", exit, err)
	}
	var want, lines strings.Builder
	for i := range cycles * 2000 {
		fmt.Fprintln(&want, i)
	}
	for i := range cycles {
		fmt.Fprintln(&lines, "line", i)
	}
	if got := out.String(); got != want.String() {
		t.Errorf("%d bytes of output, want %d, or not in order", len(got), want.Len())
	}
	if got := errOut.String(); got != lines.String() {
		t.Errorf("its input was %q", got)
	}
	if v, err := shared.Client(t).Get(t.Context(), sb.ID()); err != nil || v.Pauses != cycles {
		t.Errorf("%+v, %v", v, err)
	}
}

// A command's time limit counts what its sandbox runs: a pause of more than that in the middle does not end it, and the limit
// then holds.
func TestTimeLimitOverAPause(t *testing.T) {
	t.Parallel()
	const limit, paused = 3 * time.Second, 5 * time.Second
	c := shared.Client(t)
	sb := shared.Sandbox(t, c, client.Spec{})
	begun := time.Now()
	long := client.Cmd{Path: "sh", Args: []string{"-c", "echo begun; sleep 1000"}, Timeout: limit}
	var out output
	p, err := sb.Start(t.Context(), long, client.IO{Stdout: &out})
	if err != nil {
		t.Fatal(err)
	}
	silent, err := sb.Start(t.Context(), client.Cmd{Path: "sleep", Args: []string{"1000"}, IdleTimeout: limit}, client.IO{})
	if err != nil {
		t.Fatal(err)
	}
	cli := make(chan bed.Result, 1)
	go func() {
		cli <- shared.CLI(t, "exec", "--timeout", "3s", sb.ID(), "--", "sh", "-c", "echo x > /cli; sleep 1000")
	}()
	bed.Eventually(t, "all commands run", func() error {
		_, err := sb.ReadFile(t.Context(), "/cli")
		return err
	})
	runs := time.Since(begun) // at most, before the pause
	pause(t, sb)
	from := time.Now()
	time.Sleep(paused)
	stood := time.Since(from)
	resume(t, sb)
	if runs < limit { // a busy machine may have been slower than that
		// What follows comes before any timer of the guest could be too late by more than it waits.
		all, err := sb.Processes(t.Context())
		if err != nil || len(all) != 3 {
			t.Errorf("right after the pause: %v, %v", all, err)
		}
		for _, p := range all {
			if !p.Running {
				t.Errorf("right after the pause: %+v", p)
			}
		}
	}
	for what, p := range map[string]*client.Process{"time limit": p, "limit of silence": silent} {
		exit, err := p.Wait()
		if err != nil || !exit.TimedOut && !exit.IdleTimedOut || exit.Duration < limit+stood-time.Millisecond {
			t.Errorf("%s: %+v, %v; want an end after %v", what, exit, err, limit+stood)
		}
	}
	if out.String() != "begun\n" {
		t.Errorf("%q", out.String())
	}
	if r := <-cli; r.Code != 137 || !strings.Contains(r.Stderr, "--timeout") {
		t.Errorf("the command line: %+v", r)
	}
}

// What goes on in the background goes on after a pause, as do connections to ports.
func TestBackgroundAndPortsOverAPause(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	var out output
	p, err := sb.Start(t.Context(), client.Command("sh", "-c", `i=0; while :; do i=$((i+1)); echo $i; usleep 1000; done`), client.IO{Stdout: &out})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Detach()
	if _, err := sb.StartDetached(t.Context(), client.Command("nc", "-ll", "-p", "700", "-e", "cat")); err != nil {
		t.Fatal(err)
	}
	bed.Eventually(t, "it listens", func() error {
		ports, err := sb.Ports(t.Context())
		if err == nil && len(ports) == 0 {
			err = fmt.Errorf("no port")
		}
		return err
	})
	conn, err := sb.Dial(t.Context(), "", 700)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	echo := func(text string) {
		t.Helper()
		if _, err := io.WriteString(conn, text); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, len(text))
		if _, err := io.ReadFull(conn, b); err != nil || string(b) != text {
			t.Fatalf("%q, %v", b, err)
		}
	}
	echo("before")
	for i := range 5 {
		pause(t, sb)
		if i%2 == 0 {
			resume(t, sb)
		}
		echo(fmt.Sprint("wakes it, if nobody has ", i))
		before := out.String()
		bed.Eventually(t, "the process counts on", func() error {
			if out.String() == before {
				return fmt.Errorf("still %d bytes", len(before))
			}
			return nil
		})
	}
	for i, line := range strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n") {
		if line != fmt.Sprint(i+1) {
			t.Fatalf("line %d is %q", i+1, line)
		}
	}
}
