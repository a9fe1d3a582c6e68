package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/internal/backend"
	"dsec/internal/backend/container/spawn"
)

// Check implements backend.Backend: it clones a process into all the namespaces, which
// is what a kernel or a container around this node may forbid.
func (b *Backend) Check(context.Context) error {
	if b.guest < 0 {
		return guestless("container.check")
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(pair[0])
	p := &spawn.Program{}
	p.AwaitByte(pair[1])
	if err := p.Exec(b.guest, []string{"dsec-guest", "--version"}, nil); err != nil {
		return err
	}
	child, err := b.stage.start(b.cfg.FirstID, namespaces, -1, p)
	unix.Close(pair[1])
	if err != nil {
		return fmt.Errorf("containers need user, mount, pid, network, ipc, uts and cgroup namespaces (kernel ≥ 5.7, user.max_user_namespaces > 0, root): %w", err)
	}
	defer unix.Close(child.PIDFD)
	err = unix.PidfdSendSignal(child.PIDFD, unix.SIGKILL, nil, 0)
	var status unix.WaitStatus
	for {
		if _, werr := unix.Wait4(child.PID, &status, 0, nil); werr != unix.EINTR {
			break
		}
	}
	child.Release()
	return err
}

// Try creates and removes one sandbox with the defaults and says how long the create took.
func Try(ctx context.Context, b *Backend) (time.Duration, error) {
	s := v1.Spec{Backend: v1.BackendContainer}
	s.SetDefaults()
	id := v1.SandboxID("trying", 0, uint64(os.Getpid()))
	start := time.Now()
	_, err := b.Create(ctx, backend.Spec{ID: id, Generation: 1, Sandbox: s, Image: &v1.Image{}}, nil)
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	return took, b.Delete(ctx, id)
}

// CgroupVersion is 1 or 2.
func (b *Backend) CgroupVersion() int {
	if b.cgroups.V2() {
		return 2
	}
	return 1
}

// CanFreeze fails, with what is missing, where sandboxes cannot be frozen.
func (b *Backend) CanFreeze() error { return b.cgroups.CanFreeze() }

// CPUClasses says how sandboxes of class ls are kept from those of class be; the error, what of that is missing.
func (b *Backend) CPUClasses() (detail string, err error) {
	if !b.cgroups.IdleClass() {
		err = errors.New("groups have no idle class (cpu.idle): be has the least weight instead")
	}
	switch {
	case b.noCores == nil:
		return "be is idle class, ls has core scheduling", err
	case errors.Is(b.noCores, errNoSMT) || !hyperthreads():
		return "be is idle class; cores have one hardware thread", err
	}
	return "be is idle class", errors.Join(err, b.noCores)
}

// hyperthreads tells whether cores share their hardware between threads.
func hyperthreads() bool {
	b, err := os.ReadFile("/sys/devices/system/cpu/smt/active")
	return err != nil || strings.TrimSpace(string(b)) != "0"
}
