package boot

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ProtectSelf makes PID 1 immune to signals from inside the sandbox. The kernel drops
// signals to PID 1 of a namespace that it has no handler for, but the Go runtime installs
// handlers for all of them, most of which end the program. So the default disposition is
// put back, for all: while any handler runs its thread blocks signals, and one that the main
// thread blocks ends the process (see the main function). This gives up two things: a nil
// dereference ends the guest instead of becoming a panic, and goroutines are preempted
// at calls only.
//
// Default rather than ignored, since an ignored signal stays ignored in every child.
func ProtectSelf() error {
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		if sig == syscall.SIGKILL || sig == syscall.SIGSTOP {
			continue
		}
		var act [4]uint64 // handler (SIG_DFL), flags, restorer, mask
		_, _, e := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&act)), 0, 8, 0, 0)
		if e != 0 {
			return e
		}
	}
	return nil
}

// KeepDescriptors marks every open descriptor so that no child gets it.
func KeepDescriptors() error {
	return unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC)
}
