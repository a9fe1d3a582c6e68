package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/test/bed"
)

func TestSessionVerbs(t *testing.T) {
	t.Parallel()
	id := box(t)
	if name := shared.Must(t, "session", "create", "-w", "/tmp", "-e", "A=1", id, "work"); name != "work" {
		t.Errorf("session create printed %q", name)
	}
	shared.Must(t, "session", "exec", id, "work", "--", "mkdir -p sub && cd sub; B=2; f() { echo f-$1; }")
	if got := shared.Must(t, "session", "exec", id, "work", "--", "pwd;", "echo", "$A$B; f x"); got != "/tmp/sub\n12\nf-x" {
		t.Errorf("the session forgot: %q", got)
	}
	r := shared.CLI(t, "session", "exec", "--json", id, "work", "--", "echo out; echo err >&2; (exit 3)")
	var got struct {
		Session, Sandbox, Stdout, Stderr string
		ExitCode                         int `json:"exit_code"`
		Ended                            bool
	}
	if err := json.Unmarshal([]byte(r.Stdout), &got); err != nil || r.Code != 3 || got.ExitCode != 3 || got.Session != "work" || got.Sandbox != id ||
		got.Stdout != "out\n" || got.Stderr != "err\n" || got.Ended {
		t.Errorf("%v: %+v of %+v", err, got, r)
	}
	if r := shared.CLI(t, "session", "exec", "--timeout", "100ms", id, "work", "--", "sleep 1000"); r.Code == 0 || !strings.Contains(r.Stderr, "--timeout") {
		t.Errorf("past its timeout: %+v", r)
	}
	if got := shared.Must(t, "session", "exec", id, "work", "--", "echo $B"); got != "2" {
		t.Errorf("after a timeout: %q", got)
	}
	other := shared.Must(t, "session", "create", id)
	list := bed.JSON[[]struct {
		Name     string
		PID      int
		Commands int
	}](t, shared, "session", "ls", "--json", id)
	if len(list) != 2 || list[0].PID == 0 || list[0].Commands+list[1].Commands != 5 {
		t.Errorf("session ls: %+v", list)
	}
	if text := shared.Must(t, "session", "ls", id); !strings.HasPrefix(text, "NAME ") || !strings.Contains(text, "idle") {
		t.Errorf("session ls:\n%s", text)
	}
	if r := shared.CLI(t, "session", "exec", "--json", id, other, "--", "exit 7"); r.Code != 7 || !strings.Contains(r.Stdout, `"ended":true`) {
		t.Errorf("the shell's own end: %+v", r)
	}
	shared.Fails(t, 125, "session_not_found", "session", "exec", id, "none", "--", "true")
	shared.Fails(t, 1, "state_conflict", "session", "create", id, "work")
	if out := shared.Must(t, "__complete", "session", "exec", id, "w"); !strings.HasPrefix(out, "work\n") {
		t.Errorf("completion of sessions: %q", out)
	}
	if out := shared.Must(t, "session", "rm", id, "work", other); out != "work\n"+other {
		t.Errorf("session rm: %q", out)
	}
	if left := shared.Must(t, "session", "ls", "-q", id); left != "" {
		t.Errorf("left: %s", left)
	}
	shared.Fails(t, 1, "session_not_found", "session", "rm", id, "work")
}

func TestPortsAndPortForward(t *testing.T) {
	t.Parallel()
	id := box(t)
	shared.Must(t, "exec", "-d", "--tag", "echo", id, "--", "nc", "-ll", "-p", "7777", "-e", "cat")
	bed.Eventually(t, "the service listens", func() error {
		if out := shared.Must(t, "ports", id); !strings.Contains(out, "7777 ") {
			return fmt.Errorf("ports:\n%s", out)
		}
		return nil
	})
	ports := bed.JSON[[]struct {
		Port    int
		Address string
	}](t, shared, "ports", "--json", id)
	if len(ports) == 0 || ports[0].Port != 7777 || ports[0].Address == "" {
		t.Errorf("ports: %+v", ports)
	}

	cmd := shared.Command(t.Context(), "port-forward", "--json", id, ":7777", "0:9999")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	errOut, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer errOut.Close()
	cmd.Stderr = errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	var at [2]struct {
		Local  string
		Remote int
	}
	dec := json.NewDecoder(out)
	for i := range at {
		if err := dec.Decode(&at[i]); err != nil {
			t.Fatal(err)
		}
	}
	if at[0].Remote != 7777 || at[1].Remote != 9999 || !strings.HasPrefix(at[0].Local, "127.0.0.1:") {
		t.Fatalf("it says %+v", at)
	}
	for range 2 { // one connection after the other, and both ways
		conn, err := net.Dial("tcp", at[0].Local)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(conn, "hello")
		if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || line != "hello\n" {
			t.Errorf("through the port: %q, %v", line, err)
		}
		conn.Close()
	}
	// A port on which nothing listens closes the connection, and the others go on.
	if conn, err := net.Dial("tcp", at[1].Local); err != nil {
		t.Error(err)
	} else {
		if b, err := io.ReadAll(conn); len(b) > 0 {
			t.Errorf("of a closed port came %q, %v", b, err)
		}
		conn.Close()
	}
	taken := at[0].Local[strings.LastIndex(at[0].Local, ":")+1:]
	shared.Fails(t, 1, "address_in_use", "port-forward", id, taken+":7777")
	shared.Fails(t, 2, "", "port-forward", id, "a:b")
	shared.Fails(t, 2, "", "port-forward", id, "8000:0")
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := exitCode(cmd.Wait()); code != 0 {
		said, _ := os.ReadFile(errOut.Name())
		t.Errorf("Ctrl-C ends it with %d: %s", code, said)
	}
	if c, err := net.Dial("tcp", at[0].Local); err == nil {
		c.Close()
		t.Error("it still listens")
	}

	// The sandbox's end is its own, though nobody connects.
	gone := box(t)
	cmd = shared.Command(t.Context(), "port-forward", gone, ":1")
	if out, err = cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	shared.Must(t, "rm", gone)
	if code := exitCode(cmd.Wait()); code != 1 {
		t.Errorf("after the sandbox's end: exit code %d", code)
	}
}

func TestStats(t *testing.T) {
	t.Parallel()
	label := "test=" + t.Name()
	id, idle := box(t, "--label", label, "--cpu", "1", "--memory", "64MiB"), box(t, "--label", label)
	shared.Must(t, "exec", "-d", id, "--", "sh", "-c", "while :; do :; done")
	type stat struct {
		ID    string
		Cores *float64 `json:"cpu_cores"`
		CPU   float64  `json:"cpu_seconds"`
		Mem   int64    `json:"memory_bytes"`
		Limit int64    `json:"memory_bytes_limit"`
		Procs int      `json:"processes"`
	}
	bed.Eventually(t, "the busy sandbox shows", func() error {
		all := bed.Lines[stat](t, shared.Must(t, "stats", "--json", "--interval", "300ms", id, idle))
		if len(all) != 2 || all[0].ID != id || all[1].ID != idle {
			t.Fatalf("%+v", all)
		}
		if s := all[0]; s.Cores == nil || *s.Cores < 0.05 || s.CPU <= 0 || s.Mem <= 0 || s.Limit != 64<<20 || s.Procs < 2 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	if one := bed.Lines[stat](t, shared.Must(t, "stats", "--json", "--interval", "0", idle)); len(one) != 1 || one[0].Cores != nil {
		t.Errorf("one reading: %+v", one)
	}
	if text := shared.Must(t, "stats", "--interval", "100ms", "--label", label); !strings.HasPrefix(text, "ID ") || strings.Count(text, "\n") != 2 || !strings.Contains(text, "/64 MiB") {
		t.Errorf("stats:\n%s", text)
	}
	watch := shared.Command(t.Context(), "stats", "--watch", "--json", "--interval", "100ms", id)
	out, err := watch.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(out)
	for range 3 {
		var s stat
		if err := dec.Decode(&s); err != nil || s.ID != id || s.Cores == nil {
			t.Errorf("watched: %+v, %v", s, err)
		}
	}
	watch.Process.Signal(syscall.SIGINT)
	if code := exitCode(watch.Wait()); code != 0 {
		t.Errorf("Ctrl-C ends stats --watch with %d", code)
	}
	shared.Must(t, "rm", idle)
	if r := shared.Fails(t, 1, "sandbox_gone", "stats", "--interval", "0", id, idle); !strings.Contains(r.Stdout, id) {
		t.Errorf("one that is gone hides the other: %+v", r)
	}
	shared.Fails(t, 2, "", "stats", "--interval", "1", id)
}

func TestWait(t *testing.T) {
	t.Parallel()
	id := box(t)
	start := func(tag, script string) {
		t.Helper()
		shared.Must(t, "exec", "-d", "--tag", tag, id, "--", "sh", "-c", script)
	}
	start("one", "until [ -e /tmp/go ]; do usleep 2000; done; exit 3")
	start("two", "until [ -e /tmp/go ]; do usleep 2000; done; exit 0")
	start("three", "until [ -e /tmp/go ]; do usleep 2000; done; kill $$")
	shared.Must(t, "session", "create", id) // never waited for
	all := shared.Command(t.Context(), "wait", id)
	out, err := all.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := all.Start(); err != nil {
		t.Fatal(err)
	}
	one := shared.Command(t.Context(), "wait", id, "three")
	oneOut, err := one.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := one.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond) // nothing shows that it waits; if it does not yet, less is checked
	shared.MustIn(t, "", "cp", "-", id+":/tmp/go")
	said, err := io.ReadAll(out)
	if code := exitCode(all.Wait()); err != nil || code != 3 || string(said) != "one 3\ntwo 0\nthree 143\n" {
		// It may have begun to look only after some had ended.
		if !strings.HasSuffix("one 3\ntwo 0\nthree 143\n", string(said)) {
			t.Errorf("wait of all: exit code %d, %q, %v", code, said, err)
		}
	}
	said, err = io.ReadAll(oneOut)
	if code := exitCode(one.Wait()); err != nil || code != 143 || string(said) != "143\n" {
		t.Errorf("wait of one: exit code %d, %q, %v", code, said, err)
	}
	// What ended before is known.
	if r := shared.CLI(t, "wait", "--json", id, "one"); r.Code != 3 || bed.Lines[process](t, r.Stdout)[0].Tag != "one" {
		t.Errorf("%+v", r)
	}
	if out := shared.Must(t, "wait", id); out != "" {
		t.Errorf("with nothing to wait for: %q", out)
	}
	shared.Fails(t, 125, "process_not_found", "wait", id, "none")
}

func TestLogsTail(t *testing.T) {
	t.Parallel()
	id := box(t)
	shared.Must(t, "exec", "-d", "--tag", "job", id, "--", "sh", "-c",
		"for i in 1 2 3 4 5; do echo line $i; echo err $i >&2; done; until [ -e /tmp/go ]; do usleep 2000; done; echo end")
	bed.Eventually(t, "all is written", func() error {
		if r := shared.CLI(t, "logs", id, "job"); !strings.HasSuffix(r.Stderr, "err 5\n") {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
	if r := shared.CLI(t, "logs", "--tail", "2", id, "job"); r.Code != 0 || r.Stdout != "line 4\nline 5\n" || r.Stderr != "err 4\nerr 5\n" {
		t.Errorf("%+v", r)
	}
	if r := shared.CLI(t, "logs", "-n", "0", id, "job"); r.Stdout+r.Stderr != "" {
		t.Errorf("%+v", r)
	}
	follow := shared.Command(t.Context(), "logs", "-f", "-n", "1", id)
	out, err := follow.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(out)
	if line, err := r.ReadString('\n'); err != nil || line != "job | line 5\n" {
		t.Errorf("the tail: %q, %v", line, err)
	}
	shared.MustIn(t, "", "cp", "-", id+":/tmp/go")
	rest, err := io.ReadAll(r)
	if err := follow.Wait(); err != nil {
		t.Error(err)
	}
	if err != nil || string(rest) != "job | end\n" {
		t.Errorf("after the tail: %q, %v", rest, err)
	}
	shared.Fails(t, 2, "", "logs", "--tail", "-5", id)
}
