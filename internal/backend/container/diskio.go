package container

import (
	"bytes"
	"os"
	"strconv"
	"sync"
)

// diskIO is what an instance's processes read from disks and wrote to them. The kernel adds up what each process
// did and what it waited for: with PID 1, who waits for all that nobody else does, that is everything but
// what a process left that was never waited for, since its parent ignores the end of its children. It costs
// nothing while nobody asks: a control group for it (v1: blkio) would cost memory for each sandbox, and with
// v1 it would not see what is written through the page cache.
type diskIO struct {
	mu            sync.Mutex
	read, written int64
}

// ofProcesses adds up what the processes did. What one did that is waited for meanwhile may
// be missing, and is there the next time: the answer is never less than the last.
func (d *diskIO) ofProcesses(pids []int) (read, written int64) {
	for _, pid := range pids {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/io")
		if err != nil {
			continue // it ended
		}
		r, w := parseIO(b)
		read, written = read+r, written+w
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.read, d.written = max(d.read, read), max(d.written, written)
	return d.read, d.written
}

// parseIO reads /proc/PID/io. What was written to files that were removed or cut before it reached a disk does not count.
func parseIO(b []byte) (read, written int64) {
	for line := range bytes.Lines(b) {
		key, value, _ := bytes.Cut(bytes.TrimSpace(line), []byte(": "))
		n, err := strconv.ParseInt(string(value), 10, 64)
		if err != nil {
			continue
		}
		switch string(key) {
		case "read_bytes":
			read += n
		case "write_bytes":
			written += n
		case "cancelled_write_bytes":
			written -= n
		}
	}
	return read, written
}
