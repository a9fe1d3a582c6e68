package boot

import (
	"os/signal"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ProtectSelf makes PID 1 immune to signals from inside the sandbox. The kernel drops
// signals to PID 1 of a namespace that it has no handler for, but the Go runtime installs
// handlers for all of them, most of which end the program. So the default disposition is
// put back, except where the runtime needs its own: those for its faults, where only
// signals sent by others are ignored, and for preemption.
//
// Default rather than ignored, since an ignored signal stays ignored in every child.
func ProtectSelf() error {
	faults := []syscall.Signal{syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGFPE}
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		switch sig {
		case syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGURG:
			continue
		}
		if sig == faults[0] || sig == faults[1] || sig == faults[2] {
			continue
		}
		var act [4]uint64 // handler (SIG_DFL), flags, restorer, mask
		_, _, e := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&act)), 0, 8, 0, 0)
		if e != 0 {
			return e
		}
	}
	for _, sig := range faults {
		signal.Ignore(sig)
	}
	return nil
}

// KeepDescriptors marks every open descriptor so that no child gets it.
func KeepDescriptors() error {
	return unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC)
}
