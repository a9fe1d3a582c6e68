package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

func TestRunReturnsTheCommandsExitCode(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		args   []string
		code   int
		stdout string
		stderr string // part of it
	}{
		{"success", []string{"sh", "-c", "echo out; echo err >&2"}, 0, "out\n", "err\n"},
		{"failure", []string{"sh", "-c", "exit 3"}, 3, "", ""},
		{"signal", []string{"sh", "-c", "kill -9 $$"}, 137, "", ""},
		{"not executable", []string{"/etc/hosts"}, 126, "", "/etc/hosts: permission denied"},
		{"a directory", []string{"/etc"}, 126, "", "/etc: permission denied"},
		{"no such command", []string{"nosuchcommand"}, 127, "", "nosuchcommand: command not found"},
		{"no such path", []string{"/no/such/command"}, 127, "", "/no/such/command: no such file"},
		{"code above the shell's", []string{"sh", "-c", "exit 255"}, 255, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			label := "test=" + t.Name()
			r := shared.CLI(t, append([]string{"run", "--label", label, bed.Image, "--"}, c.args...)...)
			if r.Code != c.code || r.Stdout != c.stdout || !strings.Contains(r.Stderr, c.stderr) || strings.Count(r.Stderr, "\n") > 1 {
				t.Errorf("exit code %d, want %d; stdout %q, want %q; stderr %q", r.Code, c.code, r.Stdout, c.stdout, r.Stderr)
			}
			if left := shared.Must(t, "ls", "-q", "--label", label); left != "" {
				t.Errorf("run left sandboxes: %s", left)
			}
		})
	}
}

func TestRunPipesStdin(t *testing.T) {
	t.Parallel()
	want := bytes.Repeat([]byte("0123456789abcde\n"), 1<<16) // 1 MiB
	r := shared.Run(t.Context(), bytes.NewReader(want), "run", bed.Image, "--", "cat")
	if r.Code != 0 || r.Stdout != string(want) {
		t.Errorf("exit code %d, %d bytes of %d: %s", r.Code, len(r.Stdout), len(want), r.Stderr)
	}
	if got := shared.MustIn(t, "ignored", "run", "--no-stdin", bed.Image, "--", "wc", "-c"); got != "0" {
		t.Errorf("--no-stdin: the command read %s bytes", got)
	}
}

// The caller's stdin stays open: the end of the command alone must end run.
func TestRunEndsThoughStdinStaysOpen(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	defer r.Close()
	if res := shared.Run(t.Context(), r, "run", bed.Image, "--", "echo", "done"); res.Code != 0 || res.Stdout != "done\n" {
		t.Errorf("%+v", res)
	}
}

func TestRunPassesSpecAndEnvironment(t *testing.T) {
	t.Parallel()
	out := shared.Must(t, "run", "-e", "A=1 2", "--hostname", "box", "--workdir", "/tmp", "--user", "1000:1000", bed.Image, "--",
		"sh", "-c", `echo "$A"; hostname; pwd; id -u`)
	if out != "1 2\nbox\n/tmp\n1000" {
		t.Errorf("got %q", out)
	}
	r := shared.CLI(t, "run", "--timeout", "100ms", bed.Image, "--", "sh", "-c", "echo before; sleep 100")
	if r.Code != 137 || r.Stdout != "before\n" || !strings.Contains(r.Stderr, "--timeout") {
		t.Errorf("a command past its --timeout: %+v", r)
	}
}

func TestRunOnATerminal(t *testing.T) {
	t.Parallel()
	cmd := shared.Command(t.Context(), "run", "-t", bed.Image, "--", "sh", "-c", "stty size; tty; read x; echo got $x; exit 4")
	cmd.Env = append(cmd.Env, "TERM=xterm")
	f, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 33, Cols: 101})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	term := newScreen(f)
	term.await(t, "33 101")
	term.await(t, "/dev/pts/")
	fmt.Fprint(f, "hello\r")
	term.await(t, "got hello")
	code := exitCode(cmd.Wait())
	if code != 4 {
		t.Errorf("exit code %d, want 4; screen:\n%s", code, term)
	}
}

// A program that asks for a terminal gets one from a script as well, and the end of input.
func TestATerminalForScripts(t *testing.T) {
	t.Parallel()
	print := []string{"--", "sh", "-c", "test -t 1 && stty size; read x; echo end $x; exit 4"}
	for _, args := range [][]string{{"run", "-t", bed.Image}, {"exec", "-t", box(t)}} {
		if r := shared.CLI(t, append(args, print...)...); r.Code != 4 || r.Stdout != "24 80\r\nend\r\n" {
			t.Errorf("%q: %+v", args, r)
		}
	}
}

func TestCtrlCRemovesTheSandbox(t *testing.T) {
	t.Parallel()
	label := "test=" + t.Name()
	cmd := shared.Command(t.Context(), "run", "--label", label, bed.Image, "--", "sh", "-c", "echo started; sleep 1000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, len("started\n"))
	if _, err := io.ReadFull(out, line); err != nil {
		t.Fatal(err)
	}
	if n := len(bed.JSON[[]v1.Sandbox](t, shared, "ls", "--json", "--label", label)); n != 1 {
		t.Fatalf("%d sandboxes while it runs", n)
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := exitCode(cmd.Wait()); code != 130 {
		t.Errorf("exit code %d, want 130", code)
	}
	if left := shared.Must(t, "ls", "-q", "--label", label); left != "" {
		t.Errorf("left: %s", left)
	}
}

// Ctrl-C before the create is answered: the sandbox may or may not have been made, and
// must be gone either way.
func TestCtrlCDuringTheCreateLeavesNothing(t *testing.T) {
	t.Parallel()
	label, random := "test="+t.Name(), bed.Random(t)
	for range 15 {
		cmd := shared.Command(t.Context(), "run", "--label", label, bed.Image, "--", "sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// Any moment from the program's start to the command's will do.
		time.Sleep(time.Duration(random.Int64N(int64(40 * time.Millisecond))))
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		err := cmd.Wait()
		killed := cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled() // before it caught signals
		if code := exitCode(err); code != 130 && !killed {
			t.Errorf("exit code %d, want 130", code)
		}
	}
	bed.Eventually(t, "no sandbox is left", func() error {
		if left := shared.Must(t, "ls", "-q", "--label", label); left != "" {
			return errors.New(left)
		}
		return nil
	})
}

// What a killed run leaves is removed when its lease ends; a run that lives keeps its own.
func TestKilledRunLeavesNothing(t *testing.T) {
	t.Parallel()
	start := func(name, script string) (*exec.Cmd, string, io.Reader) {
		t.Helper()
		label := "test=" + t.Name() + "-" + name
		cmd := shared.Command(t.Context(), "run", "--lease", "1s", "--label", label, bed.Image, "--", "sh", "-c", "echo started; "+script)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, len("started\n"))); err != nil {
			t.Fatal(err)
		}
		return cmd, label, out
	}
	alive, _, out := start("alive", "sleep 4; echo end")
	killed, label, _ := start("killed", "sleep 1000")
	if n := len(bed.JSON[[]v1.Sandbox](t, shared, "ls", "--json", "--label", label)); n != 1 {
		t.Fatalf("%d sandboxes while it runs", n)
	}
	if err := killed.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	killed.Wait()
	bed.Eventually(t, "the sandbox of a killed run is removed", func() error {
		if left := shared.Must(t, "ls", "-q", "--label", label); left != "" {
			return errors.New(left)
		}
		return nil
	})
	rest, err := io.ReadAll(out)
	if code := exitCode(alive.Wait()); err != nil || code != 0 || string(rest) != "end\n" {
		t.Errorf("a run of several leases: exit code %d, %q, %v", code, rest, err)
	}
}

func exitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	return -1
}
