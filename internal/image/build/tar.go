package build

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// writeTar writes the tree at root as a tar with numeric owners, xattrs, devices
// and hard links, sorted by name.
func writeTar(ctx context.Context, root string, out io.Writer) error {
	return (&tarWriter{tw: tar.NewWriter(out), links: map[[2]uint64]string{}}).write(ctx, root)
}

// writeTree is writeTar of what is in the tree, without its root.
func writeTree(ctx context.Context, root string, out io.Writer) error {
	return (&tarWriter{tw: tar.NewWriter(out), links: map[[2]uint64]string{}, bare: true}).write(ctx, root)
}

func (t *tarWriter) write(ctx context.Context, root string) error {
	if err := t.walk(ctx, root, "."); err != nil {
		return errs.Wrap(errs.InternalError, phase, "write tar", err)
	}
	if err := t.tw.Close(); err != nil {
		return errs.Wrap(errs.InternalError, phase, "write tar", err)
	}
	return nil
}

type tarWriter struct {
	tw    *tar.Writer
	links map[[2]uint64]string
	bare  bool // no entry for the root
}

func (t *tarWriter) walk(ctx context.Context, dir, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if name != "." || !t.bare {
		if err := t.entry(dir, name); err != nil {
			return err
		}
	}
	list, err := os.ReadDir(dir) // sorted
	if err != nil {
		return err
	}
	for _, e := range list {
		p, n := dir+"/"+e.Name(), name+"/"+e.Name()
		if e.IsDir() {
			err = t.walk(ctx, p, n)
		} else {
			err = t.entry(p, n)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *tarWriter) entry(p, name string) error {
	var st unix.Stat_t
	if err := unix.Lstat(p, &st); err != nil {
		return fmt.Errorf("stat %s: %w", name, err)
	}
	h := &tar.Header{
		Format: tar.FormatPAX, Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Sec, st.Mtim.Nsec), PAXRecords: map[string]string{},
	}
	typ := st.Mode & unix.S_IFMT
	if typ != unix.S_IFDIR && st.Nlink > 1 {
		key := [2]uint64{st.Dev, st.Ino}
		if first, ok := t.links[key]; ok {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return t.tw.WriteHeader(h)
		}
		t.links[key] = name
	}
	if err := xattrs(p, h); err != nil {
		return fmt.Errorf("xattrs of %s: %w", name, err)
	}
	switch typ {
	case unix.S_IFDIR:
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case unix.S_IFREG:
		return t.file(p, h)
	case unix.S_IFLNK:
		target, err := os.Readlink(p)
		if err != nil {
			return err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, target
	case unix.S_IFCHR:
		h.Typeflag = tar.TypeChar
	case unix.S_IFBLK:
		h.Typeflag = tar.TypeBlock
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	default:
		return nil // a socket means nothing without its process
	}
	if typ == unix.S_IFCHR || typ == unix.S_IFBLK {
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	}
	return t.tw.WriteHeader(h)
}

func (t *tarWriter) file(p string, h *tar.Header) error {
	f, err := os.Open(p)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	h.Typeflag, h.Size = tar.TypeReg, st.Size()
	if err := t.tw.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(t.tw, f)
	return err
}

func xattrs(p string, h *tar.Header) error {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(p, buf)
	if err == unix.ENOTSUP || n == 0 && err == nil {
		return nil
	}
	if err != nil {
		return err
	}
	for _, name := range strings.Split(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
		n, err := unix.Lgetxattr(p, name, buf)
		if err != nil {
			return err
		}
		h.PAXRecords["SCHILY.xattr."+name] = string(buf[:n])
	}
	return nil
}
