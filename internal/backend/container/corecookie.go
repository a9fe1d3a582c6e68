package container

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// coreCookie keeps best-effort work off the hardware threads beside those of latency-sensitive sandboxes: the
// kernel runs on the threads of a core only what has the same cookie (core scheduling, CONFIG_SCHED_CORE).
// All sandboxes of class ls share one, so that they fill a core together; those of class be, and
// the node, have none. It is held by a thread of its own, from which it is handed on; what
// outlives this process keeps its cookie.
type coreCookie struct {
	prctl  func(op, pid, scope uintptr) error
	shares chan share
	close  func() // idempotent
}

type share struct {
	pid  int
	done chan<- error
}

// Scopes of PR_SCHED_CORE: what a pid stands for.
const scopeThread = 0

// errNoSMT is of a processor whose cores have one thread: nothing has to be kept apart.
var errNoSMT = errors.New("cores have one hardware thread")

// newCoreCookie fails if the kernel cannot do it, with the reason.
func newCoreCookie(prctl func(op, pid, scope uintptr) error) (*coreCookie, error) {
	c := &coreCookie{prctl: prctl, shares: make(chan share)}
	c.close = sync.OnceFunc(func() { close(c.shares) })
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the cookie
		err := c.prctl(unix.PR_SCHED_CORE_CREATE, 0, scopeThread)
		made <- err
		if err != nil {
			return
		}
		for s := range c.shares {
			s.done <- c.prctl(unix.PR_SCHED_CORE_SHARE_TO, uintptr(s.pid), scopeThread)
		}
	}()
	switch err := <-made; {
	case errors.Is(err, unix.ENODEV):
		return nil, errNoSMT
	case errors.Is(err, unix.EINVAL):
		return nil, errors.New("the kernel has no core scheduling (CONFIG_SCHED_CORE)")
	case err != nil:
		return nil, fmt.Errorf("core scheduling: %w", err)
	}
	return c, nil
}

// share gives the cookie to a process that has one thread, and to all that come of it.
func (c *coreCookie) share(pid int) error {
	if c == nil {
		return nil
	}
	done := make(chan error)
	c.shares <- share{pid, done}
	if err := <-done; err != nil {
		return fmt.Errorf("give core scheduling cookie to pid %d: %w", pid, err)
	}
	return nil
}

// schedCore is prctl(PR_SCHED_CORE).
func schedCore(op, pid, scope uintptr) error {
	return unix.Prctl(unix.PR_SCHED_CORE, op, pid, scope, 0)
}
