package container

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"
)

// Creates between clone and exec at once, and the descriptors that each hands to its
// child: the channel, the listener and a file for each cgroup v1 controller.
const (
	clones         = 16
	filesPerChild  = 6
	firstLowNumber = 10
)

// lowFiles are descriptor numbers reserved at the start, when low ones are free. What a
// child needs is moved to them, so that it can leave all others behind by number.
type lowFiles struct {
	null  int
	below int // all numbers that children need are below it
	free  chan []int
}

func newLowFiles(null int, others ...int) (*lowFiles, error) {
	l := &lowFiles{null: null, free: make(chan []int, clones)}
	for _, fd := range append(others, null) {
		l.below = max(l.below, fd+1)
	}
	for range clones {
		set := make([]int, filesPerChild)
		for i := range set {
			fd, err := unix.FcntlInt(uintptr(null), unix.F_DUPFD_CLOEXEC, firstLowNumber)
			if err != nil {
				l.close()
				return nil, fmt.Errorf("reserve descriptors: %w", err)
			}
			set[i] = fd
			l.below = max(l.below, fd+1)
		}
		l.free <- set
	}
	return l, nil
}

// take returns a set of numbers, waiting while all are in use.
func (l *lowFiles) take(ctx context.Context) ([]int, error) {
	select {
	case set := <-l.free:
		return set, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// put gives a set back; nothing may use it any more.
func (l *lowFiles) put(set []int) {
	for _, fd := range set {
		_ = unix.Dup3(l.null, fd, unix.O_CLOEXEC) // both are open: it cannot fail
	}
	l.free <- set
}

func (l *lowFiles) close() {
	for {
		select {
		case set := <-l.free:
			for _, fd := range set {
				unix.Close(fd)
			}
		default:
			return
		}
	}
}
