package bed

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// server is one run of 'dsec up'.
type server struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed once err is set
	err    error
}

// Up starts the server and returns once it answers.
func (b *Bed) Up(ctx context.Context) error {
	log, err := os.OpenFile(b.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	args := append([]string{"up", "--json", "--data", b.Data, "--listen", "unix:" + b.Sock, "--swap", "file:512MiB"}, b.flags...)
	s := &server{cmd: exec.Command(b.Bin, args...), exited: make(chan struct{})}
	s.cmd.Env, s.cmd.Stderr = b.env, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // a terminal's Ctrl-C is for the test alone
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	s.cmd.Stdout = w
	err = s.cmd.Start()
	w.Close()
	if err != nil {
		return err
	}
	go func() {
		s.err = s.cmd.Wait()
		close(s.exited)
	}()
	b.server = s
	stop := context.AfterFunc(ctx, func() { s.cmd.Process.Kill() })
	defer stop()
	line, err := bufio.NewReader(r).ReadBytes('\n')
	if err != nil {
		<-s.exited
		return fmt.Errorf("the server ended (%v) before it answered:\n%s", s.err, b.Log())
	}
	var info struct{ PID int }
	if err := json.Unmarshal(line, &info); err != nil || info.PID != s.cmd.Process.Pid {
		return fmt.Errorf("the server says %q: %v", line, err)
	}
	return nil
}

// SetFlags changes what later starts of the server are given.
func (b *Bed) SetFlags(flags ...string) { b.flags = flags }

// PID is the server's.
func (b *Bed) PID() int { return b.server.cmd.Process.Pid }

// Exited is closed when the server has ended.
func (b *Bed) Exited() <-chan struct{} { return b.server.exited }

// Kill ends the server with SIGKILL.
func (b *Bed) Kill(t testing.TB) {
	t.Helper()
	if err := b.server.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-b.server.exited
}

// Log is the end of what the server logged.
func (b *Bed) Log() string {
	const most = 16 << 10
	data, err := os.ReadFile(b.logPath())
	if err != nil {
		return err.Error()
	}
	return string(data[max(0, len(data)-most):])
}

func (b *Bed) logPath() string { return filepath.Join(b.Dir, "server.log") }

// end runs 'dsec down' and audits.
func (b *Bed) end() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*Patience)
	defer cancel()
	var all []error
	if r := b.Run(ctx, nil, "down", "--data", b.Data); r.Code != 0 {
		all = append(all, fmt.Errorf("down: exit code %d: %s", r.Code, r.Stderr))
	}
	if b.server != nil {
		select {
		case <-b.server.exited:
		case <-ctx.Done():
			all = append(all, errors.New("the server did not end"), b.server.cmd.Process.Kill())
		}
	}
	// A sandbox that another node on this machine is making has, for a moment, a copy of
	// all mounts, ours too: they may end a little later.
	for wait := time.Millisecond; ; wait *= 2 {
		left, err := b.Leftovers()
		if err == nil && len(left) == 0 {
			break
		}
		if wait > 4*time.Second {
			all = append(all, fmt.Errorf("left behind: %s (%v)", strings.Join(left, ", "), err))
			break
		}
		time.Sleep(wait)
	}
	return errors.Join(all...)
}

// PretendReboot makes the next Up believe that the machine was restarted since.
func (b *Bed) PretendReboot(t testing.TB) {
	t.Helper()
	path := filepath.Join(b.Data, "edge", "identity.json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var identity map[string]any
	if err := json.Unmarshal(data, &identity); err != nil {
		t.Fatal(err)
	}
	identity["boot_id"] = "an earlier boot"
	identity["sum"] = crc32.ChecksumIEEE(fmt.Appendf(nil, "%s\n%.0f\n%s", identity["node"], identity["epoch"], identity["boot_id"]))
	if data, err = json.Marshal(identity); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}
