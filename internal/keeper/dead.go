package keeper

import (
	"context"
	"os"

	"golang.org/x/sys/unix"
)

// waitDead waits for the end of a process, or of ctx. The pid is of a process that
// was there a moment ago: one that has it now instead would be watched for nothing,
// and the connection to the one that is gone fails at the next call.
func waitDead(ctx context.Context, pid int) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return // gone already
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { f.Close() })
	defer stop()
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	raw.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		return err != nil && err != unix.EINTR || n > 0
	})
}
