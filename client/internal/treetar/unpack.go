package treetar

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// UnpackOptions changes what Unpack makes.
type UnpackOptions struct {
	// KeepOwner sets owners (needs privilege), device nodes and extended attributes.
	// Without it everything belongs to the caller and devices are left out.
	KeepOwner bool
	// OnEntry is told of each entry before its contents.
	OnEntry func(name string, size int64)
}

// Result of Unpack.
type Result struct {
	Entries, Bytes int64
	Skipped        []string // names of what could not be made here, such as devices
}

// Unpack writes the tar of r below root. Nothing outside root can be reached, whatever
// names and links the stream holds.
func Unpack(ctx context.Context, r io.Reader, root *os.Root, o UnpackOptions) (Result, error) {
	u := unpacker{root: root, o: o, buf: make([]byte, 256<<10)}
	tr := tar.NewReader(r)
	for {
		if err := ctx.Err(); err != nil {
			return u.res, err
		}
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return u.res, fmt.Errorf("read tar: %w", err)
		}
		if err := u.entry(ctx, tr, h, below(h.Name)); err != nil {
			return u.res, fmt.Errorf("unpack %q: %w", h.Name, err)
		}
	}
	// Directories last, deepest first: writing into them changes their times, and a
	// mode without w would have stopped us.
	for i := len(u.dirs) - 1; i >= 0; i-- {
		if err := u.meta(u.dirs[i].h, u.dirs[i].name); err != nil {
			return u.res, fmt.Errorf("unpack %q: %w", u.dirs[i].h.Name, err)
		}
	}
	// What follows the end mark (padding) must be read too: the sender counts on it.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return u.res, fmt.Errorf("read tar: %w", err)
	}
	return u.res, nil
}

type unpacker struct {
	root *os.Root
	o    UnpackOptions
	res  Result
	buf  []byte
	dirs []struct {
		h    *tar.Header
		name string
	}
}

// below maps a name of the stream to one below root: ".." cannot climb above "/".
func below(n string) string {
	if n = strings.TrimPrefix(path.Clean("/"+n), "/"); n == "" {
		return "."
	}
	return n
}

func (u *unpacker) entry(ctx context.Context, tr *tar.Reader, h *tar.Header, name string) error {
	if u.o.OnEntry != nil {
		u.o.OnEntry(name, h.Size)
	}
	u.res.Entries++
	if h.Typeflag == tar.TypeDir {
		return u.dir(h, name)
	}
	if name == "." {
		return errors.New("the root of a tree is a directory")
	}
	if err := u.root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	if err := u.clear(name); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg:
		if err := u.file(ctx, tr, name); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if err := u.root.Symlink(h.Linkname, name); err != nil {
			return err
		}
	case tar.TypeLink:
		return u.root.Link(below(h.Linkname), name)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		made, err := u.node(h, name)
		if err != nil {
			return err
		}
		if !made {
			u.res.Skipped = append(u.res.Skipped, name)
			return nil
		}
	default:
		u.res.Skipped = append(u.res.Skipped, name)
		return nil
	}
	return u.meta(h, name)
}

func (u *unpacker) dir(h *tar.Header, name string) error {
	if name != "." {
		fi, err := u.root.Lstat(name)
		if err == nil && !fi.IsDir() {
			err = u.clear(name)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := u.root.MkdirAll(name, 0o755); err != nil {
			return err
		}
	}
	u.dirs = append(u.dirs, struct {
		h    *tar.Header
		name string
	}{h, name})
	return nil
}

// clear makes way for an entry; a directory in its place is the user's to remove.
func (u *unpacker) clear(name string) error {
	fi, err := u.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case fi.IsDir():
		return &fs.PathError{Op: "replace", Path: name, Err: unix.EISDIR}
	}
	return u.root.Remove(name)
}

func (u *unpacker) file(ctx context.Context, tr *tar.Reader, name string) error {
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	var size int64
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := tr.Read(u.buf)
		switch {
		case n > 0 && zero(u.buf[:n]):
			// Left as a hole: a sparse file's header may promise more than the disk has.
			if _, err := f.Seek(int64(n), io.SeekCurrent); err != nil {
				return err
			}
		case n > 0:
			if _, err := f.Write(u.buf[:n]); err != nil {
				return err
			}
		}
		size += int64(n)
		u.res.Bytes += int64(n)
		if err == io.EOF {
			if err := f.Truncate(size); err != nil {
				return err
			}
			return f.Close()
		}
		if err != nil {
			return err
		}
	}
}

// zero says whether b holds nothing but zeros.
func zero(b []byte) bool {
	return len(b) > 0 && b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1])
}

// node makes a device or fifo through the directory's descriptor, as os.Root cannot.
func (u *unpacker) node(h *tar.Header, name string) (bool, error) {
	mode, dev := uint32(unix.S_IFIFO), uint64(0)
	if h.Typeflag != tar.TypeFifo {
		if !u.o.KeepOwner {
			return false, nil
		}
		mode, dev = unix.S_IFCHR, unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))
		if h.Typeflag == tar.TypeBlock {
			mode = unix.S_IFBLK
		}
	}
	d, err := u.root.Open(path.Dir(name))
	if err != nil {
		return false, err
	}
	defer d.Close()
	if err := unix.Mknodat(int(d.Fd()), path.Base(name), mode|0o600, int(dev)); err != nil {
		if errors.Is(err, unix.EPERM) {
			return false, nil
		}
		return false, &fs.PathError{Op: "mknod", Path: name, Err: err}
	}
	return true, nil
}

func (u *unpacker) meta(h *tar.Header, name string) error {
	if u.o.KeepOwner {
		if err := u.root.Lchown(name, h.Uid, h.Gid); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeSymlink {
		return nil
	}
	mode := fs.FileMode(h.Mode & 0o777)
	for bit, m := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		// Bits that lend an owner's rights mean nothing, or harm, without that owner.
		if h.Mode&bit != 0 && (u.o.KeepOwner || bit == 0o1000) {
			mode |= m
		}
	}
	if err := u.root.Chmod(name, mode); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeReg || h.Typeflag == tar.TypeDir {
		if err := u.setXattrs(h, name); err != nil {
			return err
		}
	}
	mtime := h.ModTime
	if mtime.IsZero() {
		mtime = time.Unix(0, 0)
	}
	return u.root.Chtimes(name, mtime, mtime)
}

func (u *unpacker) setXattrs(h *tar.Header, name string) error {
	for k, v := range h.PAXRecords {
		attr, ok := strings.CutPrefix(k, xattrPrefix)
		if !ok || !u.o.KeepOwner && !strings.HasPrefix(attr, "user.") {
			continue
		}
		f, err := u.root.Open(name)
		if err != nil {
			return err
		}
		err = unix.Fsetxattr(int(f.Fd()), attr, []byte(v), 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.EPERM) {
			return &fs.PathError{Op: "setxattr " + attr, Path: name, Err: err}
		}
	}
	return nil
}
