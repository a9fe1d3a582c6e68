package up

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
)

// heldTime is how long down waits for the kernel to let go of files.
const heldTime = 10 * time.Second

// letGo waits until nobody has a file open below the paths any more: the kernel holds those of
// images, and the one of the scratch file system, until the last mounts of dead sandboxes have ended,
// which they do in the background.
func letGo(ctx context.Context, paths ...string) error {
	deadline := time.Now().Add(heldTime)
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		held, err := firstHeld(paths)
		if err != nil || held == "" {
			return err
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return errs.New(errs.StateConflict, "down", fmt.Sprintf("all is removed, but %s is still held by the kernel or a process, so that its file system cannot be unmounted yet", held))
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// firstHeld finds a regular file below the paths that is open.
func firstHeld(paths []string) (held string, err error) {
	found := errors.New("found")
	for _, p := range paths {
		err := filepath.WalkDir(p, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			open, err := isOpen(path)
			if err == nil && open {
				held, err = path, found
			}
			return err
		})
		if err != nil && !errors.Is(err, found) {
			return "", errs.Wrap(errs.InternalError, "down", "look for what is still held", err)
		}
		if held != "" {
			return held, nil
		}
	}
	return "", nil
}

// isOpen tells whether anybody, the kernel included, has a file open: of such a one nobody gets a
// lease. Where there are no leases, nothing is known.
func isOpen(path string) (bool, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil // somebody else's lease
	}
	if err != nil {
		return false, err
	}
	defer f.Close() // and with it the lease
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	return errors.Is(err, unix.EAGAIN), nil
}
