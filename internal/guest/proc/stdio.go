package proc

import (
	"os"
	"sync"
	"syscall"
	"time"

	"dsec/internal/guest/clock"

	"golang.org/x/sys/unix"
)

// stdio is the descriptors of a process that is being started: the child's ends and ours.
type stdio struct {
	child   []uintptr // the child's 0, 1, 2, ...
	close   []int     // child's ends to close here after the fork
	stdin   *os.File
	pty     *os.File
	sources []*source
}

func (o *stdio) open(p *Process) error {
	if p.Spec.PTY != nil {
		return o.openPTY(p)
	}
	switch {
	case p.Spec.Input != 0:
		o.child = append(o.child, uintptr(p.Spec.Input))
	case p.Spec.Stdin:
		r, w, err := pipe(false, true)
		if err != nil {
			return err
		}
		o.child, o.close = append(o.child, uintptr(r)), append(o.close, r)
		o.stdin = os.NewFile(uintptr(w), "stdin")
	default:
		o.child = append(o.child, uintptr(p.table.null))
	}
	for k := range kinds {
		r, w, err := pipe(true, false)
		if err != nil {
			return err
		}
		o.child, o.close = append(o.child, uintptr(w)), append(o.close, w)
		o.sources = append(o.sources, newSource(p.Log, k, r))
	}
	for _, fd := range p.Spec.Inherit {
		o.child = append(o.child, uintptr(fd)) // -1 leaves it closed
	}
	return nil
}

func (o *stdio) openPTY(p *Process) error {
	m, s, err := openPTY(*p.Spec.PTY, p.User.UID)
	if err != nil {
		return err
	}
	o.child = []uintptr{uintptr(s), uintptr(s), uintptr(s)}
	o.close = []int{s}
	src := newSource(p.Log, Stdout, m)
	o.pty, o.stdin = src.file, src.file
	o.sources = []*source{src}
	return nil
}

func (o *stdio) closeChild() {
	for _, fd := range o.close {
		syscall.Close(fd)
	}
	o.close = nil
}

func (o *stdio) closeParent() {
	if o.stdin != nil && o.stdin != o.pty {
		o.stdin.Close()
	}
	for _, s := range o.sources {
		s.shut()
	}
}

func (o *stdio) closeAll() {
	o.closeChild()
	o.closeParent()
}

// pipe makes a pipe whose ends do not reach other children.
func pipe(rNonblock, wNonblock bool) (r, w int, err error) {
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		return 0, 0, err
	}
	if rNonblock {
		syscall.SetNonblock(p[0], true)
	}
	if wNonblock {
		syscall.SetNonblock(p[1], true)
	}
	return p[0], p[1], nil
}

// openPTY makes a terminal and returns its two sides. The child's is opened through the
// first one, so no path of the sandbox is trusted but /dev/ptmx.
func openPTY(size Size, uid uint32) (master, slave int, err error) {
	const flags = unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC
	m, err := unix.Open("/dev/ptmx", flags|unix.O_NONBLOCK, 0)
	if err != nil {
		if m, err = unix.Open("/dev/pts/ptmx", flags|unix.O_NONBLOCK, 0); err != nil {
			return 0, 0, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
		}
	}
	if err = unix.IoctlSetPointerInt(m, unix.TIOCSPTLCK, 0); err == nil {
		var n uintptr
		var e syscall.Errno
		n, _, e = syscall.Syscall(syscall.SYS_IOCTL, uintptr(m), unix.TIOCGPTPEER, flags)
		if slave = int(n); e != 0 {
			err = e
		}
	}
	if err != nil {
		unix.Close(m)
		return 0, 0, err
	}
	unix.Fchown(slave, int(uid), -1)
	setSize(m, size)
	return m, slave, nil
}

func setSize(fd int, size Size) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
}

// source reads one pipe or terminal into a log.
type source struct {
	log  *Log
	kind Kind
	file *os.File // keeps fd, and waits for it

	mu     sync.Mutex // held over every read
	fd     int
	closed bool
	wide   bool // the pipe was made wider
}

// widePipe is the size of a pipe with much traffic.
const widePipe = 1 << 20

func newSource(l *Log, k Kind, fd int) *source {
	return &source{log: l, kind: k, fd: fd, file: os.NewFile(uintptr(fd), "output")}
}

// run reads until the last holder of the other end has closed it. While there is
// nothing to read it costs a goroutine and no buffer.
func (s *source) run() {
	defer s.shut()
	rc, err := s.file.SyscallConn()
	if err != nil {
		return
	}
	state := fillMore
	for state != fillEOF {
		var woken time.Time
		err := rc.Read(func(uintptr) bool {
			if s.gathers() {
				// A process that writes much in small pieces would wake everyone from here to
				// the client for each.
				if now := time.Now(); now.Sub(woken) < flowing {
					time.Sleep(gather)
				}
				woken = time.Now()
			}
			for {
				if _, state = s.read(false, 0); state != fillMore {
					return state != fillEmpty
				}
			}
		})
		if err != nil {
			return // closed
		}
		if state == fillFull {
			s.log.waitRoom()
		}
	}
}

// A pipe whose reader is woken again within flowing of the last time is read gather later:
// a wide pipe has room for that long.
const (
	flowing = time.Millisecond
	gather  = 300 * time.Microsecond
)

func (s *source) gathers() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wide
}

func (s *source) read(force bool, most int) (int, fillState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, fillEOF
	}
	n, state := s.log.fill(s.kind, s.fd, force, most)
	if n == maxChunk && !s.wide {
		// It flows: a wider pipe halves the switches between the process and us.
		// Where the kernel's limit for the user is reached it stays as it is.
		s.wide = true
		unix.FcntlInt(uintptr(s.fd), unix.F_SETPIPE_SZ, widePipe)
	}
	return n, state
}

// drain reads what is in the pipe now, and no more: descendants may go on writing.
func (s *source) drain(pty bool) {
	s.mu.Lock()
	left := 1 << 20
	if !s.closed && !pty {
		left, _ = unix.IoctlGetInt(s.fd, unix.TIOCINQ)
	}
	s.mu.Unlock()
	for left > 0 {
		n, _ := s.read(true, left)
		if n == 0 {
			return
		}
		left -= n
	}
}

func (s *source) shut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed = true
		s.file.Close()
	}
}

// quiet reports how long the log has not been written to.
func (l *Log) quiet() time.Duration {
	return l.clock.Since(clock.Instant(l.lastWrite.Load()))
}
