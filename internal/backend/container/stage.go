package container

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"dsec/internal/backend/container/spawn"
)

// stage is where clones start from: threads in a mount namespace that holds nothing but an
// empty root, /proc and /sys. A child's copy of it is cheap, and the child can simply
// move its own root on top: leaving the host's tree instead takes pivot_root, which
// looks at every thread of the machine, and an unmount, which waits for all processors.
//
// /proc and /sys are there because the kernel gives a user namespace new ones only where it
// can see them already. Below a sandbox's root they are out of reach, and this /proc hides
// the processes of others besides.
type stage struct {
	jobs  chan func()
	close func() // idempotent
}

// stageThreads clone at once. A clone keeps a core busy for most of a millisecond, and
// there is other work.
func stageThreads() int { return max(1, runtime.NumCPU()/2) }

func newStage() (*stage, error) {
	s := &stage{jobs: make(chan func())}
	s.close = sync.OnceFunc(func() { close(s.jobs) })
	type made struct {
		ns  int
		err error
	}
	first := make(chan made)
	go s.run(func() error {
		ns, err := enterStage()
		first <- made{ns, err}
		return err
	})
	m := <-first
	if m.err != nil {
		return nil, fmt.Errorf("mount namespace for clones: %w", m.err)
	}
	defer unix.Close(m.ns)
	joined := make(chan error)
	for range stageThreads() - 1 {
		go s.run(func() error {
			err := unix.Unshare(unix.CLONE_FS)
			if err == nil {
				err = unix.Setns(m.ns, unix.CLONE_NEWNS)
			}
			joined <- err
			return err
		})
	}
	var all []error
	for range stageThreads() - 1 {
		all = append(all, <-joined)
	}
	if err := errors.Join(all...); err != nil {
		s.close()
		return nil, fmt.Errorf("mount namespace for clones: %w", err)
	}
	return s, nil
}

// run serves jobs on a thread of its own, which ends with it.
func (s *stage) run(enter func() error) {
	runtime.LockOSThread()
	if enter() != nil {
		return
	}
	for job := range s.jobs {
		job()
	}
}

// start is spawn.Start on one of the threads.
func (s *stage) start(flags uint64, cgroup int, p *spawn.Program) (child *spawn.Child, err error) {
	done := make(chan struct{})
	s.jobs <- func() {
		child, err = spawn.Start(flags, cgroup, p)
		close(done)
	}
	<-done
	return child, err
}

// enterStage moves the calling thread into a new stage and returns its namespace.
func enterStage() (ns int, err error) {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return -1, err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return -1, fmt.Errorf("make mounts private: %w", err)
	}
	ns, err = unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer func() {
		if err != nil {
			unix.Close(ns)
		}
	}()
	// Nosuid and the like would be locked on the sandboxes' own.
	const root = "/tmp"
	for _, m := range []struct{ kind, at, data string }{
		{"tmpfs", root, "size=4k,nr_inodes=4,mode=0755"}, {"proc", root + "/proc", "hidepid=2"}, {"sysfs", root + "/sys", ""},
	} {
		if m.at != root {
			if err := unix.Mkdir(m.at, 0o555); err != nil {
				return -1, fmt.Errorf("make %s: %w", m.at, err)
			}
		}
		if err := unix.Mount("dsec-stage", m.at, m.kind, 0, m.data); err != nil {
			return -1, fmt.Errorf("mount %s: %w", m.kind, err)
		}
	}
	if err := unix.Chdir(root); err != nil {
		return -1, err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return -1, fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return -1, fmt.Errorf("leave the host's tree: %w", err)
	}
	return ns, unix.Chdir("/")
}
