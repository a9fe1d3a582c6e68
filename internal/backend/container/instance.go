package container

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/backend/container/spawn"
)

// instance is one running container.
type instance struct {
	b      *Backend
	id     string
	spec   backend.Spec
	handle handle
	pidfd  *os.File
	done   chan struct{} // closed when PID 1, and so all of the container, has ended

	reads reads
	still still
	fetch fetch
	disk  diskIO

	mu    sync.Mutex
	first net.Conn // the channel made at creation, until someone dials
}

func newInstance(c *creation, child *spawn.Child) (*instance, error) {
	ticks, err := startTicks(child.PID)
	if err != nil {
		return nil, err
	}
	return watch(c.b, c.spec, handle{child.PID, ticks, c.firstID, c.spec.Generation}, child.PIDFD), nil
}

// watch takes over pidfd and waits for the process's end on the runtime's poller, so a
// waiting sandbox costs a goroutine and no thread.
func watch(b *Backend, spec backend.Spec, h handle, pidfd int) *instance {
	i := &instance{b: b, id: spec.ID, spec: spec, handle: h, pidfd: os.NewFile(uintptr(pidfd), "pidfd"), done: make(chan struct{}), still: still{turn: make(chan struct{}, 1)}}
	go func() {
		raw, err := i.pidfd.SyscallConn()
		if err == nil {
			err = raw.Read(func(fd uintptr) bool { return readable(int(fd)) }) // asked at once, then after each event
		}
		if err != nil { // closed: this process lets go of the sandbox
			return
		}
		i.reap()
		close(i.done)
	}()
	return i
}

// ended tells whether the end of the process was seen.
func (i *instance) ended() bool {
	select {
	case <-i.done:
		return true
	default:
		return false
	}
}

// readable tells whether a pidfd's process has ended, reaped or not.
func readable(pidfd int) bool {
	p := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1
}

// reap collects the exit status if the process is our child; an adopted one is init's.
func (i *instance) reap() {
	var status unix.WaitStatus
	for {
		if _, err := unix.Wait4(i.handle.PID, &status, unix.WNOHANG, nil); err != unix.EINTR {
			return
		}
	}
}

func (i *instance) kill(ctx context.Context) error {
	if err := i.signal(); err != nil {
		return err
	}
	select {
	case <-i.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of pid %d: %w", i.handle.PID, ctx.Err())
	}
}

// signal tells PID 1, and so all of the container, to end.
func (i *instance) signal() error {
	raw, err := i.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	var kerr error
	if err := raw.Control(func(fd uintptr) { kerr = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) }); err != nil {
		return err
	}
	if kerr != nil && kerr != unix.ESRCH {
		return fmt.Errorf("kill pid %d: %w", i.handle.PID, kerr)
	}
	return nil
}

func (i *instance) close() {
	i.stopCounting()
	i.fetch.stop(true)
	i.pidfd.Close()
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.first != nil {
		i.first.Close()
		i.first = nil
	}
}

// ID implements backend.Instance.
func (i *instance) ID() string { return i.id }

// Handle implements backend.Instance.
func (i *instance) Handle() json.RawMessage { return i.handle.json() }

// Done implements backend.Instance.
func (i *instance) Done() <-chan struct{} { return i.done }

// DialGuest implements backend.Instance. The first call after a create gets the
// channel that the guest was started with.
func (i *instance) DialGuest(ctx context.Context) (net.Conn, error) {
	i.mu.Lock()
	conn := i.first
	i.first = nil
	i.mu.Unlock()
	if conn != nil {
		return conn, nil
	}
	dir, err := os.Open(filepath.Join(i.b.dir.Name(), i.id))
	if err != nil {
		return nil, errs.Wrap(errs.GuestUnreachable, "container.dial", "the sandbox's directory", err)
	}
	defer dir.Close()
	conn, err = (&net.Dialer{}).DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(int(dir.Fd()))+"/"+guestSocket)
	return conn, errs.Wrap(errs.GuestUnreachable, "container.dial", "the guest's socket", err)
}

// Usage implements backend.Instance.
func (i *instance) Usage(ctx context.Context) (v1.Usage, error) {
	u, err := i.Counters(ctx)
	if err == nil {
		u.DiskBytes = diskUsage(filepath.Join(i.b.dir.Name(), i.id, "upper"))
	}
	return u, err
}

// Counters implements backend.Counter: it looks at no files of the sandbox.
func (i *instance) Counters(context.Context) (v1.Usage, error) {
	u, err := i.b.cgroups.Usage(i.id)
	if err != nil {
		return v1.Usage{}, errs.Wrap(errs.InternalError, "container.usage", "read the cgroup", err)
	}
	pids, err := i.b.cgroups.PIDs(i.id)
	if err != nil {
		return v1.Usage{}, errs.Wrap(errs.InternalError, "container.usage", "list its processes", err)
	}
	if !slices.Contains(pids, i.handle.PID) && !i.ended() {
		pids = append(pids, i.handle.PID)
	}
	read, written := i.disk.ofProcesses(pids)
	image := i.used()
	return v1.Usage{
		CPUSeconds: u.CPU.Seconds(), MemoryBytes: u.MemoryBytes, PeakMemoryBytes: u.PeakMemoryBytes, SwapBytes: u.SwapBytes, IOReadBytes: read, IOWrittenBytes: written,
		Processes: u.PIDs, OOMKills: u.OOMKills, ForksRefused: u.PIDsRefused,
		ImageReadBytes: image.Read, ImageWaitedBytes: image.Waited, ImageWaitSeconds: image.Wait.Seconds(), ImageFetchedBytes: image.Fetched,
	}, nil
}

// OOMKills implements backend.OOMCounter.
func (i *instance) OOMKills() (int64, error) { return i.b.cgroups.OOMKills(i.id) }

// MemoryBytes implements backend.MemoryCounter.
func (i *instance) MemoryBytes() (int64, error) { return i.b.cgroups.MemoryBytes(i.id) }

// diskUsage sums the blocks below dir; files that vanish meanwhile count as nothing.
func diskUsage(dir string) (total int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error { // a partial sum is all there is to tell
		if err != nil {
			return nil
		}
		if info, err := d.Info(); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok {
				total += st.Blocks * 512
			}
		}
		return nil
	})
	return total
}

// startTicks reads when a process started, in clock ticks since boot: with its pid, its identity.
func startTicks(pid int) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	s := string(b)
	fields := strings.Fields(s[strings.LastIndexByte(s, ')')+1:]) // the name may hold anything
	if len(fields) < 20 {
		return 0, fmt.Errorf("unexpected /proc/%d/stat: %q", pid, s)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}
