package up

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// busyTime is how long the machine's processors were busy since it started, together.
func busyTime() (time.Duration, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	return parseBusy(string(b))
}

// tick is the unit of /proc/stat on every architecture that we run on.
const tick = 10 * time.Millisecond

// parseBusy reads the line of all processors: user, nice, system, idle, iowait, irq, softirq, steal, and
// then guests, which are in user and nice already.
func parseBusy(stat string) (busy time.Duration, err error) {
	line, _, _ := strings.Cut(stat, "\n")
	f := strings.Fields(line)
	if len(f) < 9 || f[0] != "cpu" {
		return 0, fmt.Errorf("/proc/stat begins with %q", line)
	}
	for i, s := range f[1:8] {
		if i == 3 || i == 4 { // idle
			continue
		}
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat begins with %q", line)
		}
		busy += time.Duration(n) * tick
	}
	return busy, nil
}
