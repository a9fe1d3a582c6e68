package swap

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
)

// fileName is that of every node's swap file, so that another node does not take it for the machine's.
const fileName = "dsec.swap"

var page = os.Getpagesize()

// makeFile sees that the node's file is in use: one that is already, as by an earlier process, is left as it is.
// One that is not is made anew: it is of before a start of the machine, or of a process that died in between.
func (s *Space) makeFile(bytes int64) error {
	path := s.path(fileName)
	if s.active()[path] {
		return nil
	}
	if err := os.MkdirAll(s.cfg.Dir, 0o700); err != nil {
		return errs.Wrap(errs.InternalError, phase, "make the swap file's directory", err)
	}
	err := allocate(path, bytes)
	if err == nil {
		err = s.cfg.kernel.on(path)
	}
	if err == nil {
		return nil
	}
	err = errors.Join(err, remove(path))
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		return errs.New(errs.SwapFull, phase, fmt.Sprintf("there is no room on the disk for a swap file of %d bytes", bytes)).Because(err).
			Advise("free disk space in the data directory, or start the server with a smaller --swap file:SIZE, --swap host or zram")
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
		return errs.New(errs.NotSupported, phase, "the file system of the data directory ("+kindOf(s.cfg.Dir)+") cannot hold a swap file").Because(err).
			Advise("start the server with --swap host or zram, or with --data on ext4 or xfs")
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return errs.New(errs.NotSupported, phase, "the kernel does not let this server use a swap file").Because(err).
			Advise("a container around the server needs CAP_SYS_ADMIN; or add swap to the machine and start the server with --swap host")
	}
	return errs.Wrap(errs.InternalError, phase, "make the swap file", err)
}

// allocate makes a file of that size, with its blocks and a swap header.
func allocate(path string, bytes int64) error {
	if err := remove(path); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	bytes = bytes / int64(page) * int64(page)
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err == nil && st.Type == unix.BTRFS_SUPER_MAGIC { // which swaps to files only that it does not copy on write
		if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, noCopyOnWrite); err != nil {
			return fmt.Errorf("switch copying on write off: %w", err)
		}
	}
	for {
		if err = unix.Fallocate(int(f.Fd()), 0, 0, bytes); err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("allocate %d bytes: %w", bytes, err)
	}
	if _, err := f.WriteAt(header(page, bytes), 0); err != nil {
		return err
	}
	return f.Sync()
}

const noCopyOnWrite = 0x00800000 // FS_NOCOW_FL

// header is the first page of swap space, in the native byte order (mkswap(8), union swap_header of the kernel).
func header(page int, bytes int64) []byte {
	p := make([]byte, page)
	binary.NativeEndian.PutUint32(p[1024:], 1)                           // version
	binary.NativeEndian.PutUint32(p[1028:], uint32(bytes/int64(page)-1)) // last page
	copy(p[1052:], "dsec")                                               // label
	copy(p[page-10:], "SWAPSPACE2")
	return p
}

func (s *Space) removeFile(ctx context.Context) error {
	path := s.path(fileName)
	if s.active()[path] {
		if err := s.cfg.kernel.off(ctx, path); err != nil {
			return err
		}
	}
	return remove(path)
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		return err
	}
	return nil
}

// priority of the node's own devices: before those that the kernel puts in an order by itself.
const (
	priority   = 10
	flagPrefer = 0x8000 // SWAP_FLAG_PREFER
)

func (system) on(path string) error {
	p, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	_, _, errno := unix.Syscall(unix.SYS_SWAPON, uintptr(unsafe.Pointer(p)), flagPrefer|priority, 0)
	runtime.KeepAlive(p)
	if errno != 0 && errno != unix.EBUSY { // EBUSY: it is on
		return fmt.Errorf("swapon %s: %w", path, errno)
	}
	return nil
}

// off waits for the kernel up to ctx; what it began then goes on.
func (system) off(ctx context.Context, path string) error {
	p, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { // ends with the system call, which has no bound of its own
		for {
			_, _, errno := unix.Syscall(unix.SYS_SWAPOFF, uintptr(unsafe.Pointer(p)), 0, 0)
			if errno == unix.EINTR && ctx.Err() == nil {
				continue
			}
			if errno == 0 {
				done <- nil
			} else {
				done <- fmt.Errorf("swapoff %s: %w", path, errno)
			}
			return
		}
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("swapoff %s: %w", path, ctx.Err())
	}
}

// kindOf names the file system of a directory, from mountinfo.
func kindOf(dir string) string {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "unknown"
	}
	for kind, magic := range map[string]int64{
		"ext4": unix.EXT4_SUPER_MAGIC, "xfs": unix.XFS_SUPER_MAGIC, "btrfs": unix.BTRFS_SUPER_MAGIC, "tmpfs": unix.TMPFS_MAGIC,
		"overlayfs": unix.OVERLAYFS_SUPER_MAGIC, "nfs": unix.NFS_SUPER_MAGIC, "fuse": unix.FUSE_SUPER_MAGIC, "f2fs": unix.F2FS_SUPER_MAGIC,
	} {
		if int64(st.Type) == magic {
			return kind
		}
	}
	return fmt.Sprintf("type %#x", st.Type)
}
