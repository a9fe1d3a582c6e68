package user

import (
	"io"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"dsec/api/v1/errs"
)

// maxDatabase bounds what is read of one database file.
const maxDatabase = 4 << 20

// User is one resolved identity.
type User struct {
	Name   string // as in passwd; the number where passwd does not name it
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary
	Home   string
	Shell  string
}

// Root reports whether u acts with the guest's own file permissions.
func (u *User) Root() bool { return u.UID == 0 && u.GID == 0 }

// Database reads users below a root directory. It keeps the answers until one of the
// files changes.
type Database struct {
	passwd, group string

	mu    sync.Mutex
	stamp [2]stamp
	cache map[string]*User
	names map[uint64]string
}

// stamp tells whether a file is still the one that was read.
type stamp struct {
	dev, ino   uint64
	size       int64
	mtim, ctim syscall.Timespec
}

// NewDatabase returns the database of the system below root ("" is "/").
func NewDatabase(root string) *Database {
	return &Database{passwd: root + "/etc/passwd", group: root + "/etc/group"}
}

func stampOf(path string) stamp {
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return stamp{}
	}
	return stamp{uint64(st.Dev), st.Ino, st.Size, st.Mtim, st.Ctim}
}

// refresh forgets what was read from files that have changed since. d.mu is held.
func (d *Database) refresh() {
	now := [2]stamp{stampOf(d.passwd), stampOf(d.group)}
	if now != d.stamp {
		d.stamp, d.cache, d.names = now, nil, nil
	}
}

// Lookup resolves "name", "uid", "name:group" or "uid:gid", each part by name or number.
// A number needs no entry. Errors: errs.UserNotFound.
func (d *Database) Lookup(spec string) (*User, error) {
	if spec == "" {
		spec = "0"
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refresh()
	if u, ok := d.cache[spec]; ok {
		return u, nil
	}
	u, err := d.resolve(spec)
	if err != nil {
		return nil, err
	}
	if d.cache == nil || len(d.cache) >= 64 {
		d.cache = map[string]*User{}
	}
	d.cache[spec] = u
	return u, nil
}

func (d *Database) resolve(spec string) (*User, error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	u := &User{Home: "/"}
	uid, numErr := strconv.ParseUint(name, 10, 32)
	numeric := numErr == nil
	found := false
	eachLine(d.passwd, func(f []string) bool {
		if len(f) < 7 {
			return true
		}
		id, err1 := strconv.ParseUint(f[2], 10, 32)
		gid, err2 := strconv.ParseUint(f[3], 10, 32)
		if err1 != nil || err2 != nil || f[0] != name && (!numeric || id != uid || found) {
			return true
		}
		*u = User{Name: f[0], UID: uint32(id), GID: uint32(gid), Home: f[5], Shell: f[6]}
		found = true
		return f[0] != name // a user whose name is the number wins over its id
	})
	switch {
	case found:
	case numeric && uid != 1<<32-1:
		u.Name, u.UID, u.GID = strconv.FormatUint(uid, 10), uint32(uid), uint32(uid)
		if uid == 0 {
			u.Name, u.Home = "root", "/root"
		}
	case name == "root": // an image from scratch has no passwd
		u.Name, u.Home = "root", "/root"
	default:
		return nil, errs.New(errs.UserNotFound, "guest.user", "no user "+strconv.Quote(name)+" in the sandbox's /etc/passwd")
	}
	if u.Home == "" {
		u.Home = "/"
	}
	gid, gidErr := strconv.ParseUint(group, 10, 32)
	groupFound := false
	eachLine(d.group, func(f []string) bool {
		if len(f) < 4 {
			return true
		}
		id, err := strconv.ParseUint(f[2], 10, 32)
		if err != nil {
			return true
		}
		if hasGroup && f[0] == group {
			gid, groupFound = id, true
		}
		for m := range strings.SplitSeq(f[3], ",") {
			if m == u.Name && len(u.Groups) < 256 {
				u.Groups = append(u.Groups, uint32(id))
				break
			}
		}
		return true
	})
	if hasGroup {
		if !groupFound && gidErr != nil {
			return nil, errs.New(errs.UserNotFound, "guest.user", "no group "+strconv.Quote(group)+" in the sandbox's /etc/group")
		}
		// A group that was asked for stands alone, as with docker's --user.
		u.GID, u.Groups = uint32(gid), nil
	}
	return u, nil
}

// Names returns the user and group names of a pair of ids, the numbers where there are none.
func (d *Database) Names(uid, gid uint32) (owner, group string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refresh()
	return d.nameOf(d.passwd, uid, 0), d.nameOf(d.group, gid, 1<<32)
}

// nameOf looks id up in the third field of file. kind keeps users and groups apart in the cache.
func (d *Database) nameOf(file string, id uint32, kind uint64) string {
	key := kind | uint64(id)
	if n, ok := d.names[key]; ok {
		return n
	}
	num := strconv.FormatUint(uint64(id), 10)
	name := num
	eachLine(file, func(f []string) bool {
		if len(f) < 4 || f[2] != num || f[0] == "" {
			return true
		}
		name = f[0]
		return false
	})
	if d.names == nil || len(d.names) >= 256 {
		d.names = map[uint64]string{}
	}
	d.names[key] = name
	return name
}

// eachLine calls f with the fields of each line until it returns false. A file that is
// missing or not a regular file has no lines.
func eachLine(path string, f func(fields []string) bool) {
	b := slurp(path)
	var fields []string
	for line := range strings.SplitSeq(b, "\n") {
		if line == "" || line[0] == '#' {
			continue
		}
		fields = fields[:0]
		for s := range strings.SplitSeq(line, ":") {
			fields = append(fields, s)
		}
		if !f(fields) {
			return
		}
	}
}

func slurp(path string) string {
	// Not to hang on a FIFO that the sandbox put there.
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		return ""
	}
	defer syscall.Close(fd)
	var st syscall.Stat_t
	if syscall.Fstat(fd, &st) != nil || st.Mode&syscall.S_IFMT != syscall.S_IFREG || st.Size > maxDatabase {
		return ""
	}
	b := make([]byte, st.Size)
	n, err := io.ReadFull(fdReader(fd), b)
	if err != nil && err != io.ErrUnexpectedEOF {
		return ""
	}
	return string(b[:n])
}

type fdReader int

func (r fdReader) Read(b []byte) (int, error) {
	for {
		n, err := syscall.Read(int(r), b)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			return 0, err
		case n == 0 && len(b) > 0:
			return 0, io.EOF
		}
		return n, nil
	}
}
