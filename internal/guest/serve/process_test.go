package serve

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

type process struct {
	*aether.Stream
	started msg.ProcessStarted
}

func startProcess(t testing.TB, c *aether.Conn, r *msg.StartRequest) *process {
	t.Helper()
	s, err := c.Open(t.Context(), "", "process.start", r)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{Stream: s}
	f, err := s.Recv(t.Context())
	if err != nil || !f.IsMessage {
		t.Fatalf("first frame %+v: %v", f, err)
	}
	if err := p.started.ParseWire(f.Payload); err != nil || p.started.Pid == 0 && r.Cmd != "missing" {
		t.Fatalf("%+v %v", &p.started, err)
	}
	return p
}

func output(t testing.TB, s *aether.Stream) (out [4][]byte, gaps []*msg.Gap, exit *msg.Exit) {
	t.Helper()
	for {
		f, err := s.Recv(t.Context())
		if err == io.EOF {
			exit = &msg.Exit{}
			if err := s.Result(exit); err != nil {
				t.Fatal(err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if f.IsMessage {
			g := &msg.Gap{}
			if err := g.ParseWire(f.Payload); err != nil {
				t.Fatal(err)
			}
			gaps = append(gaps, g)
			continue
		}
		out[f.Kind] = append(out[f.Kind], f.Payload...)
	}
}

func TestExec(t *testing.T) {
	t.Parallel()
	g := start(t)
	r := call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: sh("cat; echo err >&2; pwd; env; exit 9"), Stdin: []byte("in\x00\xff\n")})
	if r.Exit.ExitCode != 9 || string(r.Stderr) != "err\n" || !bytes.HasPrefix(r.Stdout, []byte("in\x00\xff\n/tmp\n")) || r.Truncated || r.Pid == 0 {
		t.Fatalf("%+v %q", r.Exit, r.Stdout)
	}
	if !bytes.Contains(r.Stdout, []byte("GLOBAL=yes")) || bytes.Contains(r.Stdout, []byte("SECRET")) || bytes.Contains(r.Stdout, []byte("DSEC_")) {
		t.Errorf("environment %q", r.Stdout)
	}
	r = call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: sh("ls /proc/self/fd")})
	if string(r.Stdout) != "0\n1\n2\n3\n" {
		t.Errorf("descriptors %q", r.Stdout)
	}
	r = call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: sh("seq 100000"), MaxOutput: 1000})
	if !r.Truncated || len(r.Stdout) != 1000 || !bytes.HasPrefix(r.Stdout, []byte("1\n2\n")) || !bytes.HasSuffix(r.Stdout, []byte("\n100000\n")) {
		t.Errorf("%d bytes: %q", len(r.Stdout), r.Stdout)
	}
	r = call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: &msg.StartRequest{Cmd: "missing"}})
	if r.Exit.ExitCode != 127 || r.Exit.ErrorCode != string(errs.CommandNotFound) || len(r.Stderr) == 0 || r.Pid != 0 {
		t.Errorf("%+v", r)
	}
	st := sh("echo before; sleep 1000")
	st.TimeoutMs = 100
	r = call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: st})
	if !r.Exit.TimedOut || r.Exit.ExitCode != 137 || string(r.Stdout) != "before\n" {
		t.Errorf("%+v %q", r.Exit, r.Stdout)
	}
	callErr(t, g.Conn, "process.exec", &msg.ExecRequest{}, errs.BadRequest)
	callErr(t, g.Conn, "process.exec", &msg.ExecRequest{Start: sh(""), MaxOutput: 1 << 30}, errs.BadRequest)
	callErr(t, g.Conn, "process.exec", &msg.ExecRequest{Start: &msg.StartRequest{Cmd: "true", Detach: true}}, errs.BadRequest)
	// A deadline takes the command with it.
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	err := g.Call(ctx, "", "process.exec", &msg.ExecRequest{Start: &msg.StartRequest{Cmd: "sleep", Args: []string{"1000"}, Tag: "cut"}}, &msg.ExecResult{})
	if !errors.Is(err, errs.DeadlineExceeded) {
		t.Fatal(err)
	}
	e := call[msg.Exit](t, g.Conn, "process.wait", &msg.SelectRequest{Process: &msg.Selector{Tag: "cut"}})
	if e.Signal != 9 {
		t.Errorf("%+v", e)
	}
	// In a batch too.
	res, err := g.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{
		{Method: "process.exec", Body: (&msg.ExecRequest{Start: sh("exit 4")}).AppendWire(nil)},
		{Method: "guest.info"},
	}})
	if err != nil || len(res.Items) != 2 || res.Items[0].Error != nil || res.Items[1].Error != nil {
		t.Fatalf("%+v %v", res, err)
	}
}

func TestStartStdinSignalAttach(t *testing.T) {
	t.Parallel()
	g := start(t)
	r := sh("read a; echo got $a; cat; echo end; exit 2")
	r.Stdin, r.Tag = true, "job"
	p := startProcess(t, g.Conn, r)
	if err := p.Send(t.Context(), aether.KindInput, []byte("one\n")); err != nil {
		t.Fatal(err)
	}
	if f, err := p.Recv(t.Context()); err != nil || string(f.Payload) != "got one\n" {
		t.Fatalf("%q %v", f.Payload, err)
	}
	call[msg.Empty](t, g.Conn, "process.input", &msg.InputRequest{Process: &msg.Selector{Tag: "job"}, Data: []byte("two\n")})
	callErr(t, g.Conn, "process.input", &msg.InputRequest{Process: &msg.Selector{Tag: "job"}, Pty: true}, errs.BadRequest)
	p.CloseSend()
	out, _, exit := output(t, p.Stream)
	if string(out[aether.KindStdout]) != "two\nend\n" || exit.ExitCode != 2 || exit.StdoutBytes != 16 {
		t.Fatalf("%q %+v", out, exit)
	}
	// Late attach to what has ended, at every offset.
	for off := range 18 {
		s, err := g.Open(t.Context(), "", "process.attach", &msg.AttachRequest{Process: &msg.Selector{Pid: p.started.Pid}, StdoutOffset: uint64(off)})
		if err != nil {
			t.Fatal(err)
		}
		got, gaps, e := output(t, s)
		if want := "got one\ntwo\nend\n"[min(off, 16):]; string(got[1]) != want || len(gaps) != 0 || e.ExitCode != 2 {
			t.Fatalf("offset %d: %q %+v", off, got[1], e)
		}
	}
	// Signals by the stream and by the method; the group gets them.
	p = startProcess(t, g.Conn, sh("trap 'echo usr1' USR1; sh -c 'trap \"echo child; exit\" USR1; echo up; while :; do sleep 0.01; done' & while :; do sleep 0.01; done"))
	f, err := p.Recv(t.Context())
	if err != nil || string(f.Payload) != "up\n" {
		t.Fatal(f, err)
	}
	if err := p.SendMessage(t.Context(), &msg.ProcessControl{Signal: int32(syscall.SIGUSR1)}); err != nil {
		t.Fatal(err)
	}
	var got string
	for !strings.Contains(got, "usr1") || !strings.Contains(got, "child") {
		if f, err = p.Recv(t.Context()); err != nil {
			t.Fatal(err)
		}
		got += string(f.Payload)
	}
	call[msg.Empty](t, g.Conn, "process.signal", &msg.SignalRequest{Process: &msg.Selector{Pid: p.started.Pid}, Signal: 15})
	if _, _, exit = output(t, p.Stream); exit.Signal != 15 || exit.ExitCode != 143 {
		t.Fatalf("%+v", exit)
	}
	// Its group has a signal until the child, too, has ended.
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		err := g.Conn.Call(t.Context(), "", "process.signal", &msg.SignalRequest{Process: &msg.Selector{Pid: p.started.Pid}, Signal: 15}, &msg.Empty{})
		if errors.Is(err, errs.ProcessExited) {
			break
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("a signal to a process that has ended: %v", err)
		}
	}
	callErr(t, g.Conn, "process.wait", &msg.SelectRequest{Process: &msg.Selector{Pid: 4000000}}, errs.ProcessNotFound)
}

func TestLostStream(t *testing.T) {
	t.Parallel()
	g := start(t)
	for _, keep := range []bool{false, true} {
		conn := g.connect(t)
		r := sh("cat >/dev/null; echo eof")
		r.Stdin, r.StdinKeep, r.Tag = true, keep, fmt.Sprint("keep", keep)
		startProcess(t, conn, r)
		conn.Close()
		sel := &msg.Selector{Tag: r.Tag}
		if keep {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			if err := g.Call(ctx, "", "process.wait", &msg.SelectRequest{Process: sel}, &msg.Exit{}); !errors.Is(err, errs.DeadlineExceeded) {
				t.Fatal(err)
			}
			call[msg.Empty](t, g.Conn, "process.close_stdin", &msg.SelectRequest{Process: sel})
		}
		if e := call[msg.Exit](t, g.Conn, "process.wait", &msg.SelectRequest{Process: sel}); e.ExitCode != 0 || e.StdoutBytes != 4 {
			t.Fatalf("keep %v: %+v", keep, e)
		}
	}
	d := startProcess(t, g.Conn, &msg.StartRequest{Cmd: "sleep", Args: []string{"1000"}, Detach: true, Tag: "bg"})
	if _, err := d.Recv(t.Context()); err != io.EOF {
		t.Fatal(err)
	}
	list := call[msg.ProcessList](t, g.Conn, "process.list", &msg.Empty{})
	found := false
	for _, p := range list.Processes {
		found = found || p.Tag == "bg" && p.Running && p.Pid == d.started.Pid && p.Start.Cmd == "sleep"
	}
	if !found {
		t.Fatalf("%+v", list.Processes)
	}
}

func TestPTY(t *testing.T) {
	t.Parallel()
	g := start(t)
	r := sh("read x; stty size; echo got:$x; read y")
	r.Pty = &msg.PtySize{Cols: 10, Rows: 5}
	p := startProcess(t, g.Conn, r)
	p.SendMessage(t.Context(), &msg.ProcessControl{Resize: &msg.PtySize{Cols: 99, Rows: 33}})
	p.Send(t.Context(), aether.KindInput, []byte("hi\n"))
	var got string
	for !strings.Contains(got, "got:hi") {
		f, err := p.Recv(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if f.Kind != aether.KindPTY {
			t.Fatal(f.Kind)
		}
		got += string(f.Payload)
	}
	if !strings.Contains(got, "33 99") {
		t.Errorf("%q", got)
	}
	call[msg.Empty](t, g.Conn, "process.resize", &msg.ResizeRequest{Process: &msg.Selector{Pid: p.started.Pid}, Size: &msg.PtySize{Cols: 1, Rows: 1}})
	callErr(t, g.Conn, "process.close_stdin", &msg.SelectRequest{Process: &msg.Selector{Pid: p.started.Pid}}, errs.BadRequest)
	call[msg.Empty](t, g.Conn, "process.input", &msg.InputRequest{Process: &msg.Selector{Pid: p.started.Pid}, Data: []byte("\x04"), Pty: true})
	if _, _, exit := output(t, p.Stream); exit.ExitCode != 1 {
		t.Fatalf("%+v", exit)
	}
}

func TestBigOutput(t *testing.T) {
	t.Parallel()
	g := start(t)
	const size = 256 << 20
	p := startProcess(t, g.Conn, sh(fmt.Sprintf("head -c %d /dev/zero | openssl enc -aes-128-ctr -K 0 -iv 0 2>/dev/null | tee /tmp/dsec-guest-test.$$ >/dev/null; sha256sum /tmp/dsec-guest-test.$$ >&2; cat /tmp/dsec-guest-test.$$; rm /tmp/dsec-guest-test.$$", size)))
	h := sha256.New()
	var n int
	var sum []byte
	for {
		f, err := p.Recv(t.Context())
		if err == io.EOF {
			break
		}
		if err != nil || f.IsMessage {
			t.Fatal("a gap, or", err)
		}
		if f.Kind == aether.KindStderr {
			sum = append(sum, f.Payload...)
			continue
		}
		h.Write(f.Payload)
		if n += len(f.Payload); n < 8<<20 && n%(1<<20) < 1000 {
			time.Sleep(20 * time.Millisecond)
		}
	}
	if n != size || !strings.HasPrefix(string(sum), fmt.Sprintf("%x", h.Sum(nil))) {
		t.Fatalf("%d bytes, %x, want %s", n, h.Sum(nil), sum)
	}
}

func TestNobodyReads(t *testing.T) {
	t.Parallel()
	g := start(t)
	r := sh("seq -f %09.0f 0 499999") // 10 bytes a line
	r.Detach, r.Tag, r.OutputLimit = true, "loud", 100000
	startProcess(t, g.Conn, r)
	e := call[msg.Exit](t, g.Conn, "process.wait", &msg.SelectRequest{Process: &msg.Selector{Tag: "loud"}})
	if e.StdoutBytes != 5000000 {
		t.Fatalf("%+v", e)
	}
	s, err := g.Open(t.Context(), "", "process.attach", &msg.AttachRequest{Process: &msg.Selector{Tag: "loud"}, StdoutOffset: 1000})
	if err != nil {
		t.Fatal(err)
	}
	out, gaps, _ := output(t, s)
	if len(gaps) != 1 || gaps[0].From != 1000 || gaps[0].Kind != uint32(aether.KindStdout) || gaps[0].To+uint64(len(out[1])) != 5000000 {
		t.Fatalf("gaps %+v, %d bytes", gaps, len(out[1]))
	}
	if len(out[1]) < 50000 || len(out[1]) > 100000 {
		t.Errorf("%d bytes kept of a limit of 100000", len(out[1]))
	}
	if line := gaps[0].To / 10; gaps[0].To%10 == 0 && !strings.HasPrefix(string(out[1]), fmt.Sprintf("%09d\n", line)) {
		t.Errorf("offset %d starts with %.10q", gaps[0].To, out[1])
	}
	// With a spill file everything is kept.
	r.Tag, r.SpillLimit = "spilled", 100<<20
	startProcess(t, g.Conn, r)
	call[msg.Exit](t, g.Conn, "process.wait", &msg.SelectRequest{Process: &msg.Selector{Tag: "spilled"}})
	if s, err = g.Open(t.Context(), "", "process.attach", &msg.AttachRequest{Process: &msg.Selector{Tag: "spilled"}}); err != nil {
		t.Fatal(err)
	}
	out, gaps, _ = output(t, s)
	if len(gaps) != 0 || len(out[1]) != 5000000 || !bytes.HasSuffix(out[1], []byte("000499999\n")) {
		t.Fatalf("gaps %v, %d bytes", gaps, len(out[1]))
	}
}

func TestSessions(t *testing.T) {
	t.Parallel()
	g := start(t)
	s := call[msg.SessionInfo](t, g.Conn, "session.open", &msg.SessionOpenRequest{Envs: map[string]string{"A": "b"}, User: "nobody"})
	if s.Id == "" || s.Pid == 0 || s.User != "nobody" || !strings.HasSuffix(s.Shell, "sh") {
		t.Fatalf("%+v", s)
	}
	exec := func(text string) *msg.SessionResult {
		t.Helper()
		return call[msg.SessionResult](t, g.Conn, "session.exec", &msg.SessionRunRequest{Id: s.Id, Command: text})
	}
	exec("cd /usr; f() { echo $A; }")
	if r := exec("pwd; f; id -un; echo e >&2; false"); string(r.Stdout) != "/usr\nb\nnobody\n" || string(r.Stderr) != "e\n" || r.ExitCode != 1 {
		t.Fatalf("%+v", r)
	}
	st, err := g.Open(t.Context(), "", "session.run", &msg.SessionRunRequest{Id: s.Id, Command: "echo out; sleep 0.05; echo more; echo e >&2; exit 6"})
	if err != nil {
		t.Fatal(err)
	}
	var out [4]string
	for {
		f, err := st.Recv(t.Context())
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		out[f.Kind] += string(f.Payload)
	}
	var r msg.SessionResult
	if err := st.Result(&r); err != nil || !r.Ended || r.ExitCode != 6 || out[1] != "out\nmore\n" || out[2] != "e\n" {
		t.Fatalf("%+v %q %v", &r, out, err)
	}
	callErr(t, g.Conn, "session.exec", &msg.SessionRunRequest{Id: s.Id, Command: "true"}, errs.SessionEnded)
	if l := call[msg.SessionList](t, g.Conn, "session.list", &msg.Empty{}); len(l.Sessions) != 1 || l.Sessions[0].Commands != 3 {
		t.Errorf("%+v", l.Sessions)
	}
	call[msg.Empty](t, g.Conn, "session.close", &msg.SessionSelect{Id: s.Id})
	callErr(t, g.Conn, "session.exec", &msg.SessionRunRequest{Id: s.Id}, errs.SessionNotFound)
}
