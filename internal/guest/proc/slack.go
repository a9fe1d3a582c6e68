package proc

import (
	"time"

	"golang.org/x/sys/unix"
)

// timerSlack is the kernel's usual one, which programs get.
const timerSlack = 50 * time.Microsecond

// OwnTimerSlack gives the calling thread, and those that it starts, the usual timer slack
// back. The edge starts the guest with a large one for the thread that the runtime has
// started before anything of ours runs: its monitor, which while the guest is busy looks
// every 20 µs whether it is, and as often takes the core from somebody.
func OwnTimerSlack() error {
	return unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(timerSlack.Nanoseconds()), 0, 0, 0)
}
