package spawn

import (
	"errors"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

const all = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS

func openPath(t *testing.T, path string) int {
	t.Helper()
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func wait(t *testing.T, c *Child) unix.WaitStatus {
	t.Helper()
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(c.PID, &ws, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(c.PIDFD)
		return ws
	}
}

// run starts the program that build makes, with its standard output on a pipe, and
// returns what came out.
func run(t *testing.T, flags uint64, build func(p *Program)) (string, *Child) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	p := &Program{}
	p.Dup(int(w.Fd()), 1)
	build(p)
	c, err := Start(flags, -1, p)
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(out), c
}

// Needs root and busybox-static, which needs no libraries.
func TestProgramRunsInNamespaces(t *testing.T) {
	t.Parallel()
	sh := openPath(t, "/bin/busybox")
	out, c := run(t, all, func(p *Program) {
		p.Setsid()
		if err := p.Exec(sh, []string{"sh", "-c", "echo $$ $X; ls /sys/class/net 2>/dev/null; kill -TERM $$; echo survived"}, []string{"X=y", "PATH=/bin"}); err != nil {
			t.Fatal(err)
		}
	})
	ws := wait(t, c)
	c.Release()
	if !strings.HasPrefix(out, "1 y\n") || !ws.Exited() || ws.ExitStatus() != 0 {
		t.Errorf("output %q, status %v", out, ws)
	}
	if err := c.Err(); err != nil {
		t.Errorf("reported %v", err)
	}
}

func TestFailedCallIsNamed(t *testing.T) {
	t.Parallel()
	for name, build := range map[string]func(p *Program){
		"exec": func(p *Program) {
			if err := p.Exec(9999, []string{"x"}, nil); err != nil {
				t.Fatal(err)
			}
		},
		"join cgroup": func(p *Program) { p.Write("join cgroup", 9999, []byte("0")) },
		"dup":         func(p *Program) { p.Dup(9999, 5) },
	} {
		_, c := run(t, 0, build)
		if ws := wait(t, c); !ws.Exited() || ws.ExitStatus() != 127 {
			t.Errorf("%s: status %v", name, ws)
		}
		err := c.Err()
		if !errors.Is(err, unix.EBADF) || !strings.HasPrefix(err.Error(), name+":") {
			t.Errorf("%s: %v", name, err)
		}
		c.Release()
	}
}

func TestProgramWithoutExecEnds(t *testing.T) {
	t.Parallel()
	_, c := run(t, 0, func(p *Program) { p.Setsid() })
	wait(t, c)
	if err := c.Err(); err == nil {
		t.Error("a program that ran past its end reports nothing")
	}
	c.Release()
}

func TestRefusedCloneIsAnError(t *testing.T) {
	t.Parallel()
	p := &Program{}
	p.Setsid()
	if _, err := Start(unix.CLONE_NEWUSER|unix.CLONE_FS, -1, p); !errors.Is(err, unix.EINVAL) {
		t.Errorf("got %v", err)
	}
	if _, err := Start(0, 9999, p); err == nil {
		t.Error("a cgroup that is not there is no error")
	}
}

// The child shares our memory until its exec: garbage collections, signals and
// other threads meanwhile must not disturb it, nor it us.
func TestManyAtOnceUnderGarbageCollection(t *testing.T) {
	t.Parallel()
	sh := openPath(t, "/bin/busybox")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	})
	var kids sync.WaitGroup
	for range 8 {
		kids.Go(func() {
			for range 20 {
				out, c := run(t, unix.CLONE_NEWUSER|unix.CLONE_NEWPID, func(p *Program) {
					if err := p.Exec(sh, []string{"echo", strings.Repeat("x", 4000)}, nil); err != nil {
						t.Error(err)
					}
				})
				if ws := wait(t, c); len(out) != 4001 || ws.ExitStatus() != 0 {
					t.Errorf("%d bytes, %v, %v", len(out), ws, c.Err())
				}
				c.Release()
			}
		})
	}
	kids.Wait()
	close(stop)
	wg.Wait()
}

// A child that waits must see the death of its parent, that is the end of the parent's
// side of the pipe, though it and its siblings were born with copies of that side.
func TestWaitingChildrenSeeTheParentsEnd(t *testing.T) {
	t.Parallel()
	const n = 4
	var ours, theirs [n]*os.File
	for i := range n {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		defer w.Close()
		theirs[i], ours[i] = r, w
	}
	var kids []*Child
	for i := range n {
		fd := int(theirs[i].Fd())
		p := &Program{}
		p.CloseExcept(fd)
		p.AwaitByte(fd)
		c, err := Start(0, -1, p)
		if err != nil {
			t.Fatal(err)
		}
		kids = append(kids, c)
	}
	for i := range n {
		ours[i].Close()
	}
	for _, c := range kids {
		wait(t, c) // for ever, if one still had an end of another's pipe
		if err := c.Err(); err == nil || !strings.HasPrefix(err.Error(), "program ran past its end") {
			t.Errorf("%v", err)
		}
		c.Release()
	}
}
