package treetar

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// xattrPrefix is where the PAX format of other tools keeps extended attributes.
const xattrPrefix = "SCHILY.xattr."

// PackOptions changes what Pack writes.
type PackOptions struct {
	// Prefix is put before every name; empty: names are relative to the tree's root,
	// which is itself "./".
	Prefix string
	// OnEntry is told of each entry before its contents.
	OnEntry func(name string, size int64)
}

type inode struct{ dev, ino uint64 }

// Pack writes the tree at path (a directory or a single file) as a tar to w.
func Pack(ctx context.Context, w io.Writer, path string, o PackOptions) error {
	tw := tar.NewWriter(w)
	p := packer{tw: tw, o: o, linked: map[inode]string{}, buf: make([]byte, 256<<10)}
	err := filepath.WalkDir(path, func(file string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(path, file)
		if err != nil {
			return err
		}
		return p.add(ctx, file, p.name(rel))
	})
	if err != nil {
		return fmt.Errorf("pack %s: %w", path, err)
	}
	if err := tw.Close(); err != nil {
		return fmt.Errorf("pack %s: %w", path, err)
	}
	return nil
}

type packer struct {
	tw     *tar.Writer
	o      PackOptions
	linked map[inode]string // names of files with several links, by first sight
	buf    []byte
}

func (p *packer) name(rel string) string {
	switch {
	case p.o.Prefix != "" && rel == ".":
		return p.o.Prefix
	case p.o.Prefix != "":
		return p.o.Prefix + "/" + rel
	case rel == ".":
		return "."
	}
	return "./" + rel
}

func (p *packer) add(ctx context.Context, file, name string) error {
	var st unix.Stat_t
	if err := unix.Lstat(file, &st); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil // removed since its directory was read
		}
		return &fs.PathError{Op: "lstat", Path: file, Err: err}
	}
	h := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX,
	}
	var err error
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
		if st.Nlink > 1 {
			id := inode{st.Dev, st.Ino}
			if first, ok := p.linked[id]; ok {
				h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			} else {
				p.linked[id] = name
			}
		}
	case unix.S_IFDIR:
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		h.Linkname, err = os.Readlink(file)
	case unix.S_IFCHR:
		h.Typeflag, h.Devmajor, h.Devminor = tar.TypeChar, int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	case unix.S_IFBLK:
		h.Typeflag, h.Devmajor, h.Devminor = tar.TypeBlock, int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	default:
		return nil // a socket: it means nothing without the process behind it
	}
	if err != nil {
		return err
	}
	if h.Typeflag == tar.TypeReg || h.Typeflag == tar.TypeDir {
		if h.PAXRecords, err = xattrs(file); err != nil {
			return err
		}
	}
	if p.o.OnEntry != nil {
		p.o.OnEntry(name, h.Size)
	}
	if h.Typeflag != tar.TypeReg {
		return p.tw.WriteHeader(h)
	}
	return p.addFile(ctx, file, h)
}

func (p *packer) addFile(ctx context.Context, file string, h *tar.Header) error {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	// The size may have changed since lstat; the one that counts is the open file's.
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	h.Size = fi.Size()
	if err := p.tw.WriteHeader(h); err != nil {
		return err
	}
	for left := h.Size; left > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := f.Read(p.buf[:min(left, int64(len(p.buf)))])
		if n > 0 {
			if _, err := p.tw.Write(p.buf[:n]); err != nil {
				return err
			}
			left -= int64(n)
		}
		if err == io.EOF && left > 0 {
			return fmt.Errorf("%s shrank while it was read", file)
		}
		if err != nil && err != io.EOF {
			return err
		}
	}
	return nil
}

func xattrs(file string) (map[string]string, error) {
	n, err := unix.Llistxattr(file, nil)
	if err != nil || n == 0 {
		if errors.Is(err, unix.ENOTSUP) {
			err = nil
		}
		return nil, err
	}
	names := make([]byte, n)
	if n, err = unix.Llistxattr(file, names); err != nil {
		return nil, &fs.PathError{Op: "listxattr", Path: file, Err: err}
	}
	out := map[string]string{}
	for _, name := range strings.Split(strings.TrimRight(string(names[:n]), "\x00"), "\x00") {
		size, err := unix.Lgetxattr(file, name, nil)
		if err != nil {
			continue // gone meanwhile, or of a namespace that we may list but not read
		}
		v := make([]byte, size)
		if size, err = unix.Lgetxattr(file, name, v); err == nil {
			out[xattrPrefix+name] = string(v[:size])
		}
	}
	return out, nil
}
