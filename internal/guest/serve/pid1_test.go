package serve

import (
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// startPID1 runs a guest as PID 1 of a namespace. It needs root.
func startPID1(t *testing.T) *guest {
	t.Helper()
	unshare, err := exec.LookPath("unshare")
	if err != nil {
		t.Fatal("install the Debian package util-linux:", err)
	}
	path, err := buildPlain()
	if err != nil {
		t.Fatal(err)
	}
	return startWith(t, []string{unshare, "--pid", "--fork", "--mount-proc", "--kill-child"}, path)
}

// No signal from inside, by whoever, ends the guest; what it starts has none ignored.
func TestSignalsToPID1(t *testing.T) {
	t.Parallel()
	g := startPID1(t)
	r := call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: sh(`
		echo $$ $PPID
		i=1; while [ $i -le 64 ]; do kill -$i 1 2>/dev/null; i=$((i+1)); done
		kill -SEGV 1; kill -BUS 1; kill -TERM 1
		grep -E '^Sig(Blk|Ign)' /proc/self/status | tr -d '\n\t'`)})
	if !strings.HasSuffix(string(r.Stdout), "SigBlk:0000000000000000SigIgn:0000000000000000") || !strings.Contains(string(r.Stdout), " 1\n") {
		t.Fatalf("%+v %q %q", r.Exit, r.Stdout, r.Stderr)
	}
	// Also while the guest forks, which blocks signals in the forking thread.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: sh(`
				n=0; while [ $n -lt 20 ]; do i=1; while [ $i -le 64 ]; do kill -$i 1 2>/dev/null; i=$((i+1)); done; n=$((n+1)); done`)})
		})
		wg.Go(func() {
			for range 40 {
				r := call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: sh("echo alive")})
				if string(r.Stdout) != "alive\n" {
					t.Errorf("%q", r.Stdout)
				}
			}
		})
	}
	wg.Wait()
}

// Orphans of every depth come to PID 1 and do not stay as zombies; no exit code is lost
// meanwhile.
func TestZombies(t *testing.T) {
	t.Parallel()
	g := startPID1(t)
	r := call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: sh(`
		for i in 1 2 3 4 5 6 7 8 9 10; do
			setsid sh -c '(sleep 0.0'$i'; exit 5) & (sleep 0.1; exit 6) & exit 7' >/dev/null 2>&1 &
		done; exit 8`)})
	if r.Exit.ExitCode != 8 {
		t.Fatalf("%+v", r.Exit)
	}
	for range 400 {
		r = call[msg.ExecResult](t, g.Conn, "process.exec", &msg.ExecRequest{Start: sh("cat /proc/[0-9]*/stat 2>/dev/null | cut -d' ' -f1-3; exit 3")})
		if r.Exit.ExitCode != 3 {
			t.Fatalf("%+v", r.Exit)
		}
		lines := strings.Count(string(r.Stdout), "\n")
		if !strings.Contains(string(r.Stdout), ") Z") && lines <= 4 { // the guest, sh, cat, cut
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("left: %s", r.Stdout)
}

// All means all but the guest itself.
func TestSignalAll(t *testing.T) {
	t.Parallel()
	g := startPID1(t)
	p := startProcess(t, g.Conn, sh("setsid sleep 1000 & sleep 1000"))
	call[msg.Empty](t, g.Conn, "process.signal", &msg.SignalRequest{All: true, Signal: 9})
	if _, _, exit := output(t, p.Stream); exit.Signal != 9 {
		t.Errorf("%+v", exit)
	}
	call[msg.Empty](t, g.Conn, "process.signal", &msg.SignalRequest{All: true, Signal: 9})
	callErr(t, g.Conn, "process.signal", &msg.SignalRequest{All: true}, errs.BadRequest)
	callErr(t, g.Conn, "process.signal", &msg.SignalRequest{All: true, Signal: 9, Process: &msg.Selector{Pid: 1}}, errs.BadRequest)
	// A guest that is not PID 1 must never try.
	callErr(t, start(t).Conn, "process.signal", &msg.SignalRequest{All: true, Signal: 1}, errs.NotSupported)
}
