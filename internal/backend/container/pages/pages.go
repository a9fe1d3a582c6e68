package pages

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Set is a set of processes whose pages are moved.
type Set struct {
	// Members lists their pids. It is called again once there are descriptors for what it listed: only what is
	// still a member then is touched, whatever became of its number.
	Members func() ([]int, error)
	// Skip and Only narrow it, by pid; 0 does not.
	Skip, Only int
	// Behind works for pages that are wanted soon, but not now: little at a time, and less than half of the time, so
	// that what is wanted now is not behind it at the device.
	Behind bool
}

// MaxRanges bounds how many ranges of all processes together one call looks at, which takes a
// second or two. A process alone may have 65,530.
const MaxRanges = 1 << 20

// ErrUnsupported: the kernel has no process_madvise (Linux 5.10).
var ErrUnsupported = errors.New("the kernel has no process_madvise (Linux 5.10)")

// Out moves what the processes have for themselves to swap, and lets go of their pages of files. It
// returns early when ctx ends, with its error.
func Out(ctx context.Context, s Set) error { return s.advise(ctx, unix.MADV_PAGEOUT, any) }

// In begins to read what is swapped out of the processes' memory.
func In(ctx context.Context, s Set) error { return s.advise(ctx, unix.MADV_WILLNEED, swappable) }

// atOnce is how many processes there are descriptors for at a time.
const atOnce = 128

func (s Set) advise(ctx context.Context, advice int, want func(line) bool) error {
	pids, err := s.Members()
	if err != nil {
		return err
	}
	a := &adviser{advice: advice, want: want, left: MaxRanges, in: bufio.NewReaderSize(nil, 16<<10), most: maxBytes}
	if s.Behind {
		a.most, a.behind = behindBytes, true
	}
	for chunk := range slices.Chunk(pids, atOnce) {
		if err := s.chunk(ctx, a, chunk); err != nil {
			return err
		}
		if a.left <= 0 {
			return nil
		}
	}
	return nil
}

func (s Set) chunk(ctx context.Context, a *adviser, pids []int) error {
	open := map[int]int{}
	defer func() {
		for _, fd := range open {
			unix.Close(fd)
		}
	}()
	for _, pid := range pids {
		if pid == s.Skip || s.Only != 0 && pid != s.Only {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err == unix.ESRCH || err == unix.EINVAL || err == unix.ENOENT { // it ended; the last two: the pid is a thread's now
			continue
		}
		if err != nil {
			return fmt.Errorf("open process %d: %w", pid, err)
		}
		open[pid] = fd
	}
	if len(open) == 0 {
		return nil
	}
	still, err := s.Members()
	if err != nil {
		return err
	}
	for _, pid := range still {
		fd, ok := open[pid]
		if !ok {
			continue
		}
		// What has the pid now is a member. If the process behind the descriptor lives after maps was opened, the pid was
		// its all the time.
		if err := a.process(ctx, pid, fd); err != nil && err != unix.ESRCH && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// adviser gives one advice to processes.
type adviser struct {
	advice int
	want   func(line) bool
	left   int // ranges
	in     *bufio.Reader
	ranges []span
	bytes  uintptr
	most   uintptr // of bytes
	behind bool
}

// span is a struct iovec of another address space: not pointers of this one.
type span struct{ start, size uintptr }

const (
	maxSpans = 1024      // IOV_MAX
	maxBytes = 256 << 20 // of one call, which takes a tenth of a second if all of it is there

	behindBytes = 4 << 20
	// behindLeast is how long a call takes that has something to read.
	behindLeast = 200 * time.Microsecond
	behindMost  = 50 * time.Millisecond
)

func (a *adviser) process(ctx context.Context, pid, fd int) error {
	maps, err := os.Open("/proc/" + strconv.Itoa(pid) + "/maps")
	if err != nil {
		return err
	}
	defer maps.Close()
	if err := unix.PidfdSendSignal(fd, 0, nil, 0); err != nil {
		return err
	}
	a.in.Reset(maps)
	a.ranges, a.bytes = a.ranges[:0], 0
	for ; a.left > 0; a.left-- {
		l, err := next(a.in)
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ESRCH) {
			break
		}
		if err != nil {
			return fmt.Errorf("read the ranges of process %d: %w", pid, err)
		}
		if !a.want(l) {
			continue
		}
		for at := l.start; at < l.end; {
			size := min(l.end-at, a.most-a.bytes)
			a.ranges = append(a.ranges, span{at, size})
			a.bytes += size
			at += size
			if len(a.ranges) == maxSpans || a.bytes == a.most {
				if err := a.flush(ctx, fd); err != nil {
					return err
				}
			}
		}
	}
	return a.flush(ctx, fd)
}

// flush gives the advice for the ranges so far. The kernel stops at the first that it cannot follow it for, and
// says how far it came.
func (a *adviser) flush(ctx context.Context, fd int) error {
	defer func() { a.ranges, a.bytes = a.ranges[:0], 0 }()
	for rest := a.ranges; len(rest) > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		begun := time.Now()
		n, _, errno := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(fd), uintptr(unsafe.Pointer(&rest[0])), uintptr(len(rest)), uintptr(a.advice), 0, 0)
		runtime.KeepAlive(rest)
		switch errno {
		case 0:
		case unix.EINTR:
			continue
		case unix.ESRCH, unix.EPERM:
			return errno
		case unix.ENOSYS:
			return ErrUnsupported
		default: // not for this one
			rest = rest[1:]
			continue
		}
		if took := time.Since(begun); a.behind && took > behindLeast {
			select {
			case <-time.After(min(2*took, behindMost)):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if n == 0 {
			return nil
		}
		for len(rest) > 0 && n >= rest[0].size {
			n -= rest[0].size
			rest = rest[1:]
		}
		if len(rest) > 0 {
			rest[0].start += n
			rest[0].size -= n
		}
	}
	return nil
}

// line is one of /proc/PID/maps.
type line struct {
	start, end uintptr
	file       bool
	memory     bool // a file that is only memory
	special    bool // the kernel's
}

func any(l line) bool { return !l.special }

// swappable ranges are those of which all that is not there is in swap: advice for others would read files.
func swappable(l line) bool { return !l.special && (!l.file || l.memory) }

// next reads one line, of which the end of a path may be any length.
func next(in *bufio.Reader) (l line, err error) {
	text, err := in.ReadSlice('\n')
	if err != nil && err != bufio.ErrBufferFull {
		return l, err
	}
	l, perr := parse(text)
	for err == bufio.ErrBufferFull {
		_, err = in.ReadSlice('\n')
	}
	return l, errors.Join(perr, err)
}

// parse reads ADDRESS-ADDRESS PERM OFFSET DEV INODE PATH; the path's bytes are the process's own choice.
func parse(text []byte) (l line, err error) {
	addresses, rest, ok := bytes.Cut(text, []byte{' '})
	from, to, ok2 := bytes.Cut(addresses, []byte{'-'})
	if !ok || !ok2 || len(rest) < 5 || rest[4] != ' ' {
		return l, fmt.Errorf("unexpected %q", text)
	}
	l.start, l.end = hex(from), hex(to)
	_, rest, _ = bytes.Cut(rest[5:], []byte{' '}) // offset
	_, rest, _ = bytes.Cut(rest, []byte{' '})     // device
	inode, path, ok := bytes.Cut(rest, []byte{' '})
	if !ok {
		inode = bytes.TrimSuffix(inode, []byte{'\n'})
	}
	path = bytes.TrimLeft(bytes.TrimSuffix(path, []byte{'\n'}), " ")
	l.file = !bytes.Equal(inode, []byte{'0'})
	if l.file {
		l.memory = starts(path, "/memfd:") || starts(path, "/SYSV") || starts(path, "/dev/zero") || starts(path, "/dev/shm/")
	} else {
		l.special = starts(path, "[v") && (starts(path, "[vvar") || starts(path, "[vdso") || starts(path, "[vsyscall") || starts(path, "[vectors"))
	}
	return l, nil
}

func starts(path []byte, name string) bool {
	return len(path) >= len(name) && string(path[:len(name)]) == name
}

// hex reads what the kernel wrote.
func hex(digits []byte) (n uintptr) {
	for _, c := range digits {
		d := uintptr(c - '0')
		if c >= 'a' {
			d = uintptr(c-'a') + 10
		}
		n = n<<4 | d&15
	}
	return n
}
