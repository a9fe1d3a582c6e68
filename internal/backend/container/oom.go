package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dsec/internal/backend"
)

// The kernel says in its log which process it killed for want of memory, and counts those of the whole
// machine. So one file tells of all sandboxes, however many there are, and they cost nothing for it.
const (
	kernelLog = "/dev/kmsg"
	vmstat    = "/proc/vmstat"
)

// countEvery is how often the machine's count is read: where the log cannot be read, all sandboxes are looked
// at when it has grown, and else when the log told of fewer. Then the next look has to see the same, as the count
// grows before the line is there.
const countEvery = 250 * time.Millisecond

var _ backend.OOMWatcher = (*Backend)(nil)

// WatchOOM implements backend.OOMWatcher.
func (b *Backend) WatchOOM(ctx context.Context, told func(backend.OOMKill)) error {
	w := &oomWatch{told: told, owner: b.ids.ownerOf, inside: insidePID, count: func() (int64, error) { return countOOM(vmstat) }}
	first, cerr := w.count()
	log, err := openKernelLog(kernelLog)
	switch {
	case err == nil:
		lines := make(chan string, 64)
		w.lines = lines
		stop := context.AfterFunc(ctx, func() { log.Close() })
		defer stop()
		go readKernelLog(ctx, log, lines)
	case cerr != nil:
		return fmt.Errorf("nothing tells of what is killed for want of memory: %w", errors.Join(err, cerr))
	}
	tick := time.NewTicker(countEvery)
	defer tick.Stop()
	return w.run(ctx, first, tick.C)
}

// openKernelLog opens the log for what is written to it from now on.
func openKernelLog(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the kernel's log: %w", err)
	}
	if _, err := unix.Seek(fd, 0, io.SeekEnd); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("find the end of the kernel's log: %w", err)
	}
	return os.NewFile(uintptr(fd), path), nil // non-blocking: the runtime's poller takes it
}

// readKernelLog hands on the lines that tell of a kill, until log is closed. Each read is of one record.
func readKernelLog(ctx context.Context, log *os.File, lines chan<- string) {
	defer close(lines)
	defer log.Close()
	buf := make([]byte, 8192) // the longest record there is
	for {
		n, err := log.Read(buf)
		switch {
		case errors.Is(err, unix.EPIPE): // some were overwritten before they were read: the count tells of them
			continue
		case err != nil:
			return
		}
		if line := string(buf[:n]); strings.Contains(line, killedMark) {
			select {
			case lines <- line:
			case <-ctx.Done():
				return
			}
		}
	}
}

// oomWatch puts lines of the log and the machine's count together.
type oomWatch struct {
	told   func(backend.OOMKill)
	owner  func(uid uint32) string           // "": no sandbox of ours
	inside func(pid int, sandbox string) int // a process's number in its sandbox
	count  func() (int64, error)
	lines  <-chan string // nil: there is no log

	seen   int64 // what of the count lines told of, or a look at all covered
	behind bool  // at the last look too
}

// run goes on until ctx ends. The count was first before lines began.
func (w *oomWatch) run(ctx context.Context, first int64, tick <-chan time.Time) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case line, ok := <-w.lines:
			if !ok {
				w.lines = nil
				break
			}
			w.line(line)
		case <-tick:
			if now, err := w.count(); err == nil {
				w.compare(now - first)
			}
		}
	}
}

func (w *oomWatch) line(line string) {
	k, uid, pid, ok := parseKill(line)
	if !ok {
		return
	}
	w.seen++
	if k.Sandbox = w.owner(uid); k.Sandbox != "" {
		k.PID = w.inside(pid, k.Sandbox)
		w.told(k)
	}
}

// compare has all looked at if more was killed than lines told of.
func (w *oomWatch) compare(counted int64) {
	missed := counted > w.seen
	if missed && (w.behind || w.lines == nil) {
		w.seen, missed = counted, false
		w.told(backend.OOMKill{})
	}
	w.behind = missed
}

// killedMark is in the lines that tell of a kill:
//
//	Memory cgroup out of memory: Killed process 42 (tail) total-vm:3kB, anon-rss:2kB, file-rss:1kB, shmem-rss:0kB, UID:7 pgtables:4kB oom_score_adj:300
//
// without "Memory cgroup" if the machine has no memory left.
const killedMark = ": Killed process "

// parseKill reads such a line. The name in it is the process's choice, of at most 15 bytes.
func parseKill(line string) (k backend.OOMKill, uid uint32, pid int, ok bool) {
	line, _, _ = strings.Cut(line, "\n")
	what, rest, ok := strings.Cut(line, killedMark)
	if !ok {
		return k, 0, 0, false
	}
	k.Node = !strings.Contains(what, "emory cgroup")
	number, rest, _ := strings.Cut(rest, " (")
	pid, err := strconv.Atoi(number)
	end := strings.LastIndex(rest, ") total-vm:")
	if err != nil || end < 0 {
		return k, 0, 0, false
	}
	k.Command = rest[:end]
	id := int64(-1)
	for _, f := range strings.FieldsFunc(rest[end:], func(r rune) bool { return r == ' ' || r == ',' }) {
		name, value, _ := strings.Cut(f, ":")
		n, err := strconv.ParseInt(strings.TrimSuffix(value, "kB"), 10, 64)
		if err != nil {
			continue
		}
		switch name {
		case "anon-rss", "file-rss", "shmem-rss":
			k.MemoryBytes += n << 10
		case "UID":
			id = n
		}
	}
	if id < 0 {
		return k, 0, 0, false
	}
	return k, uint32(id), pid, true
}

// countOOM reads how many processes of the machine were killed.
func countOOM(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
			return strconv.ParseInt(strings.TrimSpace(n), 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no oom_kill", path)
}

// insidePID is the number in its sandbox of a process that is about to end; 0 if it is gone.
func insidePID(pid int, sandbox string) int {
	groups, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil || !strings.Contains(string(groups), "/"+sandbox) { // another's by now, or another node's
		return 0
	}
	status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		if ids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			f := strings.Fields(ids)
			if len(f) < 2 {
				return 0
			}
			// That of the sandbox, which may itself have namespaces inside.
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	return 0
}
