package container

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"dsec/internal/backend/container/spawn"
)

// Check implements backend.Backend: it clones a process into all the namespaces, which
// is what a kernel or a container around this node may forbid.
func (b *Backend) Check(context.Context) error {
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
	child, err := spawn.Start(namespaces, -1, p)
	unix.Close(pair[1])
	if err != nil {
		return errors.Join(fmt.Errorf("containers need user, mount, pid, network, ipc, uts and cgroup namespaces (kernel ≥ 5.7, user.max_user_namespaces > 0, root): %w", err))
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
