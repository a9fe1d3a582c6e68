package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/clienttest"
)

// cli runs command lines against a fake server.
type cli struct {
	t *testing.T
	s *clienttest.Server
}

func newCLI(t *testing.T) *cli { return &cli{t, clienttest.New(t)} }

type outcome struct {
	code     int
	out, err string
}

func (c *cli) run(args ...string) outcome { return c.with(c.t.Context(), "", args...) }

func (c *cli) with(ctx context.Context, stdin string, args ...string) outcome {
	var out, errOut bytes.Buffer
	a := &app{stdin: strings.NewReader(stdin), stdout: &out, stderr: &errOut}
	code := a.main(ctx, c.args(args...))
	return outcome{code, out.String(), errOut.String()}
}

func (c *cli) args(args ...string) []string {
	return append([]string{"--url", c.s.URL, "--token", clienttest.Token}, args...)
}

// ok runs a command line that must succeed and returns its output without the last newline.
func (c *cli) ok(args ...string) string {
	c.t.Helper()
	r := c.run(args...)
	if r.code != 0 {
		c.t.Fatalf("dsec %s: exit code %d\n%s%s", strings.Join(args, " "), r.code, r.out, r.err)
	}
	return strings.TrimSuffix(r.out, "\n")
}

// fails runs a command line that must end with code and say what.
func (c *cli) fails(code int, what string, args ...string) {
	c.t.Helper()
	if r := c.run(args...); r.code != code || !strings.Contains(r.err, what) {
		c.t.Errorf("dsec %s: exit code %d, want %d with %q:\n%s", strings.Join(args, " "), r.code, code, what, r.err)
	}
}

func into[T any](t *testing.T, s string) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%v in %q", err, s)
	}
	return v
}

func TestCreateLsInspectRm(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "--label", "job=a", "--memory", "1g", "--cpu", "500m", "-e", "A=b", "--ttl", "2h", "busybox")
	sb := into[v1.Sandbox](t, c.ok("inspect", "--json", id))
	if sb.Spec.MemoryBytes != 1<<30 || sb.Spec.CPUMillis != 500 || sb.Spec.Env["A"] != "b" || sb.Spec.MaxTTL != 7200 || sb.Spec.Labels["job"] != "a" {
		t.Errorf("%+v", sb.Spec)
	}
	if out := c.ok("inspect", id); !strings.Contains(out, "memory 1 GiB") || !strings.Contains(out, "peak 2 MiB") {
		t.Errorf("%s", out)
	}
	if lines := strings.Split(c.ok("create", "--count", "3", "--label", "job=b", "busybox"), "\n"); len(lines) != 3 {
		t.Errorf("%q", lines)
	}
	if one := into[v1.Sandbox](t, c.ok("create", "--json", "--backend", "hollow")); one.State != v1.StateRunning {
		t.Errorf("%+v", one)
	}
	if all := into[[]v1.Sandbox](t, c.ok("ls", "--json")); len(all) != 5 {
		t.Errorf("%d in ls", len(all))
	}
	if got := c.ok("ls", "-q", "-l", "job=a", "--state", "running"); got != id {
		t.Errorf("ls -q: %q", got)
	}
	if out := c.ok("ls"); !strings.HasPrefix(out, "ID ") || strings.Count(out, "\n") != 5 {
		t.Errorf("%s", out)
	}
	if got := c.ok("rm", id); got != id {
		t.Errorf("rm printed %q", got)
	}
	c.fails(1, "sandbox_gone", "inspect", id)
	other := c.ok("create", "busybox")
	for _, flags := range [][]string{nil, {"--json"}} {
		if r := c.run(append([]string{"inspect", id, other}, flags...)...); r.code != 1 || !strings.Contains(r.out, other) || !strings.Contains(r.err, "sandbox_gone") {
			t.Errorf("one of two cannot be shown: %+v", r)
		}
	}
	if r := c.run("rm", "-l", "job=none"); r.code != 0 || r.out != "" || !strings.Contains(r.err, "no sandbox has these labels") {
		t.Errorf("%+v", r)
	}
	c.ok("rm", other)
	if got := into[v1.DeleteResult](t, strings.TrimSpace(c.run("rm", "--json", id).out)); got.ID != id || got.Error.Code != string(errs.SandboxGone) {
		t.Errorf("%+v", got)
	}
	if out := c.ok("rm", "--label", "job=b"); strings.Count(out, "\n") != 2 {
		t.Errorf("%q", out)
	}
	c.fails(2, "confirm with --force", "rm", "--all")
	c.ok("rm", "--all", "--force")
	if n := len(c.s.Sandboxes()); n != 0 {
		t.Errorf("%d left", n)
	}
	c.ok("rm", "--all", "--force") // of nothing
	if key := c.ok("create", "--idempotency-key", "k", "busybox"); key != c.ok("create", "--idempotency-key", "k", "busybox") {
		t.Error("one key made two sandboxes")
	}
	c.ok("rm", "--all", "--force")
	if r := c.run("rm", "--all", "--force"); r.code != 0 || !strings.Contains(r.err, "there are no sandboxes") {
		t.Errorf("%+v", r)
	}
}

func TestCreateManyReportsFailures(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	c.s.Fail("one of batch", 1, errs.New(errs.NodeFull, "edge.admit", "memory is used up"))
	r := c.run("create", "--count", "3", "--json", "busybox")
	if r.code != 1 || strings.Count(r.out, "\n") != 3 || !strings.Contains(r.out, `"code":"node_full"`) || !strings.Contains(r.err, "1 of 3") {
		t.Errorf("%+v", r)
	}
}

// No sandbox stays of which nobody was told.
func TestCreateManyEndsWithASignal(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	r, w := io.Pipe()
	a := &app{stdin: strings.NewReader(""), stdout: w, stderr: io.Discard, signals: newSignals(cancel)}
	done := make(chan int, 1)
	go func() {
		defer w.Close()
		done <- a.main(ctx, c.args("create", "--count", "5000", "busybox"))
	}()
	said := map[string]bool{}
	for s := bufio.NewScanner(r); s.Scan(); {
		said[s.Text()] = true
		if len(said) == 3 {
			a.signals.deliver(syscall.SIGINT)
		}
	}
	if code := <-done; code != 130 {
		t.Errorf("exit code %d", code)
	}
	if len(said) > 4*createChunk {
		t.Errorf("it went on, and made %d", len(said))
	}
	for _, id := range c.s.Sandboxes() {
		if !said[id] {
			t.Errorf("%s is there, and nobody was told", id)
		}
	}
}

// A request that fails as a whole is no failure of one child.
func TestForkOfNothingDoesNotCount(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := strings.TrimSpace(c.ok("create", "busybox"))
	c.ok("rm", id)
	if r := c.run("fork", id, "--count", "3"); r.code != 1 || strings.Contains(r.err, "of 3") || !strings.Contains(r.err, "was removed") {
		t.Errorf("%+v", r)
	}
}

func TestImportOfASnapshotThatFailsHasNoEmptyName(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	file := filepath.Join(t.TempDir(), "none.tar")
	if err := os.WriteFile(file, []byte("none"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := c.run("snapshot", "import", file); r.code != 1 || !strings.Contains(r.err, "import snapshot: ") {
		t.Errorf("%+v", r)
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	r := c.with(t.Context(), "input\n", "run", "busybox", "--", "sh", "-c", "cat; echo err >&2; exit 9")
	if r.code != 9 || r.out != "input\n" || r.err != "err\n" {
		t.Errorf("%+v", r)
	}
	c.fails(127, "command_not_found", "run", "busybox", "--", "no-such-command")
	c.fails(125, "image_not_found", "run", "none", "--", "true")
	c.fails(137, "longer than --timeout", "run", "--timeout", "50ms", "busybox", "--", "sleep", "60")
	c.fails(2, "the command is missing", "run", "busybox")
	// The command's -e and -d would be ours.
	c.fails(2, "write -- before the command", "exec", "someid", "grep", "-e", "A=b", "file")
	c.fails(2, "write -- before the command", "run", "busybox", "echo", "hi")
	for _, verb := range []string{"up", "down"} {
		c.fails(2, "--data is empty", verb, "--data", "")
	}
	c.fails(2, "IMAGE is missing", "run", "--", "true")
	c.fails(2, "needs a terminal", "run", "-it", "busybox", "--", "true")
	if left := c.s.Sandboxes(); len(left) != 0 {
		t.Errorf("run left %v", left)
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	want := "client  " + buildVersion()
	if out := strings.Join(strings.Fields(c.ok("version", "--client")), " "); !strings.HasPrefix(out, strings.Join(strings.Fields(want), " ")) {
		t.Errorf("%q", out)
	}
	if out := c.ok("--version"); out != "dsec "+buildVersion() {
		t.Errorf("%q", out)
	}
}

// A note is one line for people, without what reports have for programs.
func TestBriefErrors(t *testing.T) {
	t.Parallel()
	e := errs.Wrap(errs.PortClosed, "guest.port", "connect to port 9", errors.New("connection refused"))
	for _, x := range []struct {
		err  error
		want string
	}{
		{fmt.Errorf("dial port 9: %w", e), "dial port 9: connect to port 9: connection refused"},
		{errs.New(errs.NodeFull, "edge", "no room"), "no room"},
		{io.EOF, "EOF"},
	} {
		if got := brief(x.err); got != x.want {
			t.Errorf("%q, want %q", got, x.want)
		}
	}
}

func TestCount(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		n           int
		thing, want string
	}{{0, "check", "0 checks"}, {1, "check", "1 check"}, {2, "check", "2 checks"}, {1, "sandbox", "1 sandbox"}, {1, "process", "1 process"}, {2, "process", "2 processes"}, {3, "sandbox", "3 sandboxes"}} {
		if got := count(x.n, x.thing); got != x.want {
			t.Errorf("%q, want %q", got, x.want)
		}
	}
	if got := (signalError{syscall.SIGTERM}).Error(); got != "stopped by SIGTERM" {
		t.Errorf("%q", got)
	}
}

// run must remove its sandbox also when it is stopped.
func TestRunRemovesAfterSignal(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	r, w := io.Pipe()
	a := &app{stdin: strings.NewReader(""), stdout: w, stderr: io.Discard, signals: newSignals(cancel)}
	done := make(chan int)
	go func() { done <- a.main(ctx, c.args("run", "busybox", "--", "sh", "-c", "echo up; sleep 60")) }()
	if _, err := io.ReadFull(r, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	a.signals.deliver(syscall.SIGTERM)
	if code := <-done; code != 143 {
		t.Errorf("exit code %d, want 143", code)
	}
	if left := c.s.Sandboxes(); len(left) != 0 {
		t.Errorf("run left %v", left)
	}
}

// A create whose answer nobody waits for makes a sandbox all the same.
func TestRunRemovesAfterSignalDuringCreate(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	var once sync.Once
	c.s.Before("POST /v1/sandboxes", func() {
		once.Do(func() {
			cancel(signalError{syscall.SIGINT})
			time.Sleep(20 * time.Millisecond) // the client leaves before the sandbox is there
		})
	})
	if r := c.with(ctx, "", "run", "busybox", "--", "true"); r.code != 130 {
		t.Errorf("%+v", r)
	}
	if left := c.s.Sandboxes(); len(left) != 0 {
		t.Errorf("run left %v", left)
	}
}

func TestExec(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "busybox")
	if out := c.ok("exec", "-e", "X=y", "--cwd", "/tmp", id, "--", "sh", "-c", "echo $X; pwd"); !strings.HasPrefix(out, "y\n") || !strings.HasSuffix(out, "/tmp") {
		t.Errorf("%q", out)
	}
	if r := c.with(t.Context(), "a\n", "exec", "-i", id, "--", "cat"); r.code != 0 || r.out != "a\n" {
		t.Errorf("%+v", r)
	}
	if r := c.with(t.Context(), "a\n", "exec", id, "--", "cat"); r.code != 0 || r.out != "" {
		t.Errorf("stdin without -i: %+v", r)
	}
	if r := c.run("exec", id, "--", "sh", "-c", "kill -9 $$"); r.code != 137 {
		t.Errorf("%+v", r)
	}
	c.fails(127, "command_not_found", "exec", id, "--", "no-such-command")
	c.fails(126, "command_not_executable", "exec", id, "--", "/etc/passwd")
	c.fails(125, "sandbox_not_found", "exec", "nothing", "--", "true")
	c.fails(137, "longer than --timeout", "exec", "--timeout", "50ms", id, "--", "sleep", "60")
	c.fails(2, "put the command after it", "exec", id, "true", "--", "x")
	c.fails(2, "cannot be used with", "exec", "-d", "-t", id, "--", "true")
	c.fails(2, "write -- before the command, so that its flags are its own: "+id+" -- ls", "exec", id, "ls", "-la")
	c.fails(2, "write -- before the command", "run", "busybox", "ls", "--all")
	c.fails(2, "unknown flag: --bogus", "exec", "--bogus", id, "--", "ls")
	c.ok("exec", "-d", "-i", "--tag", "cat", id, "--", "cat")
	if r := c.with(t.Context(), "to cat\n", "attach", id, "cat"); r.code != 0 || r.out != "to cat\n" {
		t.Errorf("stdin of a detached process: %+v", r)
	}
	c.fails(127, "command_not_found", "exec", "-d", "-i", id, "--", "no-such-command")
	c.fails(2, "not of the form", "exec", "-e", "=x", id, "--", "true")
}

// The first signal is the command's, the second ours.
func TestExecForwardsSignals(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "busybox")
	ctx, cancel := context.WithCancelCause(t.Context())
	r, w := io.Pipe()
	a := &app{stdin: strings.NewReader(""), stdout: w, stderr: io.Discard, signals: newSignals(cancel)}
	done := make(chan int)
	go func() {
		done <- a.main(ctx, c.args("exec", id, "--", "sh", "-c", "trap 'echo int; exit 5' INT; echo up; while :; do sleep 0.01; done"))
	}()
	if _, err := io.ReadFull(r, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, r)
	a.signals.deliver(syscall.SIGINT)
	if code := <-done; code != 5 {
		t.Errorf("exit code %d, want the command's 5", code)
	}
}

func TestProcesses(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "busybox")
	pid := c.ok("exec", "-d", "--tag", "srv", id, "--", "sh", "-c", "trap 'echo bye; exit 7' TERM; echo 0123456789; echo warn >&2; while :; do sleep 0.01; done")
	if got := into[struct{ PID uint32 }](t, c.ok("exec", "-d", "--json", id, "--", "sh", "-c", "echo second; exit 3")); got.PID == 0 {
		t.Error("no pid in JSON")
	}
	eventually(t, "both have printed", func() bool {
		l := into[[]processJSON](t, c.ok("ps", "--json", id))
		return len(l) == 2 && l[0].StdoutBytes == 11 && l[0].StderrBytes == 5 && l[1].ExitCode != nil && *l[1].ExitCode == 3
	})
	if out := c.ok("ps", id); !strings.Contains(out, pid) || !strings.Contains(out, "exit 3") || !strings.Contains(out, "running") {
		t.Errorf("%s", out)
	}
	if r := c.run("logs", id, "srv"); r.out != "0123456789\n" || r.err != "warn\n" || r.code != 0 {
		t.Errorf("%+v", r)
	}
	if out := c.ok("logs", id); !strings.Contains(out, "srv | 0123456789\n") || !strings.Contains(out, " | second") {
		t.Errorf("%q", out)
	}
	c.fails(1, "process_not_found", "logs", id, "none")
	c.fails(2, "not a signal", "kill", "-s", "NOPE", id, "srv")
	if out := c.ok("kill", "-s", "sigterm", id, "srv"); out != "" {
		t.Errorf("%q", out)
	}
	eventually(t, "it has ended", func() bool { return !into[[]processJSON](t, c.ok("ps", "--json", id))[0].Running })
	if r := c.run("attach", "--from", "5", id, pid); r.code != 7 || r.out != "56789\nbye\n" {
		t.Errorf("%+v", r)
	}
	if r := c.run("attach", "--from", "500", id, pid); r.code != 7 || r.out != "" || !strings.Contains(r.err, "offset 500 is past the end of the output, which has 15 bytes\n") {
		t.Errorf("%+v", r)
	}
	for dec := json.NewDecoder(strings.NewReader(c.ok("logs", "--json", id, pid))); dec.More(); {
		var l logJSON
		if err := dec.Decode(&l); err != nil || l.PID == 0 || l.Tag != "srv" || l.Text == nil ||
			!(l.Stream == "stdout" && (*l.Text == "0123456789\n" || *l.Text == "bye\n") || l.Stream == "stderr") {
			t.Errorf("logs --json: %+v, %v", l, err)
		}
	}
	if r := c.run("logs", "-f", id); r.code != 0 || !strings.Contains(r.out, "srv | bye") {
		t.Errorf("%+v", r)
	}
	c.fails(125, "process_not_found", "attach", id, "none")
	c.fails(1, "process_exited", "kill", id, "srv")
}

func TestCp(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "busybox")
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	if err := os.MkdirAll(filepath.Join(src, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(src, "sub/run"), []byte("hi"), 0o755); err != nil {
		t.Fatal(err)
	}
	c.ok("cp", src, id+":/work")
	c.ok("cp", id+":/work", filepath.Join(dir, "back"))
	if fi, err := os.Stat(filepath.Join(dir, "back/sub/run")); err != nil || fi.Mode() != 0o755 {
		t.Errorf("%v, %v", fi, err)
	}
	if r := c.with(t.Context(), "from stdin", "cp", "-", id+":/tmp/in"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if out := c.ok("cp", id+":/tmp/in", "-"); out != "from stdin" {
		t.Errorf("%q", out)
	}
	tar := c.ok("cp", id+":/work", "-")
	if r := c.with(t.Context(), tar+"\n", "cp", "-", id+":/copy/"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if out := c.ok("cp", id+":/copy/work/sub/run", "-"); out != "hi" {
		t.Errorf("a tree through a pipe: %q", out)
	}
	c.fails(2, "neither", "cp", "a", "b")
	c.fails(2, "both ends", "cp", id+":/a", id+":/b")
	c.fails(1, "path_not_found", "cp", id+":/none", dir)
	// Of a local path the hint speaks of this machine.
	for _, args := range [][]string{
		{"cp", filepath.Join(dir, "none"), id + ":/x"}, {"cp", id + ":/copy/work/sub/run", filepath.Join(dir, "none", "x")},
		{"image", "import", "x", filepath.Join(dir, "none")}, {"image", "build", "x", "-f", filepath.Join(dir, "none.yaml")},
	} {
		c.fails(1, "local_file", args...)
		c.fails(1, "a path of this machine, not of the sandbox", args...)
	}
}

func TestImages(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r := c.run("image", "import", "mine", dir); r.code != 0 || !strings.HasPrefix(r.out, "mine sha256:") || !strings.Contains(r.err, "import mine: unpack") {
		t.Errorf("%+v", r)
	}
	if img := into[v1.Image](t, c.ok("image", "inspect", "--json", "mine")); img.Files != 2 {
		t.Errorf("%+v", img)
	}
	if out := c.ok("image", "inspect", "mine"); !strings.Contains(out, "files") {
		t.Errorf("%s", out)
	}
	if out := c.ok("image", "ls", "-q"); out != "busybox\nmine" {
		t.Errorf("%q", out)
	}
	if l := into[[]v1.Image](t, c.ok("image", "ls", "--json")); len(l) != 2 {
		t.Errorf("%v", l)
	}
	if out := c.ok("image", "ls"); !strings.HasPrefix(out, "NAME ") {
		t.Errorf("%s", out)
	}
	if r := c.with(t.Context(), "this is no tar"+strings.Repeat(" ", 1000), "image", "import", "bad", "-"); r.code != 1 || !strings.Contains(r.err, "image_corrupt") {
		t.Errorf("%+v", r)
	}
	if out := c.ok("image", "rm", "mine"); out != "mine" {
		t.Errorf("%q", out)
	}
	if r := c.run("image", "rm", "--json", "nope", "busybox", "mine"); r.code != 1 || strings.Count(r.out, "\n") != 3 ||
		!strings.Contains(r.out, `{"name":"busybox"}`) || !strings.Contains(r.out, "image_not_found") || !strings.Contains(r.err, "2 of 3 were not removed") {
		t.Errorf("%+v", r)
	}
	c.fails(1, "image_not_found", "image", "inspect", "mine")
	c.fails(2, "say what to do", "image")
}

func TestManagement(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	if out := c.ok("token", "create", "ci", "--right", "read,sandbox", "--ttl", "1h"); out != "secret-t1" {
		t.Errorf("%q", out)
	}
	if l := into[[]v1.Token](t, c.ok("token", "ls", "--json")); len(l) != 1 || len(l[0].Rights) != 2 {
		t.Errorf("%+v", l)
	}
	if out := c.ok("token", "ls"); !strings.Contains(out, "read,sandbox") {
		t.Errorf("%s", out)
	}
	if out := c.ok("__complete", "token", "rm", ""); !strings.HasPrefix(out, "t1\tci\n") {
		t.Errorf("token rm completes to %q", out)
	}
	c.ok("token", "create", "other", "--right", "read")
	if out := c.ok("token", "rm", "other"); out != "other" {
		t.Errorf("by name: %q", out)
	}
	c.ok("token", "create", "twin", "--right", "read")
	c.ok("token", "create", "twin", "--right", "read")
	c.fails(2, "2 tokens are named twin: name one by its id", "token", "rm", "twin")
	c.fails(1, "token_not_found", "token", "rm", "none")
	if out := c.ok("token", "rm", "t1"); out != "t1" {
		t.Errorf("%q", out)
	}
	c.fails(2, "one of read", "token", "create", "x", "--right", "root")
	if l := into[[]v1.Node](t, c.ok("node", "ls", "--json")); len(l) != 1 || l[0].ID != clienttest.Node {
		t.Errorf("%+v", l)
	}
	if out := c.ok("node", "ls"); !strings.Contains(out, "0/100") {
		t.Errorf("%s", out)
	}
	if v := into[struct{ Client, Server string }](t, c.ok("version", "--json")); v.Client == "" || v.Server != "test" {
		t.Errorf("%+v", v)
	}
	c.ok("version")
	id := c.ok("create", "busybox")
	if out := c.ok("events"); !strings.Contains(out, id) || !strings.Contains(out, "running") {
		t.Errorf("%s", out)
	}
	if e := into[v1.Event](t, c.ok("events", "--json", "--from", "0")); e.Revision != 1 || e.Sandbox.ID != id {
		t.Errorf("%+v", e)
	}
	if out := c.ok("completion", "bash"); !strings.Contains(out, "dsec") {
		t.Error("no completion script")
	}
}

func TestUsageErrors(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	c.fails(2, "did you mean --json?", "ls", "--jsn")
	c.fails(2, "did you mean", "creat")
	c.fails(2, "unknown command", "image", "fetch")
	c.fails(2, "DST is missing", "cp", "a")
	c.fails(2, `unexpected argument "c"`, "cp", "a", "b", "c")
	c.fails(2, `unexpected argument "b"`, "kill", "--all", "a", "b")
	c.fails(2, "ID or NAME is missing", "token", "rm")
	c.fails(2, "did you mean --data?", "up", "--data-dir", "/x")
	c.fails(2, "512MiB", "create", "--memory", "lots", "busybox")
	c.fails(2, "number of cores", "create", "--cpu", "x", "busybox")
	c.fails(2, "IMAGE is missing", "create")
	c.fails(2, "1 to 10000", "create", "--count", "0", "busybox")
	c.fails(2, "key=value", "ls", "--label", "x")
	c.fails(2, "only one of", "rm", "--label", "a=b", "id")
	c.fails(2, "needs a terminal", "exec", "-it", "id", "--", "true")
	c.fails(2, "shell needs a terminal", "shell", "id")
	c.fails(2, "--image is missing", "bench", "create")
	c.fails(2, "creating, running, pausing, paused, resuming, stopping, stopped, failed, lost", "ls", "--state", "bogus")
	for _, flag := range []string{"cpu", "memory", "pids"} {
		for _, verb := range [][]string{{"create", "busybox"}, {"run", "busybox"}, {"bench", "create", "--image", "busybox"}} {
			if flag == "pids" && verb[0] == "bench" {
				continue
			}
			args := append(verb, "--"+flag, "0")
			if verb[0] == "run" {
				args = append(args, "--", "true")
			}
			c.fails(2, "--"+flag+" must be more than 0", args...)
		}
	}
	c.fails(2, "--pids must be more than 0", "create", "--pids", "-3", "busybox")
	c.fails(2, "--lease must be at least 1s", "run", "--lease", "10ms", "busybox", "--", "true")
	c.fails(2, "not be negative", "run", "--timeout", "-1s", "busybox", "--", "true")
	c.fails(2, "not be negative", "token", "create", "--right", "read", "--ttl", "-1s", "x")
	c.fails(2, "at least 1", "doctor", "--sandboxes", "0")
	c.fails(2, "--slots", "up", "--slots", "0")
	for _, listen := range []string{"", "bogus", "127.0.0.1:99999", "unix:"} {
		c.fails(2, "HOST:PORT or unix:/path", "up", "--listen", listen)
	}
	for _, listen := range []string{":7070", "0.0.0.0:7070", "[::]:7070", "192.0.2.1:7070"} {
		c.fails(2, "--insecure", "up", "--listen", listen)
	}
	c.fails(2, "auto, dir, tar", "image", "import", "--format", "zip", "x", "y")
	c.fails(2, `"99999999999999999999" for "--from" flag: value out of range`, "events", "--from", "99999999999999999999")
}

// Every verb names the argument that is missing or one too many, and none counts them.
func TestWrongNumbersOfArguments(t *testing.T) {
	t.Parallel()
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
		if cmd.HasSubCommands() || cmd.Args == nil {
			return
		}
		for _, args := range [][]string{{}, {"a"}, {"a", "b", "c", "d"}} {
			err := cmd.Args(cmd, args)
			if err == nil {
				continue
			}
			if !isUsage(err) || !strings.Contains(err.Error(), "is missing") && !strings.Contains(err.Error(), "unexpected argument") &&
				!strings.Contains(err.Error(), "write -- before the command") {
				t.Errorf("%s %q: %v", cmd.CommandPath(), args, err)
			}
		}
	}
	walk((&app{}).root())
}

// What a shell writes is read by people as well: & and < stay what they are.
func TestJSONIsNotEscapedForHTML(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "-l", "a=<&>", "busybox")
	for _, args := range [][]string{{"exec", "--json", id, "--", "echo", "<&>"}, {"inspect", "--json", id}, {"ls", "--json"}} {
		if out := c.ok(args...); !strings.Contains(out, "<&>") {
			t.Errorf("%q: %s", args, out)
		}
	}
	c.fails(1, "<&>", "image", "inspect", "--json", "<&>")
}

// Ctrl-C is how a watch is meant to end.
func TestWatchesEndWithoutFailure(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	c.ok("create", "busybox")
	for _, args := range [][]string{{"events", "-f"}, {"events", "--follow", "--json"}, {"ls", "--watch"}, {"stats", "--watch", "--interval", "100ms"}} {
		ctx, cancel := context.WithCancelCause(t.Context())
		r, w := io.Pipe()
		a := &app{stdin: strings.NewReader(""), stdout: w, stderr: io.Discard, signals: newSignals(cancel)}
		done := make(chan int, 1)
		go func() { done <- a.main(ctx, c.args(args...)) }()
		if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		go io.Copy(io.Discard, r)
		a.signals.deliver(syscall.SIGINT)
		if code := <-done; code != 0 {
			t.Errorf("%q: exit code %d", args, code)
		}
	}
}

func TestErrorsSayWhatWhyAndNext(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	c.s.Fail("POST /v1/sandboxes", 1, func() error {
		e := errs.New(errs.NodeFull, "edge.admit", "no room for 512 MiB").After(3 * time.Second).Because(fmt.Errorf("memory: 8 of 8 GiB"))
		e.Node = "n1"
		return e
	}())
	r := c.run("create", "busybox")
	want := "dsec: create sandbox: no room for 512 MiB\n  why:   memory: 8 of 8 GiB\n  error: node_full (step edge.admit, node n1, request req-1)\n" +
		"  next:  wait for the retry-after time or remove sandboxes\n  retry after 3s\n"
	if r.code != 1 || r.err != want {
		t.Errorf("got\n%swant\n%s", r.err, want)
	}
	a := &app{stdin: strings.NewReader(""), stdout: io.Discard, stderr: io.Discard}
	if code := a.main(t.Context(), []string{"--url", c.s.URL, "--token", "wrong", "ls"}); code != 1 {
		t.Errorf("wrong token: exit code %d", code)
	}
}

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "|1", Err: syscall.EPIPE}
}

func TestBrokenPipeIsQuiet(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	for _, args := range [][]string{{"image", "ls"}, {"run", "busybox", "--", "yes"}, {"version", "--json"}} {
		var errOut bytes.Buffer
		a := &app{stdin: strings.NewReader(""), stdout: brokenPipe{}, stderr: &errOut}
		code := a.main(t.Context(), c.args(args...))
		if errOut.Len() > 0 || code != exitPipe && !(args[0] == "run" && code == exitPlatform) {
			t.Errorf("%v: exit code %d, %q", args, code, errOut.String())
		}
	}
	if left := c.s.Sandboxes(); len(left) != 0 {
		t.Errorf("run left %v", left)
	}
}

func TestCompletionAsksTheServer(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "busybox")
	c.ok("exec", "-d", "--tag", "srv", id, "--", "sleep", "60")
	c.ok("create", "-l", "job=a", "busybox")
	for _, x := range []struct {
		want string
		args []string
	}{
		{id, []string{"exec", ""}}, {id, []string{"rm", id[:5]}}, {"busybox", []string{"run", "bus"}},
		{"srv", []string{"attach", id, ""}}, {"srv", []string{"kill", id, "s"}}, {id + ":", []string{"cp", id[:3]}},
		{"docker-archive", []string{"image", "import", "--format", "doc"}}, {"sandbox", []string{"token", "create", "--right", "s"}},
		{"job=a", []string{"ls", "-l", "j"}}, {"job=a", []string{"rm", "--label", ""}}, {"job=a", []string{"events", "--label", ""}},
		{"hollow", []string{"create", "--backend", ""}}, {"hollow", []string{"run", "--backend", "h"}}, {"USR1", []string{"kill", "-s", ""}},
	} {
		if out := c.ok(append([]string{"__complete"}, x.args...)...); !strings.Contains("\n"+out, "\n"+x.want) {
			t.Errorf("%v completes to %q, want %s", x.args, out, x.want)
		}
	}
}

var update = flag.Bool("update", false, "write the golden files")

// Every verb has help with an example, and a change of it is seen in review.
func TestHelp(t *testing.T) {
	t.Parallel()
	a := &app{stdin: strings.NewReader(""), stdout: io.Discard, stderr: io.Discard}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.Short == "" || cmd.Example == "" {
			t.Errorf("%s has no description or no example", cmd.CommandPath())
		}
		if n := strings.Count(strings.TrimRight(cmd.Example, "\n"), "\n"); n < 1 {
			t.Errorf("%s has one example, want two or more", cmd.CommandPath())
		}
		var out bytes.Buffer
		args := append(strings.Fields(cmd.CommandPath())[1:], "--help")
		b := &app{stdin: strings.NewReader(""), stdout: &out, stderr: io.Discard}
		if code := b.main(t.Context(), args); code != 0 {
			t.Errorf("%v: exit code %d", args, code)
		}
		golden := filepath.Join("testdata", "help", strings.ReplaceAll(cmd.CommandPath(), " ", "_")+".txt")
		if *update {
			if err := os.MkdirAll(filepath.Dir(golden), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(golden, out.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil || !bytes.Equal(want, out.Bytes()) {
			t.Errorf("help of %s differs from %s (%v); 'go test -update' accepts it:\n%s", cmd.CommandPath(), golden, err, out.String())
		}
		for _, c := range cmd.Commands() {
			if c.Name() != "help" && !c.Hidden && c.Name() != "completion" {
				walk(c)
			}
		}
	}
	walk(a.root())
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it never happens that %s", what)
		}
	}
}

func TestBench(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	type result struct {
		Name   string
		OK     int
		Extra  map[string]float64
		Target string
	}
	res := into[[]result](t, c.ok("bench", "create", "--image", "busybox", "--count", "4", "--parallel", "2", "--hold", "--json"))
	if len(res) != 2 || res[0].OK != 4 || res[1].Name != "rm" || res[1].OK != 4 {
		t.Errorf("%+v", res)
	}
	for _, args := range [][]string{
		{"exec", "--sandboxes", "2", "--parallel", "2", "--count", "6"}, {"session", "--duration", "50ms"}, {"files", "--size", "1MiB", "--dir", "/tmp"},
		{"stream", "--size", "2m", "--connections", "2"}, {"memory", "--count", "1", "--settle", "1ms"},
	} {
		if out := c.ok(append([]string{"bench", args[0], "--image", "busybox"}, args[1:]...)...); !strings.Contains(out, "p99 ms") || !strings.Contains(out, "host:") {
			t.Errorf("%v: %s", args, out)
		}
	}
	if out := c.ok("bench", "memory", "--image", "busybox", "--count", "1", "--settle", "1ms"); !strings.Contains(out, "1 sandboxes are few") {
		t.Errorf("the memory of one sandbox is not said to be overstated: %s", out)
	}
	r := c.run("bench", "exec", "--image", "busybox", "--count", "2", "--peer", "docker", "--peer-socket", filepath.Join(t.TempDir(), "none"))
	if r.code != 1 || !strings.Contains(r.err, "no Docker engine here") || !strings.Contains(r.out, "exec") {
		t.Errorf("%+v", r)
	}
	c.s.Fail("process.exec", 1, errs.New(errs.GuestUnreachable, "route", "no guest"))
	if r := c.run("bench", "create", "--image", "busybox", "--count", "2"); r.code != 1 || !strings.Contains(r.err, "1 of 2 operations failed") || !strings.Contains(r.out, "no guest") {
		t.Errorf("%+v", r)
	}
	c.fails(1, "error: image_not_found", "bench", "exec", "--image", "none", "--count", "1")
	c.fails(2, "only docker", "bench", "exec", "--image", "x", "--peer", "podman")
	c.fails(2, "either --count or --duration", "bench", "exec", "--image", "x", "--count", "3", "--duration", "1s")
	if left := c.s.Sandboxes(); len(left) != 0 {
		t.Errorf("bench left %v", left)
	}
}
