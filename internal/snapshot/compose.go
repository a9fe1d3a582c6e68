package snapshot

import (
	"context"
	"fmt"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// maxStack is how many layers the kernel takes (OVL_MAX_STACK).
const maxStack = 500

// Compose mounts layers (highest first, as sandboxes get them) on top of each other, read-only,
// and returns the detached mount: what a snapshot shows, for reading, exporting and
// comparing. Each layer is given by descriptor, so their number is bounded by the kernel alone and
// not by the page that mount options used to fit in. For one layer it is a clone of its mount.
//
// Redirects in the layers are followed, as a sandbox's own overlay does.
func Compose(ctx context.Context, layers []int) (int, error) {
	if err := ctx.Err(); err != nil {
		return -1, errs.Wrap(errs.RequestCanceled, composePhase, "compose layers", err)
	}
	switch n := len(layers); {
	case n == 0 || n > maxStack:
		return -1, errs.New(errs.BadRequest, composePhase, fmt.Sprintf("%d layers (1 to %d)", n, maxStack))
	case n == 1: // an overlay needs two
		fd, err := unix.OpenTree(layers[0], "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		return fd, errs.Wrap(errs.InternalError, composePhase, "clone the layer's mount", err)
	}
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, errs.Wrap(errs.NotSupported, composePhase, "open the kernel's overlayfs", err)
	}
	defer unix.Close(fs)
	for i, fd := range layers {
		if err := unix.FsconfigSetFd(fs, "lowerdir+", fd); err != nil {
			return -1, errs.Wrap(errs.InternalError, composePhase, fmt.Sprintf("layer %d%s", i+1, said(fs)), err)
		}
	}
	err = unix.FsconfigSetString(fs, "redirect_dir", "follow")
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return -1, errs.Wrap(errs.InternalError, composePhase, "compose layers"+said(fs), err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV)
	return fd, errs.Wrap(errs.InternalError, composePhase, "mount composed layers", err)
}

const composePhase = "snapshot.compose"

// said is what the kernel logged to the context, for an error's text.
func said(fs int) string {
	var out string
	for buf := make([]byte, 512); len(out) < 4096; {
		n, err := unix.Read(fs, buf)
		if err != nil || n <= 0 {
			break
		}
		out += ": " + string(buf[:n])
	}
	return out
}
