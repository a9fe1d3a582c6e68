package serve

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
	_ "dsec/internal/guest/boot" // so that a change there runs these tests again
)

// raceEnabled says that the guest is to be built with the race detector too.
var raceEnabled bool

// The guest under test is the real program, as an ordinary process on a socket. As PID 1
// it is always as in a sandbox: the race detector brings threads that are not Go's, which
// signals from inside do end.
var (
	build      = sync.OnceValues(func() (string, error) { return buildGuest(raceEnabled) })
	buildPlain = sync.OnceValues(func() (string, error) { return buildGuest(false) })
)

func buildGuest(race bool) (string, error) {
	dir, err := os.MkdirTemp("", "dsec-guest")
	if err != nil {
		return "", err
	}
	// The test's result depends on it, which the cache of results cannot see otherwise.
	if _, err := os.ReadFile("../../../cmd/dsec-guest/main.go"); err != nil {
		return "", err
	}
	args := []string{"build", "-trimpath", "-ldflags", "-s -w", "-o", dir + "/dsec-guest", "dsec/cmd/dsec-guest"}
	cgo := "CGO_ENABLED=0"
	if race {
		args, cgo = append([]string{"build", "-race"}, args[4:]...), "CGO_ENABLED=1"
	}
	cmd := exec.Command("go", args...)
	cmd.Env = append(os.Environ(), cgo)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return dir + "/dsec-guest", nil
}

func TestMain(m *testing.M) {
	code := m.Run()
	for _, b := range []func() (string, error){build, buildPlain} {
		if p, err := b(); err == nil {
			os.RemoveAll(filepath.Dir(p))
		}
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
	return startWith(t, nil, path, env...)
}

// startWith runs the guest at path by way of another program.
func startWith(t testing.TB, by []string, path string, env ...string) *guest {
	t.Helper()
	dir := t.TempDir()
	for p := dir; p != os.TempDir(); p = filepath.Dir(p) {
		os.Chmod(p, 0o755)
	}
	args := append(by, path, "--listen", dir+"/guest.sock")
	cmd := exec.Command(args[0], args[1:]...)
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
// output reads a stream to its end.
// Without stdin_keep a lost stream closes stdin; the process goes on in either case.
// 256 MiB arrive complete and in order, and a slow reader loses nothing either.
// Nobody reading costs nothing: the process ends, the last bytes are kept, and the rest
// is reported as a gap, exactly.
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

// privateDirty returns the memory that a guest alone has, in KiB.
// BenchmarkMemory reports what an idle guest costs: with one connection, and some seconds
// after a burst of work.
