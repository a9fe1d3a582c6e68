package proc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/guest/user"

	"golang.org/x/sys/unix"
)

// The tests of this package share one reaper: a program can only have one.
var reaper = sync.OnceValue(func() *Reaper {
	// Orphans come to this program, as they do to PID 1.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	// What the test was started with is none of the children's business.
	if err := unix.CloseRange(3, ^uint(0)>>32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		panic(err)
	}
	return NewReaper(300)
})

func newTable(t testing.TB, change ...func(*Config)) *Table {
	t.Helper()
	cfg := Config{Users: user.NewDatabase(""), Cwd: "/tmp", SpillDir: t.TempDir()}
	for _, f := range change {
		f(&cfg)
	}
	tab, err := NewTable(cfg, reaper())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, p := range tab.List() {
			if _, ended := p.Exit(); !ended {
				p.KillAll()
			}
			<-p.Done()
		}
		syscall.Close(tab.null)
	})
	return tab
}

func sh(script string) Spec { return Spec{Cmd: "/bin/sh", Args: []string{"-c", script}} }

// start starts spec and fails the test if that is refused.
func start(t testing.TB, tab *Table, spec Spec) *Process {
	t.Helper()
	p, err := tab.Start(spec)
	if err != nil {
		t.Fatalf("start %q %q: %v", spec.Cmd, spec.Args, err)
	}
	return p
}

func wait(t testing.TB, p *Process) Exit {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	e, err := p.Wait(ctx)
	if err != nil {
		t.Fatalf("process %d does not end: %v", p.Pid, err)
	}
	return e
}

// output reads everything kept of an ended process.
func output(t testing.TB, p *Process) (stdout, stderr string) {
	t.Helper()
	r := p.Log.Read(From{})
	defer r.Close()
	p.Release()
	var out [kinds]bytes.Buffer
	for {
		piece, err := r.Next(t.Context())
		if err == io.EOF {
			return out[Stdout].String(), out[Stderr].String()
		}
		if err != nil {
			t.Fatal(err)
		}
		if piece.Gap != 0 {
			t.Fatalf("gap %d..%d of kind %d", piece.Off, piece.Gap, piece.Kind)
		}
		out[piece.Kind].Write(piece.Data)
	}
}

func run(t testing.TB, tab *Table, spec Spec) (Exit, string, string) {
	t.Helper()
	p := start(t, tab, spec)
	e := wait(t, p)
	o, s := output(t, p)
	return e, o, s
}

func TestExitAndStreamsApart(t *testing.T) {
	t.Parallel()
	e, o, s := run(t, newTable(t), sh("echo out; echo err >&2; exit 3"))
	if e.Code != 3 || !e.Exited || o != "out\n" || s != "err\n" || e.StdoutBytes != 4 || e.StderrBytes != 4 || e.MaxRSS == 0 {
		t.Fatalf("%+v %q %q", e, o, s)
	}
	e, _, _ = run(t, newTable(t), sh("kill -9 $$"))
	if e.Code != 137 || e.Exited || e.Signal != 9 {
		t.Fatalf("%+v", e)
	}
}

func TestEnvironmentIsOnlyWhatIsAsked(t *testing.T) {
	t.Setenv("DSEC_LEAK", "1")
	tab := newTable(t, func(c *Config) { c.Env = map[string]string{"A": "global", "B": "global"} })
	s := Spec{Cmd: "env", Env: map[string]string{"B": "own"}, User: "nobody"}
	_, o, _ := run(t, tab, s)
	got := map[string]string{}
	for line := range strings.Lines(o) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		got[k] = v
	}
	want := map[string]string{"PATH": DefaultPath, "HOME": "/nonexistent", "USER": "nobody", "LOGNAME": "nobody", "A": "global", "B": "own"}
	if len(got) != len(want) {
		t.Fatalf("got %v", got)
	}
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s = %q, want %q", k, got[k], v)
		}
	}
}

func TestChildHasCleanState(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	_, o, _ := run(t, tab, sh(`ls /proc/self/fd; grep -E '^Sig(Blk|Ign)' /proc/self/status; cat /proc/self/oom_score_adj`))
	// 3 is ls's own.
	if !strings.HasPrefix(o, "0\n1\n2\n3\nSig") {
		t.Errorf("descriptors: %q", o)
	}
	// What whoever started the tests ignores stays ignored; as PID 1 a guest starts with nothing ignored.
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, inherited, _ := strings.Cut(string(status), "\nSigIgn:\t")
	if !strings.Contains(o, "SigBlk:\t0000000000000000\nSigIgn:\t"+inherited[:16]+"\n") {
		t.Errorf("signals: %q, ignored here: %s", o, inherited[:16])
	}
	if !strings.HasSuffix(o, "\n300\n") {
		t.Errorf("oom_score_adj: %q", o)
	}
}

// A program and whatever it forks, however soon, has the higher score, and the guest keeps its own.
func TestScoreIsThereFromTheStart(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				if _, o, _ := run(t, tab, Spec{Cmd: "cat", Args: []string{"/proc/self/oom_score_adj"}}); o != "300\n" {
					t.Errorf("oom_score_adj of a program: %q", o)
				}
				run(t, tab, Spec{Cmd: "/no/such/program"})
			}
		})
	}
	wg.Wait()
	r := reaper()
	r.mu.Lock() // no other test forks now
	defer r.mu.Unlock()
	if own, err := os.ReadFile("/proc/self/oom_score_adj"); err != nil || string(own) != string(r.oom.own)+"\n" || string(r.oom.own) == "300" {
		t.Errorf("own score %q afterwards, %v", own, err)
	}
}

func TestCommandThatCannotRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put := func(name, text string, mode os.FileMode) string {
		if err := os.WriteFile(dir+"/"+name, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return dir + "/" + name
	}
	tab := newTable(t)
	for _, c := range []struct {
		cmd, says string
		code      int
		ec        errs.Code
	}{
		{"no-such-command", "PATH=", 127, errs.CommandNotFound},
		{dir + "/none", "no such file", 127, errs.CommandNotFound},
		{put("plain", "x", 0o644), "permission denied", 126, errs.CommandNotExec},
		{dir, "permission denied", 126, errs.CommandNotExec},
		{put("script", "#!/no/such/interp -x\n", 0o755), "/no/such/interp", 127, errs.CommandNotFound},
		{put("garbage", "\x00\x01garbage", 0o755), "exec format", 126, errs.CommandNotExec},
	} {
		e, _, s := run(t, tab, Spec{Cmd: c.cmd})
		if e.Code != c.code || e.ErrorCode != c.ec || !strings.Contains(e.Error, c.says) || s != e.Error+"\n" {
			t.Errorf("%s: %+v, stderr %q", c.cmd, e, s)
		}
	}
}

func TestStartErrors(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	dir := t.TempDir()
	os.Chmod(dir, 0o700)
	for _, c := range []struct {
		spec Spec
		want errs.Code
	}{
		{Spec{Cmd: "true", Cwd: "/no/such"}, errs.CwdNotFound},
		{Spec{Cmd: "true", Cwd: "/etc/passwd"}, errs.CwdNotFound},
		{Spec{Cmd: "true", User: "nosuchuser"}, errs.UserNotFound},
		{Spec{Cmd: "true", User: "root:nosuchgroup"}, errs.UserNotFound},
		{Spec{Cmd: "true", User: "nobody", Cwd: dir}, errs.PermissionDenied},
		{Spec{}, errs.BadRequest},
		{Spec{Cmd: "true", Args: []string{"a\x00b"}}, errs.BadRequest},
		{Spec{Cmd: "true", Env: map[string]string{"A=B": ""}}, errs.BadRequest},
		{Spec{Cmd: "true", Args: []string{strings.Repeat("x", 1<<20)}}, errs.BadRequest},
	} {
		if _, err := tab.Start(c.spec); !errors.Is(err, c.want) {
			t.Errorf("%q cwd %q user %q: %v, want %s", c.spec.Cmd, c.spec.Cwd, c.spec.User, err, c.want)
		}
	}
}

func TestUserAndGroups(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	for spec, want := range map[string]string{
		"":            "0 0 0",
		"nobody":      "65534 65534 65534",
		"1234":        "1234 1234 1234",
		"1234:5":      "1234 5 5",
		"nobody:root": "65534 0 0",
	} {
		_, o, s := run(t, tab, Spec{Cmd: "sh", Args: []string{"-c", "echo $(id -u) $(id -g) $(id -G)"}, User: spec})
		if strings.TrimSpace(o) != want {
			t.Errorf("%q: %q %q, want %q", spec, o, s, want)
		}
	}
}

func TestStdin(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	spec := Spec{Cmd: "wc", Args: []string{"-c"}, Stdin: true}
	p := start(t, tab, spec)
	big := bytes.Repeat([]byte("x"), 1<<20)
	if err := p.Write(t.Context(), big); err != nil {
		t.Fatal(err)
	}
	p.CloseStdin()
	if err := p.CloseStdin(); err != nil {
		t.Fatal(err)
	}
	wait(t, p)
	if o, _ := output(t, p); strings.TrimSpace(o) != strconv.Itoa(len(big)) {
		t.Fatal(o)
	}
	if err := p.Write(t.Context(), big); !errors.Is(err, errs.ProcessExited) {
		t.Fatal(err)
	}
	// A process that does not read holds up only its writer.
	p = start(t, tab, Spec{Cmd: "sleep", Args: []string{"100"}, Stdin: true})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Write(ctx, big); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	p.KillAll()
	if e := wait(t, p); e.Signal != 9 {
		t.Fatalf("%+v", e)
	}
}

// Completion is the exit of the child, whoever still holds its pipes (reports 18, 21).
func TestEndDoesNotWaitForPipes(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	dir := t.TempDir()
	p := start(t, tab, sh("(while [ ! -e "+dir+"/go ]; do sleep 0.01; done; echo late) & echo early"))
	wait(t, p)
	r := p.Log.Read(From{})
	defer r.Close()
	piece, err := r.Next(t.Context())
	if err != nil || string(piece.Data) != "early\n" {
		t.Fatalf("%q %v", piece.Data, err)
	}
	if _, err := r.Next(t.Context()); err != io.EOF {
		t.Fatal(err)
	}
	os.WriteFile(dir+"/go", nil, 0o644)
	for {
		if o, _ := output(t, p); o == "early\nlate\n" {
			break
		}
		time.Sleep(5 * time.Millisecond)
		if t.Context().Err() != nil {
			t.Fatal("the descendant's output is not logged")
		}
	}
}

func TestTimeoutKillsTheGroupAndItsSession(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	// The second child leaves the group but not the session (set -m).
	spec := sh("sleep 1000 & bash -c 'set -m; sleep 1000 & echo $!'; echo $!; echo before; wait")
	spec.Timeout = 300 * time.Millisecond
	e, o, _ := run(t, tab, spec)
	if !e.TimedOut || e.Code != 137 {
		t.Fatalf("%+v", e)
	}
	f := strings.Fields(o)
	if len(f) != 3 || f[2] != "before" {
		t.Fatalf("output so far: %q", o)
	}
	for _, s := range f[:2] {
		pid, _ := strconv.Atoi(s)
		waitGone(t, pid)
	}
	spec = sh("while :; do echo x; sleep 0.02; done")
	spec.IdleTimeout, spec.Timeout = 200*time.Millisecond, 700*time.Millisecond
	if e, _, _ := run(t, tab, spec); !e.TimedOut || e.IdleTimeout {
		t.Fatalf("busy process: %+v", e)
	}
	spec = sh("echo x; sleep 1000")
	spec.IdleTimeout = 100 * time.Millisecond
	if e, o, _ := run(t, tab, spec); !e.IdleTimeout || e.TimedOut || o != "x\n" {
		t.Fatalf("idle process: %+v %q", e, o)
	}
}

// waitGone waits until pid is neither running nor a zombie.
func waitGone(t *testing.T, pid int) {
	t.Helper()
	for i := 0; syscall.Kill(pid, 0) == nil; i++ {
		if i > 2000 {
			t.Fatalf("process %d is still there", pid)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestOrphansAreReaped(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	_, o, _ := run(t, tab, sh("for i in 1 2 3 4 5; do (sh -c 'echo $PPID >/dev/null; sleep 0.05' & echo $!) ; done"))
	pids := strings.Fields(o)
	if len(pids) != 5 {
		t.Fatalf("%q", o)
	}
	for _, s := range pids {
		pid, _ := strconv.Atoi(s)
		waitGone(t, pid)
	}
}

func TestSignals(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	p := start(t, tab, sh("trap 'echo got; exit 5' USR1; echo ready; while :; do sleep 0.01; done"))
	r := p.Log.Read(From{})
	defer r.Close()
	r.Next(t.Context())
	if err := p.Signal(syscall.SIGUSR1, true); err != nil {
		t.Fatal(err)
	}
	if e := wait(t, p); e.Code != 5 {
		t.Fatalf("%+v", e)
	}
	if err := p.Signal(syscall.SIGTERM, false); !errors.Is(err, errs.ProcessExited) {
		t.Fatal(err)
	}
	if err := p.Signal(99, false); !errors.Is(err, errs.BadRequest) {
		t.Fatal(err)
	}
}

func TestPTY(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	spec := sh("tty; stty size; read x; stty size; echo got:$x; id -u")
	spec.PTY, spec.User = &Size{Cols: 80, Rows: 24}, "nobody"
	p := start(t, tab, spec)
	r := p.Log.Read(From{})
	defer r.Close()
	var got string
	read := func(until string) {
		t.Helper()
		for !strings.Contains(got, until) {
			piece, err := r.Next(t.Context())
			if err != nil {
				t.Fatalf("%v after %q", err, got)
			}
			got += string(piece.Data)
		}
	}
	read("24 80")
	if err := p.Resize(Size{Cols: 100, Rows: 40}); err != nil {
		t.Fatal(err)
	}
	if err := p.CloseStdin(); !errors.Is(err, errs.BadRequest) {
		t.Fatal(err)
	}
	if err := p.Write(t.Context(), []byte("hello\n")); err != nil {
		t.Fatal(err)
	}
	read("65534")
	if !strings.Contains(got, "/dev/pts/") || !strings.Contains(got, "40 100") || !strings.Contains(got, "got:hello") {
		t.Fatalf("%q", got)
	}
	if e := wait(t, p); e.Code != 0 {
		t.Fatalf("%+v", e)
	}
	if err := start(t, tab, sh("sleep 0.2")).Resize(Size{}); !errors.Is(err, errs.BadRequest) {
		t.Fatal(err)
	}
}

func TestTagsAndTable(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	spec := sh("sleep 1000")
	spec.Tag = "srv"
	p := start(t, tab, spec)
	if _, err := tab.Start(spec); !errors.Is(err, errs.TagInUse) {
		t.Fatal(err)
	}
	if q, err := tab.Find(0, "srv"); err != nil || q != p {
		t.Fatal(q, err)
	}
	p.KillAll()
	wait(t, p)
	if q, err := tab.Find(p.Pid, ""); err != nil || q != p {
		t.Fatal("an ended process is not found:", err)
	}
	q := start(t, tab, spec) // the tag is free again
	if r, _ := tab.Find(0, "srv"); r != q {
		t.Fatal("the tag names the old process")
	}
	if _, err := tab.Find(999999, ""); !errors.Is(err, errs.ProcessNotFound) {
		t.Fatal(err)
	}
	if _, err := tab.Find(0, "x"); !errors.Is(err, errs.ProcessNotFound) {
		t.Fatal(err)
	}
}

// noPid is above the pids that the kernel gives: nothing may reach a process by accident.
const noPid = 1 << 23

// pretend adds process noPid+pid that has ended with such output, without running any.
func pretend(tab *Table, pid int, spec Spec, output int, followed bool) *Process {
	p := &Process{Spec: spec, User: &user.User{}, table: tab, done: make(chan struct{}), Log: newLog(0, 0, "", time.Second, tab.Clock())}
	tab.add(p, noPid+pid)
	p.Log.Append(Stdout, make([]byte, output))
	if !followed {
		p.Release()
	}
	p.exit, p.over = Exit{Code: pid % 100, Exited: true, StdoutBytes: int64(output)}, true
	tab.ended(p)
	close(p.done)
	p.Log.end()
	p.Release()
	return p
}

// How a process ended is known much longer than its output, and longest of those that
// somebody will ask for.
func TestExitsOutliveOutput(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	tagged := Spec{Cmd: "x", Tag: "server"}
	pretend(tab, 1, tagged, 3000, true)
	pretend(tab, 2, Spec{Cmd: "x", Keep: true, Args: []string{strings.Repeat("a", 5000)}, Env: map[string]string{"A": strings.Repeat("a", 5000)}}, 3000, true)
	pretend(tab, 3, Spec{Cmd: "x"}, 3000, false)
	const n = 3 * keepEnded
	for pid := 4; pid < n; pid++ {
		pretend(tab, pid, Spec{Cmd: "x"}, 2000, true)
	}
	if l := tab.List(); len(l) < keepEnded || len(l) > keepEnded+sweepEvery {
		t.Errorf("%d processes are known", len(l))
	}
	for _, pid := range []int{1, 2, 3, n - 1} {
		p, err := tab.Find(noPid+pid, "")
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := p.Exit(); !ok || e.Code != pid%100 {
			t.Errorf("%d: %+v", pid, e)
		}
		if out, _ := output(t, p); pid != n-1 && len(out) != 3000 {
			t.Errorf("%d bytes of the output of %d are kept", len(out), pid)
		}
	}
	if p, _ := tab.Find(noPid+2, ""); len(p.Spec.Args) != 1 || len(p.Spec.Args[0]) > briefSpec || p.Spec.Env != nil {
		t.Error("a long command line is kept whole")
	}
	old, err := tab.Find(noPid+n-keepEnded*3/4, "")
	if err != nil {
		t.Fatal(err)
	}
	r := old.Log.Read(From{})
	defer r.Close()
	if piece, err := r.Next(t.Context()); err != nil || piece.Gap != 2000 {
		t.Errorf("%d..%d %v, want a gap of what is no longer kept", piece.Off, piece.Gap, err)
	}
	if _, err := tab.Find(noPid+5, ""); !errors.Is(err, errs.ProcessNotFound) || !strings.Contains(err.Error(), "no longer kept") {
		t.Error(err)
	}
	if m := memory(tab); m > keepOutput+DefaultLimit {
		t.Errorf("%d bytes of output are kept", m)
	}
}

func memory(tab *Table) (n int) {
	for _, p := range tab.List() {
		n += p.Log.Memory()
	}
	return n
}

// A process that prints much does not take the output of many that printed little, nor a
// foreground command that of a detached one.
func TestLargeOutputIsGivenUpFirst(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	for pid := 1; pid <= 60; pid++ {
		pretend(tab, pid, Spec{Cmd: "small"}, 3000, true)
	}
	pretend(tab, 100, Spec{Cmd: "large", Keep: true}, 900<<10, true)
	for pid := 101; pid <= 120; pid++ {
		pretend(tab, pid, Spec{Cmd: "large"}, 900<<10, true)
	}
	kept := func(pid int) bool {
		p, err := tab.Find(noPid+pid, "")
		if err != nil {
			t.Fatal(err)
		}
		from, _ := p.Log.Kept()
		return from == 0
	}
	for pid := 1; pid <= 60; pid++ {
		if !kept(pid) {
			t.Errorf("the small output of %d is gone", pid)
		}
	}
	if !kept(100) || kept(101) || kept(110) || !kept(120) {
		t.Error(kept(100), kept(101), kept(110), kept(120))
	}
	if m := memory(tab); m > keepOutput {
		t.Errorf("%d bytes of output are kept", m)
	}
}

func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			p, err := tab.Start(sh("echo " + strconv.Itoa(i) + "; exit " + strconv.Itoa(i%100)))
			if err != nil {
				t.Error(err)
				return
			}
			r := p.Log.Read(From{})
			defer r.Close()
			var out []byte
			for {
				piece, err := r.Next(t.Context())
				if err != nil {
					break
				}
				out = append(out, piece.Data...)
			}
			e, err := p.Wait(t.Context())
			if err != nil || e.Code != i%100 || string(out) != strconv.Itoa(i)+"\n" {
				t.Errorf("%d: %+v %q %v", i, e, out, err)
			}
		})
	}
	wg.Wait()
}

func BenchmarkTrue(b *testing.B) {
	tab := newTable(b)
	b.ReportAllocs()
	for b.Loop() {
		p := start(b, tab, Spec{Cmd: "/bin/true"})
		<-p.Done()
	}
}

func BenchmarkStream(b *testing.B) {
	tab := newTable(b)
	const size = 1 << 30
	b.SetBytes(size)
	for b.Loop() {
		p := start(b, tab, Spec{Cmd: "head", Args: []string{"-c", strconv.Itoa(size), "/dev/zero"}})
		r := p.Log.Read(From{})
		n := 0
		for {
			piece, err := r.Next(b.Context())
			if err != nil {
				break
			}
			n += len(piece.Data)
		}
		r.Close()
		if n != size {
			b.Fatal(n)
		}
	}
}

// Whatever ends gives back its goroutines and descriptors. Not parallel: it counts those
// of the whole program.
func TestNothingIsLeft(t *testing.T) {
	tab := newTable(t)
	wait(t, start(t, tab, sh("true"))) // what is made once is there now
	count := func() (goroutines, fds int) {
		d, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return runtime.NumGoroutine(), len(d)
	}
	settled := func(goroutines, fds int) bool {
		for range 400 {
			if g, f := count(); g <= goroutines && f <= fds {
				return true
			}
			time.Sleep(5 * time.Millisecond)
		}
		return false
	}
	time.Sleep(50 * time.Millisecond)
	g0, f0 := count()
	for i := range 30 {
		spec := sh("echo x; cat; exit 1")
		switch i % 5 {
		case 0:
			spec.PTY = &Size{Cols: 1, Rows: 1}
		case 1:
			spec.Stdin = true
		case 2:
			spec.Timeout, spec.IdleTimeout = time.Hour, time.Hour
		case 3:
			spec.Cmd = "/no/such/command"
		case 4:
			spec.OutputLimit, spec.SpillLimit = 1, 1<<20
			spec.Args[1] = "head -c 200000 /dev/zero"
		}
		p := start(t, tab, spec)
		r := p.Log.Read(From{})
		if i%5 < 2 {
			p.KillAll()
		}
		for err := error(nil); err == nil; { // a reader that does not read would hold up the process
			_, err = r.Next(t.Context())
		}
		r.Close()
		wait(t, p)
		p.Release()
		p.Log.Discard() // or the spill file stays until the process is forgotten
	}
	if !settled(g0, f0) {
		g, f := count()
		buf := make([]byte, 1<<16)
		t.Fatalf("%d goroutines and %d descriptors, before %d and %d\n%s", g, f, g0, f0, buf[:runtime.Stack(buf, true)])
	}
}
