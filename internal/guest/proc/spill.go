package proc

import (
	"io"
	"syscall"

	"golang.org/x/sys/unix"
)

// spill is an unnamed file of the sandbox's disk that holds old chunks in slots of one
// size. Nothing in the sandbox can see it, and it is gone with its descriptor. The
// owner's lock protects it.
type spill struct {
	dir   string
	slots int // the limit
	used  int // slots ever handed out
	free  []int
	fd    int
	open  bool
	dead  bool
}

// take reserves a slot, or returns -1 when the limit is reached.
func (s *spill) take() int {
	if s.dead {
		return -1
	}
	if n := len(s.free); n > 0 {
		slot := s.free[n-1]
		s.free = s.free[:n-1]
		return slot
	}
	if s.used == s.slots {
		return -1
	}
	s.used++
	return s.used - 1
}

func (s *spill) put(slot int) {
	if !s.dead {
		s.free = append(s.free, slot)
	}
}

func (s *spill) write(slot int, b []byte) error {
	if !s.open {
		fd, err := unix.Open(s.dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		s.fd, s.open = fd, true
	}
	off := int64(slot) * maxChunk
	for len(b) > 0 {
		n, err := syscall.Pwrite(s.fd, b, off)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}

func (s *spill) read(slot, i int, b []byte) error {
	off := int64(slot)*maxChunk + int64(i)
	for len(b) > 0 {
		n, err := syscall.Pread(s.fd, b, off)
		if err == syscall.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}

// fail stops further spilling; what was written stays readable.
func (s *spill) fail() { s.dead = true }

func (s *spill) close() {
	s.dead = true
	if s.open {
		syscall.Close(s.fd)
		s.open = false
	}
}
