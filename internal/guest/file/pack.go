package file

import (
	"io"
	"slices"
	"strings"
	"syscall"

	"dsec/internal/guest/tarball"

	"golang.org/x/sys/unix"
)

// copyBuffer is what moves between a file and a stream at once.
const copyBuffer = 256 << 10

// Pack writes what path names to w as a tar: a file, link or whole tree under its own
// name, or with contents the tree's entries without it. Modes, owners, times, links,
// hard links and attributes are kept; devices and sockets are left out. A file that
// shrinks meanwhile is filled up with zeros to the size it had.
//
// f runs on one thread as the user: w must not need another identity.
func (fs *FS) Pack(w io.Writer, path, user string, contents bool) (entries, bytes uint64, err error) {
	who, err := fs.resolve(path, user)
	if err != nil {
		return 0, 0, err
	}
	p := packer{t: tarball.NewWriter(w), buf: make([]byte, copyBuffer)}
	err = who.Do(func() error {
		flags := unix.O_PATH
		base := who.path[strings.LastIndexByte(who.path, '/')+1:]
		if !contents && base != "" {
			flags |= unix.O_NOFOLLOW // a link is packed as one
		}
		fd, err := open(unix.AT_FDCWD, who.path, flags, 0, 0)
		if err != nil {
			return fail("open", who.path, err)
		}
		defer unix.Close(fd)
		if contents || base == "" {
			return p.below(fd, "", 0)
		}
		return p.one(fd, base, 0)
	})
	if err != nil {
		return p.entries, p.bytes, err
	}
	return p.entries, p.bytes, p.t.Close()
}

type inode struct{ dev, ino uint64 }

type packer struct {
	t              *tarball.Writer
	buf            []byte
	links          map[inode]string // first name of files with several
	entries, bytes uint64
}

// one packs what the O_PATH descriptor fd names.
func (p *packer) one(fd int, name string, depth int) error {
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return fail("stat", name, err)
	}
	h := &tarball.Header{
		Name: name, Mode: st.Mode & 0o7777, UID: int64(st.Uid), GID: int64(st.Gid),
		MTimeSec: st.Mtim.Sec, MTimeNS: int32(st.Mtim.Nsec),
	}
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		h.Kind, h.Name, h.Xattrs = tarball.Directory, name+"/", xattrs(fd)
	case syscall.S_IFREG:
		return p.file(fd, h, &st)
	case syscall.S_IFLNK:
		target, err := readlink(fd, "")
		if err != nil {
			return fail("read the link", name, err)
		}
		h.Kind, h.Link = tarball.Symlink, target
	case syscall.S_IFIFO:
		h.Kind = tarball.FIFO
	default: // a device or socket
		return nil
	}
	if err := p.t.WriteHeader(h); err != nil {
		return err
	}
	p.entries++
	if h.Kind == tarball.Directory {
		return p.below(fd, h.Name, depth+1)
	}
	return nil
}

// below packs the entries of a directory, whose names start with prefix.
func (p *packer) below(fd int, prefix string, depth int) error {
	if depth > maxDepth {
		return fail("pack", prefix, unix.ELOOP)
	}
	dir, err := open(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0, unix.RESOLVE_BENEATH)
	if err != nil {
		return fail("open directory", prefix, err)
	}
	defer unix.Close(dir)
	names, err := readNames(dir)
	if err != nil {
		return fail("list", prefix, err)
	}
	slices.Sort(names)
	for _, name := range names {
		sub, err := open(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0, unix.RESOLVE_BENEATH)
		if err == unix.ENOENT {
			continue // gone since
		}
		if err != nil {
			return fail("open", prefix+name, err)
		}
		err = p.one(sub, prefix+name, depth)
		unix.Close(sub)
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) file(fd int, h *tarball.Header, st *syscall.Stat_t) error {
	if st.Nlink > 1 {
		id := inode{uint64(st.Dev), st.Ino}
		if first, ok := p.links[id]; ok {
			h.Kind, h.Link = tarball.HardLink, first
			p.entries++
			return p.t.WriteHeader(h)
		}
		if p.links == nil {
			p.links = map[inode]string{}
		}
		p.links[id] = h.Name
	}
	h.Kind, h.Size, h.Xattrs = tarball.Regular, st.Size, xattrs(fd)
	// Opened anew for reading, through the descriptor: the name may mean another
	// file by now. The kernel checks the permission again.
	r, err := unix.Open(fdPath(fd), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return fail("open", h.Name, err)
	}
	defer unix.Close(r)
	if err := p.t.WriteHeader(h); err != nil {
		return err
	}
	p.entries++
	for off := int64(0); off < h.Size; {
		b := p.buf[:min(int64(len(p.buf)), h.Size-off)]
		n, err := syscall.Pread(r, b, off)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return fail("read", h.Name, err)
		}
		if n == 0 {
			n = len(b)
			clear(b)
		}
		if _, err := p.t.Write(b[:n]); err != nil {
			return err
		}
		off += int64(n)
		p.bytes += uint64(n)
	}
	return nil
}

// xattrs reads the attributes that a tar carries. fd may be an O_PATH one.
func xattrs(fd int) map[string]string {
	self := fdPath(fd)
	n, err := unix.Listxattr(self, nil)
	if err != nil || n == 0 {
		return nil
	}
	names := make([]byte, n)
	if n, err = unix.Listxattr(self, names); err != nil {
		return nil
	}
	var m map[string]string
	for name := range strings.SplitSeq(string(names[:n]), "\x00") {
		if !carried(name) {
			continue
		}
		size, err := unix.Getxattr(self, name, nil)
		if err != nil || size > 64<<10 {
			continue
		}
		value := make([]byte, size)
		if size, err = unix.Getxattr(self, name, value); err != nil {
			continue
		}
		if m == nil {
			m = map[string]string{}
		}
		m[name] = string(value[:size])
	}
	return m
}

// carried says which attributes are part of a tree; the others belong to the machine.
func carried(name string) bool {
	return strings.HasPrefix(name, "user.") || name == "security.capability" || strings.HasPrefix(name, "system.posix_acl_")
}
