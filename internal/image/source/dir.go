package source

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sort"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// dirReader walks a directory by descriptors, so that neither long paths nor
// someone renaming directories meanwhile lead it astray. It stays on one file
// system: what is mounted below is an empty directory in the image.
type dirReader struct {
	b     *layer.Builder
	dev   uint64
	links map[[2]uint64]string // files with several names: (dev, ino) to the first
	xbuf  []byte
}

func readDir(ctx context.Context, dir string, b *layer.Builder) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return errs.Wrap(errs.BadRequest, phase, "open directory "+dir, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return errs.Wrap(errs.BadRequest, phase, "stat "+dir, err)
	}
	r := &dirReader{b: b, dev: st.Dev, links: map[[2]uint64]string{}, xbuf: make([]byte, 64<<10)}
	return r.dir(ctx, fd, "", &st)
}

// dir reads the directory fd, which it closes.
func (r *dirReader) dir(ctx context.Context, fd int, path string, st *unix.Stat_t) error {
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	a, err := r.attr(path, st, fd, "")
	if err != nil {
		return err
	}
	if err := r.b.Dir(path, a); err != nil {
		return err
	}
	if st.Dev != r.dev {
		r.b.Skip("content of a mount point")
		return nil
	}
	names, err := f.Readdirnames(-1)
	if err != nil {
		return changed(path, "list directory", err)
	}
	sort.Strings(names)
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, phase, "read directory", err)
		}
		if err := r.entry(ctx, fd, name, path+"/"+name); err != nil {
			return err
		}
	}
	return nil
}

func (r *dirReader) entry(ctx context.Context, dir int, name, path string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return changed(path, "stat", err)
	}
	typ := st.Mode & unix.S_IFMT
	if typ != unix.S_IFDIR && st.Nlink > 1 {
		key := [2]uint64{st.Dev, st.Ino}
		if first, ok := r.links[key]; ok {
			return r.b.Link(path, first)
		}
		r.links[key] = path
	}
	switch typ {
	case unix.S_IFDIR, unix.S_IFREG:
		// O_NONBLOCK: should it have become a fifo meanwhile, open does not wait.
		fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return changed(path, "open", err)
		}
		was := st
		if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != typ || st.Ino != was.Ino {
			unix.Close(fd)
			return changed(path, "open", errors.Join(err, errors.New("it was replaced while the import ran")))
		}
		if typ == unix.S_IFDIR {
			return r.dir(ctx, fd, path, &st)
		}
		return r.file(ctx, fd, path, &st)
	}
	a, err := r.attr(path, &st, -1, fmt.Sprintf("/proc/self/fd/%d/%s", dir, name))
	if err != nil {
		return err
	}
	if typ == unix.S_IFLNK {
		buf := make([]byte, 4097)
		n, err := unix.Readlinkat(dir, name, buf)
		if err != nil {
			return changed(path, "read symlink", err)
		}
		return r.b.Symlink(path, string(buf[:n]), a)
	}
	return r.b.Special(path, typ, unix.Major(st.Rdev), unix.Minor(st.Rdev), a)
}

// file reads the regular file fd, which it closes.
func (r *dirReader) file(ctx context.Context, fd int, path string, st *unix.Stat_t) error {
	defer unix.Close(fd)
	a, err := r.attr(path, st, fd, "")
	if err != nil {
		return err
	}
	return r.b.File(ctx, path, a, st.Size, layer.FileReader(fd, st))
}

func (r *dirReader) attr(path string, st *unix.Stat_t, fd int, link string) (layer.Attr, error) {
	a := layer.Attr{Perm: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid, Sec: st.Mtim.Sec, Nsec: uint32(st.Mtim.Nsec)}
	var n int
	var err error
	if fd >= 0 {
		n, err = unix.Flistxattr(fd, r.xbuf)
	} else {
		n, err = unix.Llistxattr(link, r.xbuf)
	}
	if errors.Is(err, unix.ENOTSUP) || n == 0 && err == nil {
		return a, nil
	}
	if err != nil {
		return a, changed(path, "list xattrs", err)
	}
	for _, name := range strings.Split(strings.TrimRight(string(r.xbuf[:n]), "\x00"), "\x00") {
		buf := make([]byte, 64<<10)
		if fd >= 0 {
			n, err = unix.Fgetxattr(fd, name, buf)
		} else {
			n, err = unix.Lgetxattr(link, name, buf)
		}
		if err != nil {
			return a, changed(path, "read xattr "+name, err)
		}
		a.Xattrs = append(a.Xattrs, layer.Xattr{Name: name, Value: append([]byte(nil), buf[:n]...)})
	}
	return a, nil
}

// changed types what goes wrong while reading a directory that exists.
func changed(path, action string, err error) error {
	return errs.Wrap(errs.ImageCorrupt, phase, action+" "+fmt.Sprintf("%q", path), err)
}
