package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
	"dsec/internal/backend/container/scratch"
)

// unsuitable are file systems that hold neither images that can be mounted nor the upper
// directory of an overlay: no kernel helps.
var unsuitable = map[int64]string{unix.TMPFS_MAGIC: "tmpfs", unix.RAMFS_MAGIC: "ramfs", unix.OVERLAYFS_SUPER_MAGIC: "overlayfs"}

// DataDir tries what containers need of the file system of an existing directory: to mount
// an image that lies in it, and to write over one. Errors: errs.DataUnsuitable if another
// directory would do.
func DataDir(ctx context.Context, dir string) (err error) {
	tmp, err := os.MkdirTemp(dir, "dsec-try-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	_, store, err := tryImage(ctx, tmp)
	if err == nil {
		store.Close()
		err = tryWritable(dir, tmp)
	}
	var s unix.Statfs_t
	if err != nil && unix.Statfs(dir, &s) == nil && unsuitable[int64(s.Type)] != "" {
		return errs.New(errs.DataUnsuitable, "up.data", dir+" is on "+unsuitable[int64(s.Type)]+", from which sandboxes cannot run").Because(err)
	}
	return err
}

// tryWritable makes an overlay whose upper directory is on dir's file system, unless
// sandboxes write elsewhere anyway.
func tryWritable(dir, tmp string) error {
	if elsewhere, err := scratch.Needed(dir); err != nil || elsewhere {
		return err
	}
	overlay, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("the kernel's overlayfs: %w", err)
	}
	defer unix.Close(overlay)
	for _, name := range []string{"lower", "upper", "work"} {
		path := filepath.Join(tmp, name)
		if err := os.Mkdir(path, 0o700); err != nil {
			return err
		}
		if err := unix.FsconfigSetString(overlay, name+"dir", path); err != nil {
			return fmt.Errorf("overlay %s: %w", name, err)
		}
	}
	if err := unix.FsconfigCreate(overlay); err != nil {
		return fmt.Errorf("write over an image on this file system: %w", err)
	}
	return nil
}
