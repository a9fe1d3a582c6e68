package snapshot

import (
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"sort"
	"strings"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// openDirs is how many directories of one walk are open at once, however deep it is.
const openDirs = 256

// dir is a directory of the tree that is read. It is always reached by descriptors, one
// name at a time, and known by its inode: what is renamed or replaced meanwhile is noticed.
type dir struct {
	parent *dir // nil: a root, which stays open
	name   string
	layer  int // which of the trees, 0 the lowest
	ino    uint64
	fd     int
	open   *list.Element
}

// path is for messages.
func (d *dir) path() string {
	var names []string
	for ; d.parent != nil; d = d.parent {
		names = append(names, d.name)
	}
	var b strings.Builder
	for i := len(names) - 1; i >= 0; i-- {
		b.WriteString("/" + names[i])
	}
	return b.String()
}

// dirs keeps a bounded number of directories open, the last used ones.
type dirs struct {
	roots []*dir
	open  list.List
	buf   []byte
}

func newDirs() *dirs { return &dirs{buf: make([]byte, 64<<10)} }

func (s *dirs) close() {
	for e := s.open.Front(); e != nil; e = e.Next() {
		unix.Close(e.Value.(*dir).fd)
	}
	for _, r := range s.roots {
		unix.Close(r.fd)
	}
}

// root opens the tree whose root directory fd is (O_PATH is enough), through a mount of its
// own that is read-only and follows no symlink and opens no device. That is a second lock:
// every single open refuses to leave the tree anyway, so a kernel that cannot clone a detached
// mount (before 6.15) is no obstacle.
func (s *dirs) root(fd int) (*dir, error) {
	const attrs = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NOSYMFOLLOW
	at := fd
	if m, err := unix.OpenTree(fd, "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC); err == nil {
		defer unix.Close(m)
		if err := unix.MountSetattr(m, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: attrs}); err == nil {
			at = m
		}
	}
	dfd, err := unix.Openat(at, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "open the tree's root", err)
	}
	d := &dir{fd: dfd, layer: len(s.roots)}
	s.roots = append(s.roots, d)
	var st unix.Stat_t
	if err := unix.Fstat(dfd, &st); err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "stat the tree's root", err)
	}
	d.ino = st.Ino
	return d, nil
}

// fd returns the descriptor of d, which is good until the next call.
func (s *dirs) fd(d *dir) (int, error) {
	var chain []*dir // those to be opened, deepest first
	a := d
	for ; a.fd < 0; a = a.parent {
		chain = append(chain, a)
	}
	if a.open != nil {
		s.open.MoveToFront(a.open)
	}
	for i := len(chain) - 1; i >= 0; i-- {
		c := chain[i]
		fd, err := openBelow(c.parent.fd, c.name, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return -1, err
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || c.ino != 0 && st.Ino != c.ino {
			unix.Close(fd)
			return -1, errors.Join(err, errReplaced)
		}
		c.ino = st.Ino
		s.keep(c, fd)
	}
	return d.fd, nil
}

func (s *dirs) keep(d *dir, fd int) {
	d.fd = fd
	d.open = s.open.PushFront(d)
	if s.open.Len() > openDirs {
		s.drop(s.open.Back().Value.(*dir))
	}
}

// drop closes d until it is needed again.
func (s *dirs) drop(d *dir) {
	if d.open != nil {
		unix.Close(d.fd)
		s.open.Remove(d.open)
		d.fd, d.open = -1, nil
	}
}

func child(parent *dir, name string) *dir {
	return &dir{parent: parent, name: name, layer: parent.layer, fd: -1}
}

// errReplaced: another file has the name now.
var errReplaced = errors.New("it was replaced meanwhile")

// openBelow opens a name of a directory: never another file system's, nor what a link says.
// O_NONBLOCK: should it have become a fifo meanwhile, open does not wait.
func openBelow(dirfd int, name string, flags uint64) (int, error) {
	how := &unix.OpenHow{
		Flags:   flags | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	if flags&unix.O_PATH == 0 {
		how.Flags |= unix.O_NONBLOCK | unix.O_LARGEFILE
	}
	for {
		fd, err := unix.Openat2(dirfd, name, how)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// item is a name in a directory; typ is its S_IF bits.
type item struct {
	name string
	typ  uint32
}

// list reads the names of d, sorted by bytes.
func (s *dirs) list(d *dir) ([]item, error) {
	fd, err := s.fd(d)
	if err != nil {
		return nil, err
	}
	if _, err := unix.Seek(fd, 0, unix.SEEK_SET); err != nil {
		return nil, err
	}
	var items []item
	for len(items) < maxScan { // else a limit refuses it, and while the sandbox runs it could grow without end
		n, err := unix.Getdents(fd, s.buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
		if items, err = parseDirents(items, s.buf[:n]); err != nil {
			return nil, err
		}
	}
	for i := range items {
		if items[i].typ == 0 { // a file system that does not tell
			var st unix.Stat_t
			if err := unix.Fstatat(fd, items[i].name, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil {
				items[i].typ = st.Mode & unix.S_IFMT
			}
		}
	}
	sort.Slice(items, func(i, j int) bool { return items[i].name < items[j].name })
	return items, nil
}

// parseDirents reads what getdents64 wrote: inode, offset, length, type, name and zeros.
func parseDirents(items []item, p []byte) ([]item, error) {
	const head = 19
	for len(p) > 0 {
		if len(p) < head {
			return items, fmt.Errorf("directory entry of %d bytes", len(p))
		}
		size := int(binary.NativeEndian.Uint16(p[16:]))
		if size < head || size > len(p) {
			return items, fmt.Errorf("directory entry of %d bytes", size)
		}
		name := p[head:size]
		for i, c := range name {
			if c == 0 {
				name = name[:i]
				break
			}
		}
		if s := string(name); s != "." && s != ".." {
			items = append(items, item{s, uint32(p[18]) << 12}) // DT_* are the S_IF bits, shifted
		}
		p = p[size:]
	}
	return items, nil
}
