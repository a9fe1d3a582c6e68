package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/client"
)

func TestExec(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	ctx := t.Context()
	r, err := sb.Run(ctx, "sh", "-c", "echo out; echo err >&2; exit 3")
	if err != nil || r.Code != 3 || string(r.Stdout) != "out\n" || string(r.Stderr) != "err\n" {
		t.Errorf("%+v, %v", r, err)
	}
	r, err = sb.Exec(ctx, client.Cmd{Path: "sh", Args: []string{"-c", "cat; echo $X; pwd"}, Env: map[string]string{"X": "y"}, Dir: "/tmp"}, client.Input([]byte("in\n")))
	if err != nil || !strings.HasPrefix(string(r.Stdout), "in\ny\n/") || !strings.HasSuffix(string(r.Stdout), "/tmp\n") {
		t.Errorf("%s, %v", r.Stdout, err)
	}
	r, err = sb.Exec(ctx, client.Command("echo", "0123456789"), client.MaxOutput(4))
	if err != nil || !r.Truncated || len(r.Stdout) != 4 {
		t.Errorf("limited output: %+v, %v", r, err)
	}
	r, err = sb.Run(ctx, "no-such-command")
	if err != nil || r.Code != 127 || !errors.Is(r.Err, errs.CommandNotFound) {
		t.Errorf("unknown command: %+v, %v", r, err)
	}
	r, err = sb.Exec(ctx, client.Cmd{Path: "sleep", Args: []string{"60"}, Timeout: 20 * time.Millisecond})
	if err != nil || !r.TimedOut || r.Code != 137 {
		t.Errorf("timeout: %+v, %v", r, err)
	}
}

func TestStartStreams(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	p, err := sb.Start(t.Context(), client.Command("sh", "-c", "while read l; do echo got $l; done; echo end >&2"), client.IO{OpenStdin: true, Pipes: true})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(p.Stdin(), "one")
	fmt.Fprintln(p.Stdin(), "two")
	if err := p.Stdin().Close(); err != nil {
		t.Fatal(err)
	}
	errOut := make(chan []byte)
	go func() {
		b, _ := io.ReadAll(p.Stderr())
		errOut <- b
	}()
	out, err := io.ReadAll(p.Stdout())
	if err != nil || string(out) != "got one\ngot two\n" {
		t.Errorf("stdout %q, %v", out, err)
	}
	if b := <-errOut; string(b) != "end\n" {
		t.Errorf("stderr %q", b)
	}
	x, err := p.Wait()
	if err != nil || x.Code != 0 {
		t.Errorf("%+v, %v", x, err)
	}
	if a, b := p.Offsets(); a != uint64(len(out)) || b != 4 {
		t.Errorf("offsets %d %d", a, b)
	}
}

// A command that has ended is over, whatever stdin does.
func TestEndDoesNotWaitForStdin(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	block, w := io.Pipe()
	defer w.Close()
	p, err := sb.Start(t.Context(), client.Command("true"), client.IO{Stdin: block})
	if err != nil {
		t.Fatal(err)
	}
	if x, err := p.Wait(); err != nil || x.Code != 0 {
		t.Errorf("%+v, %v", x, err)
	}
}

func TestStartOfUnknownCommand(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	p, err := sb.Start(t.Context(), client.Command("no-such-command"), client.IO{})
	if err == nil {
		var x client.Exit
		if x, err = p.Wait(); err == nil {
			err = x.Err
		}
	}
	if !errors.Is(err, errs.CommandNotFound) {
		t.Errorf("start: %v", err)
	}
	if _, err := sb.StartDetached(t.Context(), client.Command("no-such-command")); !errors.Is(err, errs.CommandNotFound) {
		t.Errorf("detached: %v", err)
	}
}

func TestContextKillsTheProcess(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	ctx, cancel := context.WithCancel(t.Context())
	p, err := sb.Start(ctx, client.Command("sleep", "60"), client.IO{})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	x, err := p.Wait()
	if !errors.Is(err, errs.RequestCanceled) || x.Code != 137 {
		t.Errorf("%+v, %v", x, err)
	}
}

// Pipes that nobody reads must not keep Wait from returning.
func TestUnreadPipes(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	ctx, cancel := context.WithCancel(t.Context())
	p, err := sb.Start(ctx, client.Cmd{Path: "yes", Tag: "killed"}, client.IO{Pipes: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Stdout().Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := p.Wait(); !errors.Is(err, errs.RequestCanceled) {
		t.Errorf("%v", err)
	}
	if p, err = sb.Start(t.Context(), client.Cmd{Path: "sh", Args: []string{"-c", "echo; exec sleep 60"}, Tag: "left"}, client.IO{Pipes: true}); err != nil {
		t.Fatal(err)
	}
	p.Detach()
	if _, err := p.Wait(); err != nil {
		t.Errorf("%v", err)
	}
	eventually(t, "one is killed and one left", func() bool {
		l, err := sb.Processes(t.Context())
		return err == nil && len(l) == 2 && !l[0].Running && l[1].Running
	})
}

func TestWriterFailureKillsTheProcess(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	r, w := io.Pipe()
	r.Close()
	p, err := sb.Start(t.Context(), client.Cmd{Path: "yes", Tag: "y"}, client.IO{Stdout: w})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("%v", err)
	}
	eventually(t, "the process ends", func() bool {
		l, err := sb.Processes(t.Context())
		return err == nil && len(l) == 1 && !l[0].Running
	})
}

// Who only looks never ends what is looked at.
func TestWriterFailureOfAnAttachmentLeavesTheProcess(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	ctx := t.Context()
	if _, err := sb.StartDetached(ctx, client.Cmd{Path: "sh", Args: []string{"-c", "while :; do echo; sleep 0.01; done"}, Tag: "y"}); err != nil {
		t.Fatal(err)
	}
	r, w := io.Pipe()
	r.Close()
	for _, o := range []client.AttachOptions{{}, {NoFollow: true}, {FromEnd: true}} {
		eventually(t, "there is output to fail on", func() bool {
			l, err := sb.Processes(ctx)
			return err == nil && l[0].StdoutBytes > 0
		})
		p, err := sb.Attach(ctx, client.Selector{Tag: "y"}, client.IO{Stdout: w, OpenStdin: true}, o)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Wait(); !errors.Is(err, io.ErrClosedPipe) || !errors.Is(err, client.ErrWriter) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	time.Sleep(50 * time.Millisecond) // for a kill to be seen
	if l, err := sb.Processes(ctx); err != nil || len(l) != 1 || !l[0].Running {
		t.Errorf("%+v, %v", l, err)
	}
}

func TestDetachSignalAttach(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	ctx := t.Context()
	pid, err := sb.StartDetached(ctx, client.Cmd{Path: "sh", Args: []string{"-c", "trap 'echo term; exit 7' TERM; echo 0123456789; while :; do sleep 0.01; done"}, Tag: "server"})
	if err != nil || pid == 0 {
		t.Fatal(pid, err)
	}
	eventually(t, "output comes", func() bool {
		l, err := sb.Processes(ctx)
		return err == nil && l[0].StdoutBytes == 11
	})
	var out bytes.Buffer
	p, err := sb.Attach(ctx, client.Selector{Tag: "server"}, client.IO{Stdout: &out}, client.AttachOptions{StdoutFrom: 4, NoFollow: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); err != nil || out.String() != "456789\n" {
		t.Errorf("from offset 4: %q, %v", out.String(), err)
	}
	var live bytes.Buffer
	p, err = sb.Attach(ctx, client.Selector{PID: pid}, client.IO{Stdout: &live}, client.AttachOptions{FromEnd: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Resize(ctx, client.Size{Cols: 80, Rows: 24}); err != nil {
		t.Error(err)
	}
	// The attachment must be there before the signal, or it would start after the output.
	time.Sleep(20 * time.Millisecond)
	if err := p.Signal(ctx, 15); err != nil {
		t.Fatal(err)
	}
	if x, err := p.Wait(); err != nil || x.Code != 7 || live.String() != "term\n" {
		t.Errorf("%+v, %v, %q", x, err, live.String())
	}
	if err := sb.Kill(ctx, client.Selector{Tag: "none"}, 9); !errors.Is(err, errs.ProcessNotFound) {
		t.Errorf("kill of an unknown process: %v", err)
	}
}

func TestDetachLeavesTheProcess(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	p, err := sb.Start(t.Context(), client.Command("sleep", "60"), client.IO{})
	if err != nil {
		t.Fatal(err)
	}
	p.Detach()
	if _, err := p.Wait(); err != nil {
		t.Errorf("wait after detach: %v", err)
	}
	l, err := sb.Processes(t.Context())
	if err != nil || !l[0].Running {
		t.Errorf("%+v, %v", l, err)
	}
}

// breakAfter cuts the connection once so many bytes have come.
type breakAfter struct {
	bytes.Buffer
	at   []int
	cut  func()
	cuts atomic.Int32
}

func (b *breakAfter) Write(p []byte) (int, error) {
	n, err := b.Buffer.Write(p)
	if len(b.at) > 0 && b.Len() >= b.at[0] {
		b.at = b.at[1:]
		b.cuts.Add(1)
		b.cut()
	}
	return n, err
}

// What user reports of others' systems say goes wrong: output lost or doubled, or a
// stream that stays silent, after a connection broke.
func TestReattachDeliversEveryByteOnce(t *testing.T) {
	t.Parallel()
	s, sb := sandbox(t)
	out := &breakAfter{at: []int{1, 100_000, 400_000}, cut: s.Break}
	p, err := sb.Start(t.Context(), client.Command("sh", "-c", "seq 1 60000; sleep 0.1; seq 60001 120000; exit 5"), client.IO{Stdout: out})
	if err != nil {
		t.Fatal(err)
	}
	x, err := p.Wait()
	if err != nil || x.Code != 5 {
		t.Fatalf("%+v, %v", x, err)
	}
	var want bytes.Buffer
	for i := range 120000 {
		fmt.Fprintln(&want, i+1)
	}
	if !bytes.Equal(out.Bytes(), want.Bytes()) {
		t.Errorf("%d bytes came, want %d, equal contents", out.Len(), want.Len())
	}
	// A cut after the last byte has come needs no new connection.
	if out.cuts.Load() != 3 || s.Dials() < 2 {
		t.Errorf("%d cuts, %d dials: the test did not break the connection", out.cuts.Load(), s.Dials())
	}
}

func TestReattachKeepsStdin(t *testing.T) {
	t.Parallel()
	s, sb := sandbox(t)
	var out bytes.Buffer
	p, err := sb.Start(t.Context(), client.Command("cat"), client.IO{OpenStdin: true, KeepStdin: true, Stdout: &out})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(p.Stdin(), "before")
	eventually(t, "the echo comes", func() bool { n, _ := p.Offsets(); return n == 7 })
	s.Break()
	eventually(t, "it attaches again", func() bool { return s.Dials() == 2 })
	eventually(t, "a write arrives", func() bool {
		if _, err := fmt.Fprintln(p.Stdin(), "after"); err != nil {
			return false
		}
		return true
	})
	eventually(t, "the echo comes", func() bool { n, _ := p.Offsets(); return n == 13 })
	if err := p.Stdin().Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); err != nil || out.String() != "before\nafter\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
}

// However short its time, a re-attach is tried once, and the error is why that failed.
func TestReattachGivesUp(t *testing.T) {
	t.Parallel()
	s, _ := connect(t)
	c, err := client.New(client.Options{URL: s.URL, Token: "test-token", ReattachFor: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sb, err := c.Create(t.Context(), client.Spec{Image: "busybox"})
	if err != nil {
		t.Fatal(err)
	}
	p, err := sb.Start(t.Context(), client.Command("sleep", "60"), client.IO{})
	if err != nil {
		t.Fatal(err)
	}
	s.Fail("process.attach", 1000, errs.New(errs.EdgeUnreachable, "route", "the node is away"))
	s.Break()
	if _, err := p.Wait(); !errors.Is(err, errs.EdgeUnreachable) {
		t.Errorf("%v", err)
	}
}

func TestSessions(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	ctx := t.Context()
	ses, err := sb.OpenSession(ctx, client.SessionOptions{ID: "mine", User: "root"})
	if err != nil || ses.ID() != "mine" || ses.Info().User != "root" {
		t.Fatalf("%+v, %v", ses, err)
	}
	if r, err := ses.Sh(ctx, "echo hi; exit 4"); err != nil || r.Code != 4 || string(r.Stdout) != "hi\n" {
		t.Errorf("%+v, %v", r, err)
	}
	var out, errOut bytes.Buffer
	r, err := ses.Run(ctx, client.SessionCommand{Line: "echo a; echo b >&2"}, &out, &errOut)
	if err != nil || r.Code != 0 || out.String() != "a\n" || errOut.String() != "b\n" {
		t.Errorf("%+v, %v, %q %q", r, err, out.String(), errOut.String())
	}
	if l, err := sb.Sessions(ctx); err != nil || len(l) != 1 || l[0].Commands != 2 {
		t.Errorf("%+v, %v", l, err)
	}
	if err := ses.Close(ctx); err != nil {
		t.Error(err)
	}
	if _, err := sb.Session("mine").Sh(ctx, "true"); !errors.Is(err, errs.SessionNotFound) {
		t.Errorf("closed session: %v", err)
	}
}

// eventually polls for what has no event of its own.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it never happens that %s", what)
		}
	}
}
