package image

import (
	"context"
	"errors"
	"path/filepath"
	"strings"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

const mountPhase = "image.mount"

// Mount mounts a layer read-only from its plain files and returns the detached
// mount's descriptor; the caller closes it, and clones it with open_tree. The
// mount is held by descriptors alone: nothing is left when the last one closes.
//
// setuid bits work; device nodes do not, since sandboxes get their own /dev.
// It needs CAP_SYS_ADMIN and a kernel with file-backed EROFS (6.12). Errors:
// image_corrupt, not_supported, internal_error.
func Mount(ctx context.Context, l LayerFiles) (int, error) {
	if err := ctx.Err(); err != nil {
		return -1, errs.Wrap(errs.RequestCanceled, mountPhase, "mount layer", err)
	}
	for _, p := range []*string{&l.Meta, &l.Data} {
		if *p == "" {
			continue
		}
		abs, err := filepath.Abs(*p)
		if err != nil {
			return -1, errs.Wrap(errs.InternalError, mountPhase, "find layer "+*p, err)
		}
		*p = abs
	}
	fs, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, errs.Wrap(errs.NotSupported, mountPhase, "open the kernel's EROFS", err)
	}
	defer unix.Close(fs)
	err = unix.FsconfigSetString(fs, "source", l.Meta)
	if err == nil && l.Data != "" {
		err = unix.FsconfigSetString(fs, "device", l.Data)
	}
	if err == nil {
		err = unix.FsconfigSetFlag(fs, "ro")
	}
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return -1, mountError(fs, l, err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return -1, errs.Wrap(errs.InternalError, mountPhase, "mount layer "+l.Meta, err)
	}
	return fd, nil
}

// mountError adds what the kernel had to say on the context's log.
func mountError(fs int, l LayerFiles, err error) error {
	code := errs.InternalError
	switch {
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EBADMSG), errors.Is(err, unix.ENOENT):
		code = errs.ImageCorrupt
	case errors.Is(err, unix.ENOTBLK):
		code = errs.NotSupported // no file-backed mounts before 6.12
	}
	var said []string
	for buf := make([]byte, 1024); len(said) < 8; {
		n, rerr := unix.Read(fs, buf)
		if rerr != nil || n <= 0 {
			break
		}
		said = append(said, strings.TrimSpace(string(buf[:n])))
	}
	e := errs.New(code, mountPhase, "mount layer "+l.Meta).Because(err)
	if len(said) > 0 {
		e.With("kernel", strings.Join(said, "; "))
	}
	return e
}

// Clone makes another detached mount of the one that fd holds, sharing its page
// cache: what a caller attaches or gives to an overlay. It needs Linux 6.15,
// which first lets detached mounts be cloned.
func Clone(fd int) (int, error) {
	c, err := unix.OpenTree(fd, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		code := errs.InternalError
		if errors.Is(err, unix.EINVAL) {
			code = errs.NotSupported
		}
		return -1, errs.Wrap(code, mountPhase, "clone layer mount", err)
	}
	return c, nil
}
