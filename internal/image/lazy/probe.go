package lazy

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// Report says which mode works here and why others do not.
type Report struct {
	Mode     Mode  // what Auto takes; empty if nothing works
	Fanotify error // nil: works
	FUSE     error
}

// Probe tries each mode with a file in dir, as root.
func Probe(dir string) Report {
	r := Report{Fanotify: probeFan(dir), FUSE: probeFUSE()}
	switch {
	case r.Fanotify == nil:
		r.Mode = Fanotify
	case r.FUSE == nil:
		r.Mode = FUSE
	}
	return r
}

func choose(dir string, want Mode) (Mode, error) {
	unsupported := func(what string, err error) (Mode, error) {
		return "", errs.Wrap(errs.NotSupported, phase, what, err)
	}
	switch want {
	case Fanotify:
		if err := probeFan(dir); err != nil {
			return unsupported("fanotify pre-content events do not work here", err)
		}
		return Fanotify, nil
	case FUSE:
		if err := probeFUSE(); err != nil {
			return unsupported("FUSE does not work here", err)
		}
		return FUSE, nil
	case Auto:
		fan := probeFan(dir)
		if fan == nil {
			return Fanotify, nil
		}
		if err := probeFUSE(); err != nil {
			return unsupported("data cannot be loaded on demand here", errors.Join(fmt.Errorf("fanotify: %w", fan), fmt.Errorf("FUSE: %w", err)))
		}
		return FUSE, nil
	}
	return unsupported("no such mode: "+string(want), errors.ErrUnsupported)
}

// probeFan stops a reader of a sparse file, fills what it reads, and refuses it
// something else.
func probeFan(dir string) (err error) {
	const size = 64 << 10
	f, err := os.CreateTemp(dir, "probe-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := f.Truncate(2 * size); err != nil {
		return err
	}
	release, ok := lease(f)
	if !ok {
		return fmt.Errorf("the file system of %s has no leases", filepath.Dir(f.Name()))
	}
	release()
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096); err != nil {
		return fmt.Errorf("punch a hole: %w", err)
	}
	g, err := initGroup()
	if err != nil {
		return fmt.Errorf("fanotify_init: %w (Linux 6.14 has pre-content events)", err)
	}
	defer unix.Close(g)
	if err := unix.FanotifyMark(g, unix.FAN_MARK_ADD, fanPreAccess|unix.FAN_ACCESS, unix.AT_FDCWD, f.Name()); err != nil {
		return fmt.Errorf("fanotify_mark: %w (Linux 6.14 has pre-content events, on most file systems)", err)
	}
	want := bytes.Repeat([]byte{7}, 4096)
	done := make(chan error, 1)
	go func() {
		done <- func() error {
			r, err := os.Open(f.Name())
			if err != nil {
				return err
			}
			defer r.Close()
			p := make([]byte, 4096)
			if _, err := r.ReadAt(p, 0); err != nil || !bytes.Equal(p, want) {
				return fmt.Errorf("a reader was not held up (%v)", err)
			}
			if _, err := r.ReadAt(p, size); !errors.Is(err, unix.EIO) {
				return fmt.Errorf("a reader was not refused (%v)", err)
			}
			return nil
		}()
	}()
	deadline := time.Now().Add(5 * time.Second)
	for buf := make([]byte, slotSize); ; {
		fds := []unix.PollFd{{Fd: int32(g), Events: unix.POLLIN}}
		unix.Poll(fds, 10)
		n, err := unix.Read(g, buf)
		select {
		case err := <-done:
			return err
		default:
		}
		switch {
		case time.Now().After(deadline):
			return errors.New("no answer in time")
		case err == unix.EAGAIN || err == unix.EINTR:
			continue
		case err != nil:
			return fmt.Errorf("read event: %w", err)
		}
		for rest := buf[:n]; len(rest) > 0; {
			var e fanEvent
			if e, rest, err = parseEvent(rest); err != nil {
				return err
			}
			if e.pre {
				if !e.ranged {
					return errors.New("events have no range")
				}
				resp := unix.FanotifyResponse{Fd: e.fd, Response: unix.FAN_ALLOW}
				if e.off >= size {
					resp.Response = unix.FAN_DENY | uint32(unix.EIO)<<24
				} else if _, err := f.WriteAt(want, e.off); err != nil {
					return err
				}
				if _, err := unix.Write(g, (*[unsafe.Sizeof(resp)]byte)(unsafe.Pointer(&resp))[:]); err != nil {
					return fmt.Errorf("answer event: %w", err)
				}
			}
			unix.Close(int(e.fd))
		}
	}
}

// probeFUSE connects a file system and looks at what the kernel offers.
func probeFUSE() error {
	dev, mount, err := connectFUSE()
	if err != nil {
		return err
	}
	defer dev.Close()
	defer mount.Close()
	fd := rawFD(dev)
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if _, err := unix.Poll(fds, 5000); err != nil {
		return fmt.Errorf("wait for the kernel: %w", err)
	}
	buf := make([]byte, fuseMinBuffer)
	n, err := unix.Read(fd, buf)
	if err != nil {
		return fmt.Errorf("read request: %w", err)
	}
	r, err := parseFuse(buf[:n])
	if err != nil {
		return err
	}
	if r.op != opInit || r.flags2&fuseHasResend == 0 {
		return errors.New("requests cannot be sent again to another process (Linux 6.9)")
	}
	_, err = unix.Writev(fd, [][]byte{fuseHeader(r.unique, 0, 64), fuseInitReply(r)})
	return err
}
