package container

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// One cookie is made, and given to each process that is to have it.
func TestCoreCookieIsShared(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var calls [][2]uintptr
	c, err := newCoreCookie(func(op, pid, _ uintptr) error {
		mu.Lock()
		defer mu.Unlock()
		calls = append(calls, [2]uintptr{op, pid})
		if pid == 9 {
			return unix.ESRCH
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	for _, pid := range []int{7, 8} {
		if err := c.share(pid); err != nil {
			t.Error(err)
		}
	}
	if err := c.share(9); !errors.Is(err, unix.ESRCH) {
		t.Error(err)
	}
	want := [][2]uintptr{{unix.PR_SCHED_CORE_CREATE, 0}, {unix.PR_SCHED_CORE_SHARE_TO, 7}, {unix.PR_SCHED_CORE_SHARE_TO, 8}, {unix.PR_SCHED_CORE_SHARE_TO, 9}}
	if !slices.Equal(calls, want) {
		t.Errorf("%v, want %v", calls, want)
	}
}

// Where there is none, it says why and sandboxes do without.
func TestNoCoreCookie(t *testing.T) {
	t.Parallel()
	for errno, want := range map[unix.Errno]string{
		unix.ENODEV: "cores have one hardware thread", unix.EINVAL: "the kernel has no core scheduling (CONFIG_SCHED_CORE)", unix.EPERM: "core scheduling: operation not permitted",
	} {
		c, err := newCoreCookie(func(_, _, _ uintptr) error { return errno })
		if c != nil || err == nil || err.Error() != want {
			t.Errorf("%v: %v, %v", errno, c, err)
		}
		if err := c.share(1); err != nil {
			t.Error(err)
		}
	}
}
