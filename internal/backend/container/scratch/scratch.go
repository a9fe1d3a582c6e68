// Package scratch gives sandboxes' writable layers a file system of their own, in a
// sparse image file, where the one of the data directory does not suit: ext4 without a
// journal searches past every inode deleted in the last minutes at each new one, which
// doubles the cost of a create under churn (measured: 144/s against 271/s). It also
// bounds what all sandboxes together may write.
//
// The image holds nothing that must last. Sandboxes do not outlive the machine, so an
// image that is not mounted is simply made anew. It must not know what a sandbox is.
package scratch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Needed tells whether dir is on a file system that a scratch image is better than.
func Needed(dir string) (bool, error) {
	var sfs unix.Statfs_t
	if err := unix.Statfs(dir, &sfs); err != nil {
		return false, fmt.Errorf("statfs %s: %w", dir, err)
	}
	if sfs.Type != unix.EXT4_SUPER_MAGIC {
		return false, nil
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return false, err
	}
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	if err != nil {
		return false, nil // not a disk we can see: nothing is known against it
	}
	task, err := os.ReadFile("/sys/fs/ext4/" + filepath.Base(link) + "/journal_task")
	return err == nil && strings.TrimSpace(string(task)) == "<none>", nil
}

// Mount makes a file system of at most size bytes in dir/scratch.img and mounts it on
// dir/scratch, whose path it returns. One that is mounted already is kept if it works: the
// kernel makes it read-only for good when the disk below was full and took a write no more.
// Sandboxes that run on such a one keep it, and it goes when they do.
func Mount(ctx context.Context, dir string, size int64) (string, error) {
	point, image := filepath.Join(dir, "scratch"), filepath.Join(dir, "scratch.img")
	mounted, err := isMounted(point)
	if err != nil {
		return "", err
	}
	if mounted {
		failed, err := hasFailed(point)
		if err != nil || !failed {
			return point, err
		}
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return "", fmt.Errorf("unmount a scratch that failed: %w", err)
		}
	}
	if err := os.MkdirAll(point, 0o700); err != nil {
		return "", err
	}
	if err := os.Remove(image); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	f, err := os.OpenFile(image, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		return "", fmt.Errorf("size scratch image: %w", err)
	}
	out, err := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-m", "0", "-L", "dsec-scratch",
		"-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1", image).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("mkfs.ext4 (package e2fsprogs): %w: %s", err, out)
	}
	loop, err := attachLoop(f)
	if err != nil {
		return "", err
	}
	defer loop.Close() // the mount keeps it; without one it detaches itself
	// Nothing here must survive a crash of the machine, so nothing waits for the disk.
	if err := unix.Mount(loop.Name(), point, "ext4", unix.MS_NOATIME|unix.MS_LAZYTIME, "nobarrier,data=writeback,commit=60,noinit_itable"); err != nil {
		return "", fmt.Errorf("mount scratch image: %w", err)
	}
	return point, nil
}

// hasFailed tells whether the file system at point takes no changes any more, for another
// reason than being full.
func hasFailed(point string) (bool, error) {
	try, err := os.MkdirTemp(point, ".try-")
	switch {
	case err == nil:
		return false, os.Remove(try)
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EIO):
		return true, nil
	case errors.Is(err, unix.ENOSPC):
		return false, nil
	}
	return false, err
}

// attachLoop binds f to a free loop device, which lets go of it when last used. Direct
// I/O: the sandboxes' page cache is enough.
func attachLoop(f *os.File) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("loop devices: %w", err)
	}
	defer control.Close()
	for range 64 { // another process may take the free one first
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		loop, err := os.OpenFile("/dev/loop"+strconv.Itoa(n), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		cfg := &unix.LoopConfig{Fd: uint32(f.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO}}
		err = unix.IoctlLoopConfigure(int(loop.Fd()), cfg)
		if errors.Is(err, unix.EINVAL) && cfg.Info.Flags&unix.LO_FLAGS_DIRECT_IO != 0 { // the file system below cannot
			cfg.Info.Flags &^= unix.LO_FLAGS_DIRECT_IO
			err = unix.IoctlLoopConfigure(int(loop.Fd()), cfg)
		}
		if err == nil {
			return loop, nil
		}
		loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("configure loop device: %w", err)
		}
	}
	return nil, errors.New("every free loop device was taken by others")
}

// Unmount takes the file system off its directory. It fails with EBUSY while sandboxes
// still use it; mounts of dead ones that end in the background hold its image, as Remove's caller
// may want to know.
func Unmount(dir string) error {
	point := filepath.Join(dir, "scratch")
	mounted, err := isMounted(point)
	if err != nil {
		return err
	}
	if mounted {
		if err := unix.Unmount(point, unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount scratch: %w", err)
		}
	}
	return nil
}

// Remove removes the image of a file system that was unmounted.
func Remove(dir string) error {
	if err := os.Remove(filepath.Join(dir, "scratch.img")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func isMounted(point string) (bool, error) {
	var here, parent unix.Stat_t
	if err := unix.Lstat(point, &here); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return false, nil
		}
		return false, err
	}
	if err := unix.Lstat(filepath.Dir(point), &parent); err != nil {
		return false, err
	}
	return here.Dev != parent.Dev, nil
}
