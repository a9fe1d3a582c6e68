package up

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
	"dsec/internal/backend/container/cgroup"
	"dsec/internal/backend/container/scratch"
	"dsec/internal/backend/hollow"
	"dsec/internal/edge"
	"dsec/internal/keeper"
	"dsec/internal/swap"
)

// Find reads where the node of a data directory answers; errs.NodeNotFound if none runs.
func Find(data string) (Info, error) {
	var info Info
	b, err := os.ReadFile(filepath.Join(data, "run.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return info, errs.New(errs.NodeNotFound, "down", "no node runs on "+data)
	}
	if err != nil {
		return info, err
	}
	if err := json.Unmarshal(b, &info); err != nil {
		return info, fmt.Errorf("%s/run.json: %w", data, err)
	}
	lock, err := acquire(filepath.Join(data, "lock"))
	if err == nil { // nobody holds it: the node was killed
		lock.Close()
		return info, errs.New(errs.NodeNotFound, "down", "the node of "+data+" has died")
	}
	if ended(info.PID) { // a rest of it, or somebody who looks like us, holds the lock for a moment
		return info, errs.New(errs.NodeNotFound, "down", "the node of "+data+" has died")
	}
	return info, nil
}

// Token returns the root token of a data directory's node.
func Token(data string) (string, error) {
	b, err := os.ReadFile(filepath.Join(data, "root.token"))
	return strings.TrimSpace(string(b)), err
}

// Stop ends the node's process and waits until it has let go of the data directory.
func Stop(ctx context.Context, data string, info Info) error {
	process, err := unix.PidfdOpen(info.PID, 0) // before it can end, and its id be another's
	if err == nil {
		defer unix.Close(process)
	}
	if err := unix.Kill(info.PID, unix.SIGTERM); err != nil && err != unix.ESRCH {
		return fmt.Errorf("signal pid %d: %w", info.PID, err)
	}
	for {
		lock, lerr := acquire(filepath.Join(data, "lock"))
		if lerr == nil && err == nil && !over(process) { // it has more than the lock to let go of
			lerr = errors.Join(unix.EBUSY, lock.Close())
		}
		if lerr == nil {
			return lock.Close()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of pid %d: %w", info.PID, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// over tells whether a process has let go of everything, though it may wait to be reaped.
func over(pidfd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	return err == nil && n > 0
}

// RemoveSandboxes removes every sandbox of a data directory whose node is not running,
// and all that the node held for them. One that cannot be removed does not keep the
// others; the error tells of it at the end. It returns how many were removed.
func RemoveSandboxes(ctx context.Context, data string) (removed int, err error) {
	if data, err = filepath.Abs(data); err != nil {
		return 0, err
	}
	if _, err := os.Stat(filepath.Join(data, "lock")); err != nil {
		// Unless somebody removed it from under a node, of which control groups tell.
		if found, gerr := cgroup.Find(cgroupRoot, cgroup.NameOf(data)); gerr != nil || len(found) == 0 {
			return 0, errs.New(errs.NodeNotFound, "down", data+" is not the data directory of a node").Because(errors.Join(err, gerr))
		}
		if err := os.MkdirAll(data, 0o700); err != nil {
			return 0, err
		}
	}
	lock, err := takeOver(ctx, data)
	if err != nil {
		return 0, err
	}
	defer lock.Close()
	h, err := hollow.New(filepath.Join(data, "hollow"))
	if err != nil {
		return 0, err
	}
	defer h.Close()
	b, err := Containers(ctx, data, nil, nil, nil, nil)
	if err != nil {
		return 0, err
	}
	defer b.Close() // also closed below, before the unmount; a second time does no harm
	removed, left, err := removeAll(ctx, b, h)
	if err != nil {
		return removed, errors.Join(err, edge.Emptied(filepath.Join(data, "edge"), time.Now(), left...))
	}
	// Nothing is paused any more.
	space, err := swap.New(swap.Config{Dir: filepath.Join(data, swapDir), Option: swap.Option{Kind: swap.None}})
	if err == nil {
		err = space.Remove(ctx)
	}
	if err != nil {
		return removed, err
	}
	// Nothing is mounted any more that the keepers hold readers of.
	if err := errors.Join(edge.Emptied(filepath.Join(data, "edge"), time.Now()), b.Withdraw(), b.Close(), keeper.Stop(ctx, keepers(data))); err != nil {
		return removed, err
	}
	// The last mounts of dead sandboxes go away in the background.
	for wait := 5 * time.Millisecond; ; wait *= 2 {
		err := scratch.Unmount(data)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EBUSY) || wait > 5*time.Second {
			return removed, err
		}
		time.Sleep(wait)
	}
	if err := letGo(ctx, filepath.Join(data, "scratch.img"), filepath.Join(data, "images")); err != nil {
		return removed, err
	}
	return removed, scratch.Remove(data)
}

// remover is what removeAll needs of a backend.
type remover interface {
	List(context.Context) ([]string, error)
	Delete(context.Context, string) error
}

// maxTold bounds how many failed removals an error tells of; all are counted.
const maxTold = 5

// removeAll removes the sandboxes of all backends and returns how many went, the ids of
// those that did not, and why.
func removeAll(ctx context.Context, backends ...remover) (removed int, left []string, err error) {
	var told []error
	for _, b := range backends {
		ids, err := b.List(ctx)
		if err != nil {
			told = append(told, fmt.Errorf("list sandboxes: %w", err))
			continue
		}
		for _, id := range ids {
			if err := b.Delete(ctx, id); err == nil {
				removed++
			} else if left = append(left, id); len(left) <= maxTold {
				told = append(told, fmt.Errorf("%s: %w", id, err))
			}
		}
	}
	if len(left) > 0 {
		text := fmt.Sprintf("removed %d sandboxes; %d are left, with all that the node holds: mend what is said here and repeat 'dsec down'", removed, len(left))
		return removed, left, errs.New(errs.InternalError, "down", text).Because(errors.Join(told...))
	}
	return removed, nil, errors.Join(told...)
}
