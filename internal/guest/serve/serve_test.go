package serve

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// The guest under test is the real program, as an ordinary process on a socket.
var build = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "dsec-guest")
	if err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", dir+"/dsec-guest", "dsec/cmd/dsec-guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return dir + "/dsec-guest", nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if p, err := build(); err == nil {
		os.RemoveAll(filepath.Dir(p))
	}
	os.Exit(code)
}

type guest struct {
	*aether.Conn
	pid    int
	socket string
}

// start runs a guest and connects to it.
func start(t testing.TB, env ...string) *guest {
	t.Helper()
	path, err := build()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for p := dir; p != os.TempDir(); p = filepath.Dir(p) {
		os.Chmod(p, 0o755)
	}
	cmd := exec.Command(path, "--listen", dir+"/guest.sock")
	cmd.Env = append([]string{"GOMAXPROCS=2", "SECRET=1", "DSEC_GUEST_CWD=/tmp", "DSEC_ENV_GLOBAL=yes"}, env...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	g := &guest{pid: cmd.Process.Pid, socket: dir + "/guest.sock"}
	g.Conn = g.connect(t)
	return g
}

func (g *guest) connect(t testing.TB) *aether.Conn {
	t.Helper()
	for i := 0; ; i++ {
		c, err := net.Dial("unix", g.socket)
		if err == nil {
			conn, err := aether.NewClient(t.Context(), c, aether.ClientConfig{})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			return conn
		}
		if i > 1000 {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func call[Resp any, P interface {
	*Resp
	aether.Message
}](t testing.TB, c *aether.Conn, method string, req aether.Message) *Resp {
	t.Helper()
	resp := new(Resp)
	if err := c.Call(t.Context(), "", method, req, P(resp)); err != nil {
		t.Fatalf("%s: %v", method, err)
	}
	return resp
}

func callErr(t testing.TB, c *aether.Conn, method string, req aether.Message, want errs.Code) {
	t.Helper()
	if err := c.Call(t.Context(), "", method, req, &msg.Empty{}); !errors.Is(err, want) {
		t.Errorf("%s: %v, want %s", method, err, want)
	}
}

func sh(script string) *msg.StartRequest {
	return &msg.StartRequest{Cmd: "/bin/sh", Args: []string{"-c", script}}
}

// proc is a followed process.
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

// output reads a stream to its end.
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
	callErr(t, g.Conn, "process.signal", &msg.SignalRequest{Process: &msg.Selector{Pid: p.started.Pid}, Signal: 15}, errs.ProcessExited)
	callErr(t, g.Conn, "process.wait", &msg.SelectRequest{Process: &msg.Selector{Pid: 4000000}}, errs.ProcessNotFound)
}

// Without stdin_keep a lost stream closes stdin; the process goes on in either case.
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

// 256 MiB arrive complete and in order, and a slow reader loses nothing either.
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

// Nobody reading costs nothing: the process ends, the last bytes are kept, and the rest
// is reported as a gap, exactly.
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

func TestFiles(t *testing.T) {
	t.Parallel()
	g := start(t)
	d := filepath.Dir(g.socket) + "/files"
	call[msg.EntryInfo](t, g.Conn, "file.mkdir", &msg.MkdirRequest{Path: d, Parents: true})
	data := make([]byte, 5<<20)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	s, err := g.Open(t.Context(), "", "file.write", &msg.WriteRequest{Path: d + "/big", Mode: 0o640, Metadata: map[string]string{"k": "v"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(t.Context(), aether.KindInput, data); err != nil {
		t.Fatal(err)
	}
	s.CloseSend()
	if _, err := s.Recv(t.Context()); err != io.EOF {
		t.Fatal(err)
	}
	var w msg.WriteResult
	if err := s.Result(&w); err != nil || w.Bytes != uint64(len(data)) || w.Entry.Size != int64(len(data)) {
		t.Fatalf("%+v %v", &w, err)
	}
	if s, err = g.Open(t.Context(), "", "file.read", &msg.ReadRequest{Path: d + "/big", Offset: 100, Length: 3 << 20}); err != nil {
		t.Fatal(err)
	}
	var got []byte
	for {
		f, err := s.Recv(t.Context())
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, f.Payload...)
	}
	var e msg.EntryInfo
	if err := s.Result(&e); err != nil || !bytes.Equal(got, data[100:100+3<<20]) || e.Metadata["k"] != "v" || e.Permissions != "-rw-r-----" {
		t.Fatalf("%d bytes, %+v, %v", len(got), &e, err)
	}
	call[msg.WriteResult](t, g.Conn, "file.put", &msg.WriteRequest{Path: d + "/small", Data: []byte("hello"), Atomic: true})
	c := call[msg.FileContent](t, g.Conn, "file.get", &msg.ReadRequest{Path: d + "/small"})
	if string(c.Data) != "hello" || !c.Eof || c.Entry.Name != "small" {
		t.Fatalf("%+v", c)
	}
	callErr(t, g.Conn, "file.get", &msg.ReadRequest{Path: d + "/big"}, errs.BodyTooLarge)
	callErr(t, g.Conn, "file.get", &msg.ReadRequest{Path: d + "/none"}, errs.PathNotFound)
	call[msg.EntryInfo](t, g.Conn, "file.chmod", &msg.ChmodRequest{Path: d + "/small", Mode: 0o600})
	call[msg.EntryInfo](t, g.Conn, "file.chown", &msg.ChownRequest{Path: d + "/small", Owner: "nobody"})
	if e := call[msg.EntryInfo](t, g.Conn, "file.stat", &msg.PathRequest{Path: d + "/small"}); e.Owner != "nobody" || e.Mode&0o777 != 0o600 {
		t.Fatalf("%+v", e)
	}
	if e := call[msg.EntryInfo](t, g.Conn, "file.stat", &msg.PathRequest{Path: d + "/none", MissingOk: true}); e.Type != 0 {
		t.Fatalf("%+v", e)
	}
	call[msg.EntryInfo](t, g.Conn, "file.move", &msg.MoveRequest{Source: d + "/small", Destination: d + "/moved"})
	if l := call[msg.EntryList](t, g.Conn, "file.list", &msg.ListRequest{Path: d}); len(l.Entries) != 2 || l.Entries[1].Name != "moved" {
		t.Fatalf("%+v", l)
	}
	// A tree out and in again.
	if s, err = g.Open(t.Context(), "", "file.pack", &msg.PackRequest{Path: d, Contents: true}); err != nil {
		t.Fatal(err)
	}
	var tarball []byte
	for {
		f, err := s.Recv(t.Context())
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		tarball = append(tarball, f.Payload...)
	}
	var tree msg.TreeResult
	if err := s.Result(&tree); err != nil || tree.Entries != 2 || tree.Bytes != uint64(len(data))+5 {
		t.Fatalf("%+v %v", &tree, err)
	}
	unpack := func(b []byte, to string) error {
		s, err := g.Open(t.Context(), "", "file.unpack", &msg.UnpackRequest{Path: to, Parents: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Send(t.Context(), aether.KindInput, b); err == nil {
			s.CloseSend()
		}
		if _, err := s.Recv(t.Context()); err != io.EOF {
			return err
		}
		return s.Result(&msg.TreeResult{})
	}
	if err := unpack(append(tarball, make([]byte, 100000)...), d+"/copy"); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(d + "/copy/big"); err != nil || !bytes.Equal(b, data) {
		t.Fatal(len(b), err)
	}
	if err := unpack(tarball[:1000], d+"/cut"); !errors.Is(err, errs.BadRequest) {
		t.Error(err)
	}
	if n := call[msg.TreeResult](t, g.Conn, "file.remove", &msg.PathRequest{Path: d, Recursive: true}); n.Entries != 7 {
		t.Errorf("%+v", n)
	}
}

func TestWatch(t *testing.T) {
	t.Parallel()
	g := start(t)
	d := t.TempDir()
	s, err := g.Open(t.Context(), "", "file.watch", &msg.WatchRequest{Path: d, Entry: true})
	if err != nil {
		t.Fatal(err)
	}
	f, err := s.Recv(t.Context())
	var started msg.WatchStarted
	if err != nil || started.ParseWire(f.Payload) != nil || started.Path != d {
		t.Fatalf("%+v %v", &started, err)
	}
	os.WriteFile(d+"/x", []byte("abc"), 0o644)
	if f, err = s.Recv(t.Context()); err != nil {
		t.Fatal(err)
	}
	var e msg.FileEvent
	if err := e.ParseWire(f.Payload); err != nil || e.Name != "x" || e.Type != msg.EventTypeCreate || e.Entry == nil || e.Entry.Path != d+"/x" {
		t.Fatalf("%+v %v", &e, err)
	}
	s.Cancel()
}

func TestPorts(t *testing.T) {
	t.Parallel()
	g := start(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	u, err := net.Listen("unix", t.TempDir()+"/u")
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	for _, l := range []net.Listener{l, u} {
		go func() { // answers only after the other side's end
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				b, _ := io.ReadAll(c)
				c.Write(bytes.ToUpper(b))
				c.Close()
			}
		}()
	}
	port := uint32(l.Addr().(*net.TCPAddr).Port)
	for _, r := range []*msg.DialRequest{{Port: port}, {Port: port, Host: "127.0.0.1"}, {UnixPath: u.Addr().String()}} {
		s, err := g.Open(t.Context(), "", "port.dial", r)
		if err != nil {
			t.Fatal(err)
		}
		if f, err := s.Recv(t.Context()); err != nil || !f.IsMessage {
			t.Fatal("not connected:", err)
		}
		big := bytes.Repeat([]byte("abc"), 1<<20)
		if err := s.Send(t.Context(), aether.KindInput, big); err != nil {
			t.Fatal(err)
		}
		s.CloseSend()
		var got []byte
		for {
			f, err := s.Recv(t.Context())
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if !f.IsMessage {
				got = append(got, f.Payload...)
			}
		}
		if !bytes.Equal(got, bytes.ToUpper(big)) {
			t.Fatalf("%d bytes", len(got))
		}
	}
	found := false
	for _, p := range call[msg.PortList](t, g.Conn, "port.list", &msg.Empty{}).Ports {
		found = found || p.Port == port && p.Address == "127.0.0.1"
	}
	if !found {
		t.Error("port is not listed")
	}
	l.Close()
	for r, want := range map[*msg.DialRequest]errs.Code{
		{Port: port}: errs.PortClosed, {Port: 0}: errs.BadRequest, {Port: 70000}: errs.BadRequest,
		{Port: port, Host: "10.0.0.1"}: errs.BadRequest, {UnixPath: "/none"}: errs.PortClosed, {UnixPath: "rel"}: errs.BadRequest,
	} {
		callErr(t, g.Conn, "port.dial", r, want)
	}
}

func TestInfo(t *testing.T) {
	t.Parallel()
	g := start(t, "DSEC_GUEST_GENERATION=7", "DSEC_GUEST_NODE=n1", "DSEC_GUEST_USER=nobody")
	i := call[msg.GuestInfo](t, g.Conn, "guest.info", &msg.Empty{})
	if i.Version == "" || !strings.HasSuffix(i.Shell, "/bash") || i.DefaultCwd != "/tmp" || i.DefaultUser != "nobody" {
		t.Errorf("%+v", i)
	}
	if w := g.Welcome(); w.Generation != 7 || w.Node != "n1" {
		t.Errorf("%+v", w)
	}
	callErr(t, g.Conn, "no.such", &msg.Empty{}, errs.UnknownMethod)
	if r := call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: &msg.StartRequest{Cmd: "id", Args: []string{"-un"}}}); string(r.Stdout) != "nobody\n" {
		t.Errorf("%q", r.Stdout)
	}
}

// counts returns the guest's descriptors and children.
func counts(t *testing.T, pid int) (fds, children int) {
	t.Helper()
	d, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range tasks {
		b, _ := os.ReadFile(f)
		children += len(strings.Fields(string(b)))
	}
	return len(d), children
}

func TestManyAndNothingLeft(t *testing.T) {
	t.Parallel()
	g := start(t)
	call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: sh("true")})
	before, _ := counts(t, g.pid)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			r := &msg.ExecResult{}
			err := g.Call(t.Context(), "", "process.exec", &msg.ExecRequest{Start: sh(fmt.Sprintf("echo %d; exit %d", i, i%100))}, r)
			if err != nil || r.Exit.ExitCode != int32(i%100) || string(r.Stdout) != fmt.Sprintln(i) {
				t.Errorf("%d: %v %+v", i, err, r)
			}
		})
	}
	wg.Wait()
	for i := range 20 {
		s := call[msg.SessionInfo](t, g.Conn, "session.open", &msg.SessionOpenRequest{})
		call[msg.SessionResult](t, g.Conn, "session.exec", &msg.SessionRunRequest{Id: s.Id, Command: fmt.Sprintf("exit %d", i%2)})
		call[msg.Empty](t, g.Conn, "session.close", &msg.SessionSelect{Id: s.Id})
		r := sh("cat")
		r.Pty = &msg.PtySize{Cols: 1, Rows: 1}
		p := startProcess(t, g.Conn, r)
		call[msg.Empty](t, g.Conn, "process.signal", &msg.SignalRequest{Process: &msg.Selector{Pid: p.started.Pid}, Signal: 9})
		output(t, p.Stream)
		w, err := g.Open(t.Context(), "", "file.watch", &msg.WatchRequest{Path: "/tmp"})
		if err != nil {
			t.Fatal(err)
		}
		w.Recv(t.Context())
		w.Cancel()
	}
	var fds, children int
	for range 400 {
		if fds, children = counts(t, g.pid); fds <= before && children == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d descriptors, before %d; %d children", fds, before, children)
}

func connected(b *testing.B) *guest {
	runtime.GC()
	return start(b)
}

func BenchmarkExecTrue(b *testing.B) {
	g := connected(b)
	req := &msg.ExecRequest{Start: &msg.StartRequest{Cmd: "/bin/true"}}
	for b.Loop() {
		call[msg.ExecResult](b, g.Conn, "process.exec", req)
	}
}

func BenchmarkSession(b *testing.B) {
	for _, shell := range []string{"bash", "dash"} {
		b.Run(shell, func(b *testing.B) {
			g := connected(b)
			s := call[msg.SessionInfo](b, g.Conn, "session.open", &msg.SessionOpenRequest{Shell: shell})
			req := &msg.SessionRunRequest{Id: s.Id, Command: "true"}
			for b.Loop() {
				call[msg.SessionResult](b, g.Conn, "session.exec", req)
			}
		})
	}
}

func BenchmarkStdout(b *testing.B) {
	g := connected(b)
	const size = 1 << 30
	b.SetBytes(size)
	for b.Loop() {
		p := startProcess(b, g.Conn, &msg.StartRequest{Cmd: "head", Args: []string{"-c", fmt.Sprint(size), "/dev/zero"}})
		n := 0
		for {
			f, err := p.Recv(b.Context())
			if err != nil {
				break
			}
			n += len(f.Payload)
		}
		if n != size {
			b.Fatal(n)
		}
	}
}
