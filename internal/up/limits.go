package up

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/internal/doctor"
)

// raiseLimits sees to it that this process may have the descriptors that so many sandboxes take, and all that
// the hard limit allows; where it cannot, it says for how many they are enough. It also lifts what the
// kernel counts by user: a sandbox's users together have no more of it than the node.
func raiseLimits(sandboxes int64, log *slog.Logger) error {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return err
	}
	need := doctor.FilesFor(sandboxes)
	// Root may lift the hard limit, up to fs.nr_open, unless it lacks CAP_SYS_RESOURCE.
	if l.Max < need && unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: need, Max: need}) == nil {
		l.Max = need
	}
	l.Cur = l.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return err
	}
	if l.Max < need {
		log.Warn("the limit of open files allows fewer sandboxes than --slots; raise it for this server with 'ulimit -Hn', or LimitNOFILE= of its service, and see fs.nr_open",
			"limit", l.Max, "needed", need, "slots", sandboxes)
	}
	for _, r := range []int{unix.RLIMIT_MSGQUEUE, unix.RLIMIT_SIGPENDING, unix.RLIMIT_MEMLOCK, unix.RLIMIT_NPROC} {
		err := unix.Setrlimit(r, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
		if err == unix.EPERM { // a root without CAP_SYS_RESOURCE: all there is
			if err = unix.Getrlimit(r, &l); err == nil {
				l.Cur = l.Max
				err = unix.Setrlimit(r, &l)
			}
		}
		if err != nil {
			return fmt.Errorf("lift a limit of the user's processes: %w", err)
		}
	}
	return nil
}

// Overcommit is so much that slots sandboxes of the default size fit, and no less than the default.
func Overcommit(slots int64) (cpu, memory float64) {
	cpu = float64(slots*v1.DefaultCPUMillis) / float64(runtime.NumCPU()*1000)
	if _, total, err := memoryInfo(); err == nil {
		memory = float64(slots*v1.DefaultMemoryBytes) / float64(total)
	}
	return max(DefaultCPUOvercommit, cpu), max(DefaultMemoryOvercommit, memory)
}

// pidReserve is how many process ids no new sandbox may take: those that run, and the machine's own
// programs, could start nothing any more. One in pidShare is kept at least.
const (
	pidReserve = 512
	pidShare   = 32
)

// shortOfPIDs tells if the machine has too few process ids, or threads, left for another sandbox.
func shortOfPIDs(proc string) (resource, text, advice string) {
	load, err := os.ReadFile(filepath.Join(proc, "loadavg"))
	if err != nil {
		return "", "", "" // what cannot be read stops nobody
	}
	_, total, _ := strings.Cut(string(load), "/") // "0.20 0.18 0.12 1/80 11206": running and all threads
	total, _, _ = strings.Cut(total, " ")
	threads, err := strconv.ParseInt(total, 10, 64)
	if err != nil {
		return "", "", ""
	}
	for _, name := range []string{"pid_max", "threads-max"} {
		b, err := os.ReadFile(filepath.Join(proc, "sys/kernel", name))
		if err != nil {
			continue
		}
		most, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
		if err == nil && threads+max(pidReserve, most/pidShare) > most {
			return "kernel." + name, fmt.Sprintf("%d threads are there, and the machine allows %d", threads, most),
				"raise it with 'sysctl -w kernel." + name + "=4194304', or remove sandboxes"
		}
	}
	return "", "", ""
}
