package session

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/guest/proc"
	"dsec/internal/guest/user"

	"golang.org/x/sys/unix"
)

var reaper = sync.OnceValue(func() *proc.Reaper {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	if err := unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		panic(err)
	}
	return proc.NewReaper(0)
})

func newTable(t testing.TB) *Table {
	t.Helper()
	procs, err := proc.NewTable(proc.Config{Users: user.NewDatabase(""), Cwd: "/tmp", SpillDir: t.TempDir()}, reaper())
	if err != nil {
		t.Fatal(err)
	}
	tab := NewTable(procs)
	t.Cleanup(func() {
		for _, s := range tab.List() {
			tab.Close(s.ID)
			<-s.Proc.Done()
		}
		for _, p := range procs.List() {
			p.KillAll()
		}
	})
	return tab
}

// shells returns every shell of the machine that a sandbox may have.
func shells(t testing.TB) map[string]string {
	t.Helper()
	dir := t.TempDir()
	m := map[string]string{"bash": "/bin/bash", "dash": "/bin/dash"}
	for name, path := range m {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("NOT TESTED with %s: %v (install the Debian package %s)", name, err, name)
			delete(m, name)
		}
	}
	if busybox, err := os.Readlink("/bin/busybox"); err == nil || fileExists("/bin/busybox") {
		_ = busybox
		if err := os.Symlink("/bin/busybox", dir+"/ash"); err != nil {
			t.Fatal(err)
		}
		m["ash"] = dir + "/ash"
	} else {
		t.Error("NOT TESTED with busybox: install the Debian package busybox-static")
	}
	return m
}

func fileExists(path string) bool { _, err := os.Stat(path); return err == nil }

func open(t testing.TB, tab *Table, r Request) *Session {
	t.Helper()
	s, err := tab.Open(t.Context(), r)
	if err != nil {
		t.Fatalf("open %q: %v", r.Shell, err)
	}
	return s
}

// run runs a command and returns its output.
func run(t testing.TB, s *Session, text string, timeout time.Duration) (r Result, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var out, errOut strings.Builder
	r, err := s.Run(ctx, text, timeout, func(p proc.Piece) error {
		if p.Gap != 0 {
			t.Errorf("gap %d to %d", p.Off, p.Gap)
		}
		if p.Kind == proc.Stderr {
			errOut.Write(p.Data)
		} else {
			out.Write(p.Data)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%s: run %q: %v", s.Shell, text, err)
	}
	return r, out.String(), errOut.String()
}

func eachShell(t *testing.T, f func(t *testing.T, shell string)) {
	for name, path := range shells(t) {
		t.Run(name, func(t *testing.T) { t.Parallel(); f(t, path) })
	}
}

func TestCommands(t *testing.T) {
	eachShell(t, func(t *testing.T, shell string) {
		s := open(t, newTable(t), Request{Shell: shell, Env: map[string]string{"GIVEN": "yes"}})
		for _, c := range []struct {
			text, out, err string // err: a part of stderr; * anything
			code           int
		}{
			{"true", "", "", 0},
			{"false", "", "", 1},
			{"echo out; echo err >&2", "out\n", "err\n", 0},
			{"printf 'no newline'", "no newline", "", 0},
			{"", "", "", 0},
			{"# only a comment", "", "", 0},
			{"echo $GIVEN", "yes\n", "", 0},
			{"cd /usr && X=1 && f() { echo f$X; }", "", "", 0},
			{"pwd; f", "/usr\nf1\n", "", 0},
			{"export Y='a  b'", "", "", 0},
			{"sh -c 'echo \"$Y\"'", "a  b\n", "", 0},
			{"echo 'it'\\''s'; echo \"double\"; echo `echo back`", "it's\ndouble\nback\n", "", 0},
			{"cat <<E\nline $X\n'quoted'\nE", "line 1\n'quoted'\n", "", 0},
			{"for i in 1 2; do\necho $i\ndone", "1\n2\n", "", 0},
			{"if", "", "*", -1},
			{"echo 'unterminated", "", "*", -1},
			{"echo )", "", "*", -1},
			{"echo still here", "still here\n", "", 0},
			{"no_such_command_x", "", "not found", 127},
			{"cat", "", "", 0}, // stdin is empty
			{"read x; echo $?", "1\n", "", 0},
			{"(exit 7)", "", "", 7},
			{"set -f; echo /*", "/*\n", "", 0},
			{"echo /*", "/*\n", "", 0}, // options stay
			{"exec 3>/dev/null; echo ok", "ok\n", "", 0},
			{"exec >/no/such/dir/x; echo here", "here\n", "", 0},
			{"printf() { :; }; echo fine", "fine\n", "", 0},
			{"echo after functions", "after functions\n", "", 0},
			{"echo \\\\ \t x", "\\ x\n", "", 0},
			{"IFS=0127; (exit 127)", "", "", 127}, // the report of a code is not split
			{"unset IFS", "", "", 0},
		} {
			r, o, e := run(t, s, c.text, 0)
			if r.Ended || r.TimedOut {
				t.Fatalf("%q ended the shell: %+v, stderr %q", c.text, r, e)
			}
			if c.text == "exec >/no/such/dir/x; echo here" { // shells differ in whether they go on
				continue
			}
			if o != c.out || (c.err == "") != (e == "") || c.err != "*" && !strings.Contains(e, c.err) || c.code >= 0 && r.Code != c.code || c.code < 0 && r.Code == 0 {
				t.Errorf("%q: code %d, stdout %q, stderr %q; want %+v", c.text, r.Code, o, e, c)
			}
		}
		if r, _, _ := run(t, s, "exit 3", 0); !r.Ended || r.Code != 3 {
			t.Errorf("exit 3: %+v", r)
		}
		if _, err := s.Run(t.Context(), "true", 0, nil); !errors.Is(err, errs.SessionEnded) {
			t.Error(err)
		}
	})
}

// A command has stdin, stdout and stderr, and nothing of the session's.
func TestDescriptors(t *testing.T) {
	eachShell(t, func(t *testing.T, shell string) {
		s := open(t, newTable(t), Request{Shell: shell})
		_, o, _ := run(t, s, "ls /proc/self/fd; readlink /proc/self/fd/0", 0)
		if o != "0\n1\n2\n3\n/dev/null\n" { // 3 is ls's own
			t.Errorf("%q", o)
		}
	})
}

// What interrupts the wait for the next command does not end the shell.
func TestWaitIsNotInterrupted(t *testing.T) {
	eachShell(t, func(t *testing.T, shell string) {
		s := open(t, newTable(t), Request{Shell: shell})
		_, pid, _ := run(t, s, "TMOUT=1; (set -o posix) 2>/dev/null && set -o posix; trap : USR1; echo $$", 0)
		time.Sleep(1500 * time.Millisecond)
		n, err := strconv.Atoi(strings.TrimSpace(pid))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(n, syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
		for range 2 {
			if r, o, e := run(t, s, "echo still", 0); r.Ended || o != "still\n" || e != "" {
				t.Fatal(r, o, e)
			}
		}
	})
}

// Scripts that were run do not stay in memory.
func TestScriptsAreForgotten(t *testing.T) {
	s := open(t, newTable(t), Request{Shell: shells(t)["bash"]})
	text := ": '" + strings.Repeat("x", 100<<10) + "'"
	for i := range 50 {
		if r, _, e := run(t, s, text+"; (exit "+strconv.Itoa(i)+")", 0); r.Code != i || e != "" {
			t.Fatal(i, r, e)
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(s.feed.file, &st); err != nil {
		t.Fatal(err)
	}
	if kept := st.Blocks * 512; st.Size < 5e6 || kept > 1<<20 {
		t.Errorf("of %d bytes of scripts %d are kept", st.Size, kept)
	}
}

func TestLargeCommandAndOutput(t *testing.T) {
	eachShell(t, func(t *testing.T, shell string) {
		s := open(t, newTable(t), Request{Shell: shell})
		big := strings.Repeat("0123456789abcde'\n", 20000) // beyond the pipe, with quotes
		_, o, _ := run(t, s, "cat <<'END'\n"+big+"END", 0)
		if o != big {
			t.Fatalf("%d bytes of %d", len(o), len(big))
		}
		r, o, _ := run(t, s, "head -c 20000000 /dev/zero | tr '\\0' x; exit 5", 0)
		if len(o) != 20000000 || !r.Ended || r.Code != 5 {
			t.Fatal(len(o), r)
		}
	})
}

func TestTimeout(t *testing.T) {
	eachShell(t, func(t *testing.T, shell string) {
		tab := newTable(t)
		s := open(t, tab, Request{Shell: shell})
		run(t, s, "sleep 1000 & echo $! >"+t.TempDir()+"/pid; V=kept", 0)
		time.Sleep(30 * time.Millisecond) // the kernel's clock of process starts is coarse
		_, pid, _ := run(t, s, "echo $!", 0)
		r, o, _ := run(t, s, "echo before; sleep 1000", 200*time.Millisecond)
		if !r.TimedOut || r.Ended || o != "before\n" {
			t.Fatalf("%+v %q", r, o)
		}
		if _, o, _ = run(t, s, "echo $V", 0); o != "kept\n" {
			t.Fatalf("%q", o)
		}
		// The job of an earlier command was left alone.
		n, _ := strconv.Atoi(strings.TrimSpace(pid))
		if n == 0 || syscall.Kill(n, 0) != nil {
			t.Errorf("background job %q is gone", pid)
		}
		// A shell that does not come back is given up.
		r, _, _ = run(t, s, "while :; do :; done", 50*time.Millisecond)
		if !r.TimedOut || !r.Ended {
			t.Fatalf("%+v", r)
		}
		if n != 0 && syscall.Kill(n, 0) == nil {
			for range 400 {
				if syscall.Kill(n, 0) != nil {
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
			t.Error("the ended session left its job behind")
		}
	})
}

func TestCancelFreesTheSession(t *testing.T) {
	t.Parallel()
	s := open(t, newTable(t), Request{})
	ctx, cancel := context.WithCancel(t.Context())
	_, err := s.Run(ctx, "echo go; sleep 1000", 0, func(proc.Piece) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if r, o, _ := run(t, s, "echo again", 0); o != "again\n" || r.Ended {
		t.Fatalf("%+v %q", r, o)
	}
}

func TestBusyAndLateOutput(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	s := open(t, tab, Request{ID: "one"})
	dir := t.TempDir()
	_, o, _ := run(t, s, "(while [ ! -e "+dir+"/go ]; do sleep 0.01; done; echo late; : >"+dir+"/done) & echo now", 0)
	if o != "now\n" {
		t.Fatalf("%q", o)
	}
	os.WriteFile(dir+"/go", nil, 0o644)
	for !fileExists(dir + "/done") {
		time.Sleep(5 * time.Millisecond)
	}
	if _, o, _ := run(t, s, "true", 0); o != "late\n" {
		t.Fatalf("%q", o)
	}
	started := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		s.Run(t.Context(), "echo x; sleep 0.3", 0, func(proc.Piece) error { close(started); return nil })
	})
	<-started
	if _, err := s.Run(t.Context(), "true", 0, nil); !errors.Is(err, errs.SessionBusy) {
		t.Error(err)
	}
	if _, err := tab.Open(t.Context(), Request{ID: "one"}); !errors.Is(err, errs.StateConflict) || !strings.Contains(errs.Of(err).Hint(), "another name") {
		t.Errorf("%v: %q", err, errs.Of(err).Hint())
	}
	wg.Wait()
	if err := tab.Close("one"); err != nil {
		t.Fatal(err)
	}
	if _, err := tab.Find("one"); !errors.Is(err, errs.SessionNotFound) {
		t.Fatal(err)
	}
	open(t, tab, Request{ID: "one"})
}

func TestNoShell(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	_, err := tab.Open(t.Context(), Request{Env: map[string]string{"PATH": t.TempDir()}})
	if !errors.Is(err, errs.NotSupported) || !strings.Contains(err.Error(), "no shell") {
		t.Error(err)
	}
	if _, err := tab.Open(t.Context(), Request{Shell: "/bin/true"}); !errors.Is(err, errs.NotSupported) {
		t.Error(err)
	}
	if len(tab.List()) != 0 {
		t.Error("a session that did not open is listed")
	}
}

func FuzzQuote(f *testing.F) {
	f.Add("a'b''c")
	f.Add("")
	f.Fuzz(func(t *testing.T, s string) {
		var b strings.Builder
		quote(&b, s)
		q := b.String()
		// Undo it by the shell's rules.
		var out strings.Builder
		in := false
		for i := 0; i < len(q); i++ {
			switch {
			case q[i] == '\'':
				in = !in
			case !in && q[i] == '\\':
				i++
				out.WriteByte(q[i])
			case !in:
				t.Fatalf("byte outside quotes in %q", q)
			default:
				out.WriteByte(q[i])
			}
		}
		if in || out.String() != s {
			t.Fatalf("%q -> %q -> %q", s, q, out.String())
		}
	})
}

func BenchmarkCommand(b *testing.B) {
	for name, path := range shells(b) {
		b.Run(name, func(b *testing.B) {
			s := open(b, newTable(b), Request{Shell: path})
			b.ReportAllocs()
			for b.Loop() {
				if r, err := s.Run(b.Context(), "true", 0, nil); err != nil || r.Code != 0 {
					b.Fatal(r, err)
				}
			}
		})
	}
}
