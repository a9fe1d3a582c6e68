//go:build !amd64

package proc

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// waiter waits for children in a goroutine's system call.
type waiter struct{}

func newWaiter() (*waiter, error) { return &waiter{}, nil }

// wait returns when a child is dead and unreaped, or there is none.
func (w *waiter) wait() error {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil)
		switch err {
		case nil, syscall.ECHILD:
			return nil
		case syscall.EINTR:
		default:
			return err
		}
	}
}

// done says that the reaper has looked.
func (w *waiter) done() error { return nil }
