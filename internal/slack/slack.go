// Package slack makes a busy Go program share its machine better. It owns one knob; start at
// [RelaxMonitor].
package slack

import (
	"os"
	"strconv"
	"time"
)

// monitorSlack is by how much the kernel may delay the timers of the Go runtime's monitor.
const monitorSlack = time.Millisecond

// RelaxMonitor makes the runtime's monitor thread look less often whether a thread of this
// program sits in a system call for long. It would every 20 µs while there is work, and
// then have another thread go on; but the calls of a create are many and short, and a
// machine that is full of sandboxes has no idle core for either. It is the first
// thread that the runtime starts; where it cannot be found, nothing but speed is lost.
func RelaxMonitor() {
	dir, err := os.Open("/proc/self/task")
	if err != nil {
		return
	}
	defer dir.Close()
	tids, err := dir.Readdirnames(2) // the kernel lists them in the order of their start
	if err != nil || len(tids) < 2 {
		return
	}
	_ = os.WriteFile("/proc/"+tids[1]+"/timerslack_ns", []byte(strconv.FormatInt(monitorSlack.Nanoseconds(), 10)), 0)
}
