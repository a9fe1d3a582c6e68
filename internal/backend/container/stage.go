package container

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"dsec/internal/backend/container/mount"
	"dsec/internal/backend/container/spawn"
)

// stage is where clones start from: threads in a mount namespace that holds nothing but an
// empty root and /proc. A child's copy of it is cheap, and the child can simply
// move its own root on top: leaving the host's tree instead takes pivot_root, which
// looks at every thread of the machine, and an unmount, which waits for all processors.
//
// /proc is there because the kernel gives a user namespace a new one only where it can see
// one already. Below a sandbox's root it is out of reach, and it hides the processes of
// others besides.
//
// The threads also have a network namespace with nothing but loopback: their /sys, which
// shows that, serves as every sandbox's. One of its own would cost each sandbox a file
// system, and the kernel looks at all there are to make another.
//
// A user namespace belongs to the user that made it, in whose account the kernel adds up what it counts by user
// (messages queued, signals, timers, inotify) of all in it. So each is made as the sandbox's own root.
type stage struct {
	jobs  chan func()
	sys   int    // a detached read-only mount, to be cloned
	close func() // idempotent
}

// stageThreads clone at once. A clone keeps a core busy for most of a millisecond, and
// there is other work.
func stageThreads() int { return max(1, runtime.NumCPU()/2) }

func newStage() (*stage, error) {
	s := &stage{jobs: make(chan func()), sys: -1}
	s.close = sync.OnceFunc(func() {
		close(s.jobs)
		if s.sys >= 0 {
			unix.Close(s.sys)
		}
	})
	var mnt, net int
	first := make(chan error)
	go s.run(func() (err error) {
		mnt, net, s.sys, err = enterStage()
		first <- err
		return err
	})
	if err := <-first; err != nil {
		return nil, fmt.Errorf("namespaces for clones: %w", err)
	}
	defer unix.Close(mnt)
	defer unix.Close(net)
	joined := make(chan error)
	for range stageThreads() - 1 {
		go s.run(func() error {
			err := errors.Join(keepCapabilities(), unix.Unshare(unix.CLONE_FS))
			if err == nil {
				err = errors.Join(unix.Setns(mnt, unix.CLONE_NEWNS), unix.Setns(net, unix.CLONE_NEWNET))
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
		return nil, fmt.Errorf("namespaces for clones: %w", err)
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

// start is spawn.Start on one of the threads, for a user namespace that belongs to owner.
func (s *stage) start(owner uint32, flags uint64, cgroup int, p *spawn.Program) (child *spawn.Child, err error) {
	done := make(chan struct{})
	s.jobs <- func() {
		defer close(done)
		if err = actAs(owner); err != nil {
			return
		}
		child, err = spawn.Start(flags, cgroup, p)
		if back := actAs(0); back != nil {
			panic("become root again: " + back.Error()) // it is the saved user: it cannot fail
		}
	}
	<-done
	return child, err
}

// keepCapabilities lets the calling thread keep its capabilities whichever user it acts as. What
// it clones into a new user namespace does not inherit that.
func keepCapabilities() error {
	const noSetuidFixup = 1 << 2 // SECBIT_NO_SETUID_FIXUP
	if err := unix.Prctl(unix.PR_SET_SECUREBITS, noSetuidFixup, 0, 0, 0); err != nil {
		return fmt.Errorf("keep capabilities: %w", err)
	}
	return nil
}

// actAs sets the effective user of the calling thread alone.
func actAs(user uint32) error {
	const same = ^uintptr(0)
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, same, uintptr(user), same); e != 0 {
		return fmt.Errorf("act as user %d: %w", user, e)
	}
	return nil
}

// enterStage moves the calling thread into new namespaces and returns them, with a
// detached mount of their /sys.
func enterStage() (mnt, net, sys int, err error) {
	mnt, net, sys = -1, -1, -1
	defer func() {
		if err != nil {
			for _, fd := range []int{mnt, net, sys} {
				if fd >= 0 {
					unix.Close(fd)
				}
			}
		}
	}()
	if err = keepCapabilities(); err != nil {
		return
	}
	if err = unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNET); err != nil {
		return
	}
	if err = loopbackUp(); err != nil {
		return mnt, net, sys, fmt.Errorf("bring up loopback: %w", err)
	}
	if sys, err = mount.Sys(); err != nil { // in the mount namespace where it will be cloned (kernel 6.15)
		return
	}
	if err = unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return
	}
	if err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return mnt, net, sys, fmt.Errorf("make mounts private: %w", err)
	}
	if mnt, err = unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return
	}
	if net, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return
	}
	// Nosuid and the like would be locked on the sandboxes' own.
	const root = "/tmp"
	for _, m := range []struct{ kind, at, data string }{
		{"tmpfs", root, "size=4k,nr_inodes=3,mode=0755"}, {"proc", root + "/proc", "hidepid=2"},
	} {
		if m.at != root {
			if err = unix.Mkdir(m.at, 0o555); err != nil {
				return mnt, net, sys, fmt.Errorf("make %s: %w", m.at, err)
			}
		}
		if err = unix.Mount("dsec-stage", m.at, m.kind, 0, m.data); err != nil {
			return mnt, net, sys, fmt.Errorf("mount %s: %w", m.kind, err)
		}
	}
	if err = unix.Chdir(root); err != nil {
		return
	}
	if err = unix.PivotRoot(".", "."); err != nil {
		return mnt, net, sys, fmt.Errorf("pivot_root: %w", err)
	}
	if err = unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return mnt, net, sys, fmt.Errorf("leave the host's tree: %w", err)
	}
	return mnt, net, sys, unix.Chdir("/")
}

func loopbackUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr)
}
