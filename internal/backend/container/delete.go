package container

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
	"dsec/internal/backend/container/rmtree"
)

// Delete implements backend.Backend. It goes by names alone; what this process knows
// of the sandbox only makes it faster.
func (b *Backend) Delete(ctx context.Context, id string) error {
	b.mu.Lock()
	i := b.instances[id]
	b.mu.Unlock()
	defer b.hurry(id)()
	var err error
	if i != nil {
		err = i.signal() // what was paused ends without a step more
	}
	err = errors.Join(err, b.cgroups.Freezer(id).Thaw()) // what is frozen does not die
	switch {
	case err != nil:
	case i != nil:
		err = i.kill(ctx)
	default:
		err = b.killGroup(ctx, id)
	}
	if i != nil {
		i.stopCounting() // and no file of it comes back
	}
	if err == nil {
		err = errors.Join(b.removeGroup(ctx, id), b.removeDirectory(id))
	}
	if err != nil {
		return errs.Wrap(errs.InternalError, "container.delete", "something of the sandbox is left", err)
	}
	if i != nil {
		b.mu.Lock()
		delete(b.instances, id)
		b.mu.Unlock()
		i.close()
		b.ids.put(i.handle.FirstID)
	}
	return nil
}

// killGroup kills every process of the sandbox's group until none is left.
func (b *Backend) killGroup(ctx context.Context, id string) error {
	for wait := 100 * time.Microsecond; ; wait = min(2*wait, 10*time.Millisecond) {
		pids, err := b.cgroups.PIDs(id)
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
				return fmt.Errorf("kill pid %d: %w", pid, err)
			}
			var status unix.WaitStatus
			_, _ = unix.Wait4(pid, &status, unix.WNOHANG, nil) // a half-made child of ours would stay as a zombie
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return fmt.Errorf("%d processes do not end: %w", len(pids), ctx.Err())
		}
	}
}

// groupTime bounds the wait for a group that is still busy after its last process.
const groupTime = 5 * time.Second

func (b *Backend) removeGroup(ctx context.Context, id string) error {
	deadline := time.Now().Add(groupTime)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	return b.cgroups.Remove(id, deadline)
}

// removeDirectory deletes the sandbox's directory. Its content belongs to hostile code. On a
// file system that failed it stays: that one is made anew by the next start (see scratch), and
// a removal that never ends would help nobody.
func (b *Backend) removeDirectory(id string) error {
	err := rmtree.Remove(filepath.Join(b.dir.Name(), id))
	if err != nil && !errors.Is(err, unix.EROFS) {
		return fmt.Errorf("remove directory: %w", err)
	}
	return nil
}
