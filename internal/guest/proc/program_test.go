package proc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
)

// held lets nobody read the file path until answered, as one whose data is not here yet.
// Reads then are answered for as long as the test lasts.
func held(t *testing.T, path string) (waits <-chan struct{}, answer func()) {
	t.Helper()
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_LARGEFILE)
	if err != nil {
		t.Skipf("fanotify: %v", err)
	}
	group := os.NewFile(uintptr(fd), "fanotify")
	t.Cleanup(func() { group.Close() })
	if err := unix.FanotifyMark(fd, unix.FAN_MARK_ADD, unix.FAN_ACCESS_PERM, unix.AT_FDCWD, path); err != nil {
		t.Skipf("watch reads: %v", err)
	}
	first, answered := make(chan struct{}), make(chan struct{})
	go func() {
		b := make([]byte, 4096)
		for begun := false; ; {
			n, err := group.Read(b)
			if err != nil {
				return
			}
			if !begun {
				begun = true
				close(first)
				<-answered
			}
			for at := 0; at < n; {
				e := (*unix.FanotifyEventMetadata)(unsafe.Pointer(&b[at]))
				r := unix.FanotifyResponse{Fd: e.Fd, Response: unix.FAN_ALLOW}
				group.Write(unsafe.Slice((*byte)(unsafe.Pointer(&r)), unsafe.Sizeof(r)))
				unix.Close(int(e.Fd))
				at += int(e.Event_len)
			}
		}
	}()
	return first, func() { close(answered) }
}

func TestProgramThatIsNotHereHoldsUpNoOther(t *testing.T) {
	tab := newTable(t)
	program := filepath.Join(t.TempDir(), "slow")
	from, err := os.Open("/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	to, err := os.OpenFile(program, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(to, from); err != nil {
		t.Fatal(err)
	}
	if err := to.Close(); err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, fmt.Appendf(nil, "#! %s -x\n", program), 0o755); err != nil {
		t.Fatal(err)
	}
	waits, answer := held(t, program)
	slow := make(chan error, 1)
	go func() {
		p, err := tab.Start(Spec{Cmd: script})
		if err == nil {
			_, err = p.Wait(t.Context())
		}
		slow <- err
	}()
	<-waits
	other := make(chan error, 1)
	go func() {
		p, err := tab.Start(Spec{Cmd: "/bin/echo"})
		if err == nil {
			_, err = p.Wait(t.Context())
		}
		other <- err
	}()
	select {
	case err = <-other:
	case <-time.After(5 * time.Second):
		err = errors.New("it is not started while another waits for its program")
	}
	answer()
	if err != nil {
		t.Error(err)
	}
	if err := <-slow; err != nil {
		t.Errorf("the slow one: %v", err)
	}
}

func TestInterpretersOfPrograms(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct{ content, want string }{
		"script": {"#! /bin/sh -e\nexit\n", "/bin/sh"}, "bare": {"#!\n", ""}, "empty": {"", ""}, "text": {"echo", ""},
		"elf": {"\x7fELF" + string(make([]byte, 200)), ""}, "cut": {"\x7fELF", ""},
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(c.content), 0o700); err != nil {
			t.Fatal(err)
		}
		if got, err := readOne(path); got != c.want || err != nil {
			t.Errorf("%s: %q, %v; want %q", name, got, err, c.want)
		}
	}
	loader, err := readOne("/bin/sh")
	if _, serr := os.Stat(loader); err != nil || serr != nil {
		t.Errorf("/bin/sh: %q, %v, %v", loader, err, serr)
	}
}

func TestUnreadableProgramIsNoFaultOfTheCommand(t *testing.T) {
	missing, err := (&Process{}).explain("/bin/x", "/", syscall.EIO)
	if missing != nil || !errors.Is(err, errs.StoreUnavailable) {
		t.Errorf("EIO: %v, %v", missing, err)
	}
}

// A start whose program's data does not come within the command's time limit ends by that, and
// when the data comes again, others start; of those that wait there are so many and no more.
func TestTimeLimitWhileDataIsWaitedFor(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	back := make(chan struct{})
	tab.readHead = func(string) error { <-back; return nil }
	for range maxStuck {
		start := time.Now()
		_, err := tab.Start(Spec{Cmd: "true", Timeout: time.Millisecond, Tag: "tag"})
		if e := errs.Of(err); err == nil || e.Code != errs.DeadlineExceeded || !e.Retryable || !e.Infra || !strings.Contains(e.Message, "store") {
			t.Fatalf("after %v: %v", time.Since(start), err)
		}
	}
	if _, err := tab.Start(Spec{Cmd: "true", IdleTimeout: time.Minute}); !errors.Is(err, errs.StoreUnavailable) {
		t.Errorf("one more: %v", err)
	}
	close(back)
	for end := time.Now().Add(10 * time.Second); tab.stuck.Load() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("they still wait")
		}
	}
	tab.readHead = func(string) error { time.Sleep(300 * time.Millisecond); return nil }
	start := time.Now()
	p, err := tab.Start(Spec{Cmd: "sleep", Args: []string{"10"}, Timeout: 400 * time.Millisecond, Tag: "tag"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	if e, err := p.Wait(t.Context()); err != nil || !e.TimedOut {
		t.Errorf("%+v, %v", e, err)
	}
	if took := time.Since(start); took > 650*time.Millisecond {
		t.Logf("the limit of 400 ms was kept in %v", took)
	}
}
