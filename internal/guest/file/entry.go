package file

import (
	"strings"
	"syscall"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// Type is what an entry is.
type Type int

// Types, numbered as on the wire.
const (
	TypeFile      Type = 1
	TypeDirectory Type = 2
	TypeSymlink   Type = 3
	TypeOther     Type = 4
)

// Entry describes one file, directory or link.
type Entry struct {
	Name        string
	Type        Type
	Path        string
	Size        int64
	Mode        uint32 // st_mode
	Permissions string
	Owner       string
	Group       string
	UID, GID    uint32
	ModifiedNS  int64
	Target      string // of a symbolic link
	Metadata    map[string]string
}

// Stat describes path. Without noFollow a link stands for what it points to; its target
// is reported all the same.
func (fs *FS) Stat(path, user string, noFollow bool) (*Entry, error) {
	w, err := fs.resolve(path, user)
	if err != nil {
		return nil, err
	}
	var e *Entry
	err = w.Do(func() error {
		e, err = fs.stat(w.path, noFollow)
		return err
	})
	return e, err
}

func (fs *FS) stat(path string, noFollow bool) (*Entry, error) {
	flags := unix.O_PATH
	if noFollow {
		flags |= unix.O_NOFOLLOW
	}
	fd, err := open(unix.AT_FDCWD, path, flags, 0, 0)
	if err != nil {
		return nil, fail("stat", path, err)
	}
	defer unix.Close(fd)
	e, err := fs.entry(fd, path)
	if err == nil && !noFollow {
		e.Target, _ = readlink(unix.AT_FDCWD, path)
	}
	return e, err
}

// entry describes what fd names.
func (fs *FS) entry(fd int, path string) (*Entry, error) {
	var st syscall.Stat_t
	if err := fstat(fd, &st); err != nil {
		return nil, fail("stat", path, err)
	}
	e := fs.fromStat(&st, path)
	switch e.Type {
	case TypeSymlink:
		e.Target, _ = readlink(fd, "")
	case TypeFile, TypeDirectory:
		e.Metadata = metadata(fd)
	}
	return e, nil
}

func fstat(fd int, st *syscall.Stat_t) error { return syscall.Fstat(fd, st) }

func (fs *FS) fromStat(st *syscall.Stat_t, path string) *Entry {
	e := &Entry{
		Name: path[strings.LastIndexByte(path, '/')+1:], Path: path, Size: st.Size, Mode: st.Mode,
		Permissions: permissions(st.Mode), UID: st.Uid, GID: st.Gid, ModifiedNS: st.Mtim.Nano(),
	}
	if e.Name == "" {
		e.Name = "/"
	}
	e.Owner, e.Group = fs.Users.Names(st.Uid, st.Gid)
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		e.Type = TypeFile
	case syscall.S_IFDIR:
		e.Type = TypeDirectory
	case syscall.S_IFLNK:
		e.Type = TypeSymlink
	default:
		e.Type = TypeOther
	}
	return e
}

func readlink(dir int, path string) (string, error) {
	var buf [4096]byte
	n, err := unix.Readlinkat(dir, path, buf[:])
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// permissions renders a mode as ls does.
func permissions(mode uint32) string {
	b := []byte("?rwxrwxrwx")
	switch mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		b[0] = '-'
	case syscall.S_IFDIR:
		b[0] = 'd'
	case syscall.S_IFLNK:
		b[0] = 'l'
	case syscall.S_IFIFO:
		b[0] = 'p'
	case syscall.S_IFSOCK:
		b[0] = 's'
	case syscall.S_IFCHR:
		b[0] = 'c'
	case syscall.S_IFBLK:
		b[0] = 'b'
	}
	for i := range 9 {
		if mode&(1<<(8-i)) == 0 {
			b[1+i] = '-'
		}
	}
	special := func(i int, bit uint32, with, without byte) {
		if mode&bit == 0 {
			return
		}
		if b[i] == 'x' {
			b[i] = with
		} else {
			b[i] = without
		}
	}
	special(3, syscall.S_ISUID, 's', 'S')
	special(6, syscall.S_ISGID, 's', 'S')
	special(9, syscall.S_ISVTX, 't', 'T')
	return string(b)
}

// metaPrefix is where the metadata of a file is kept among its attributes.
const metaPrefix = "user.dsec."

// Bounds of metadata, as E2B has them.
const (
	maxMetaKey   = 246
	maxMetaTotal = 4096
)

// metadata reads the attributes that setMetadata wrote. fd may be an O_PATH one.
func metadata(fd int) map[string]string {
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
		key, ok := strings.CutPrefix(name, metaPrefix)
		if !ok {
			continue
		}
		var buf [maxMetaTotal]byte
		n, err := unix.Getxattr(self, name, buf[:])
		if err != nil {
			continue
		}
		if m == nil {
			m = map[string]string{}
		}
		m[key] = string(buf[:n])
	}
	return m
}

// checkMetadata validates m and returns it with lower-case keys.
func checkMetadata(m map[string]string) (map[string]string, error) {
	if len(m) == 0 {
		return nil, nil
	}
	total := 0
	out := make(map[string]string, len(m))
	for k, v := range m {
		total += len(k) + len(v)
		if k == "" || len(k) > maxMetaKey || !printable(k) || !printable(v) {
			return nil, errs.New(errs.BadRequest, phase, "metadata: keys (1 to 246 bytes) and values must be printable ASCII")
		}
		out[strings.ToLower(k)] = v
	}
	if total > maxMetaTotal {
		return nil, errs.New(errs.BodyTooLarge, phase, "metadata is longer than 4096 bytes")
	}
	return out, nil
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// setMetadata makes m the metadata of the open file fd, replacing what it had.
func setMetadata(fd int, m map[string]string) error {
	for k := range metadata(fd) {
		if _, keep := m[k]; !keep {
			unix.Fremovexattr(fd, metaPrefix+k)
		}
	}
	for k, v := range m {
		if err := unix.Fsetxattr(fd, metaPrefix+k, []byte(v), 0); err != nil {
			return err
		}
	}
	return nil
}
