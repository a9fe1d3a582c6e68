package proc

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// startWaiter starts a thread that waits for a child's end, or for there to be no child,
// writes to told, and goes on when it has read from ack. Both are eventfds.
func startWaiter(told, ack int) (tid int)

// waiter waits for children in a thread that the Go runtime does not know. A goroutine in
// waitid would keep the processor until the runtime's monitor took it away, and all of
// the guest would wait that long after each child's end.
type waiter struct {
	told *os.File // by way of the poller, as everything else here
	ack  int
}

func newWaiter() (*waiter, error) {
	told, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, err
	}
	ack, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		unix.Close(told)
		return nil, err
	}
	if tid := startWaiter(told, ack); tid < 0 {
		unix.Close(told)
		unix.Close(ack)
		return nil, syscall.Errno(-tid)
	}
	return &waiter{told: os.NewFile(uintptr(told), "dead children"), ack: ack}, nil
}

// wait returns when a child is dead and unreaped, or there is none.
func (w *waiter) wait() error {
	var n [8]byte
	_, err := w.told.Read(n[:])
	return err
}

// done says that the reaper has looked.
func (w *waiter) done() error {
	_, err := unix.Write(w.ack, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	return err
}
