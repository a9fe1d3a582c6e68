package file

import (
	"strconv"
	"strings"
	"unsafe"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// makeParents makes the missing directories above path, as the calling thread's user.
func makeParents(path string) error {
	i := strings.LastIndexByte(path, '/')
	if i <= 0 {
		return nil
	}
	return makeAll(path[:i], 0o755)
}

// makeAll makes path and what is missing above it.
func makeAll(path string, mode uint32) error {
	fd, err := open(unix.AT_FDCWD, path, unix.O_PATH|unix.O_DIRECTORY, 0, 0)
	if err == nil {
		return unix.Close(fd)
	}
	if err != unix.ENOENT {
		return fail("open", path, err)
	}
	if err := makeParents(path); err != nil {
		return err
	}
	err = mkdir(path, mode)
	if err == unix.EEXIST {
		// Made since by somebody else; a link to nowhere stays an error.
		if fd, err = open(unix.AT_FDCWD, path, unix.O_PATH|unix.O_DIRECTORY, 0, 0); err == nil {
			return unix.Close(fd)
		}
	}
	return fail("make directory", path, err)
}

// mkdir makes one directory with exactly this mode.
func mkdir(path string, mode uint32) error {
	dir, base, err := parent(path)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	if err := unix.Mkdirat(dir, base, mode); err != nil {
		return err
	}
	fd, err := open(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, 0)
	if err != nil {
		return nil // its mode does not let its owner read it
	}
	defer unix.Close(fd)
	return unix.Fchmod(fd, mode)
}

// Mkdir makes a directory. Errors also: errs.PathExists, unless parents is set and it is
// a directory.
func (fs *FS) Mkdir(path, user string, mode uint32, parents bool) (*Entry, error) {
	if mode&^0o7777 != 0 {
		return nil, errs.New(errs.BadRequest, phase, "mode must be within 07777")
	}
	if mode == 0 {
		mode = 0o755
	}
	w, err := fs.resolve(path, user)
	if err != nil {
		return nil, err
	}
	var e *Entry
	err = w.Do(func() error {
		if w.path == "/" {
			if !parents {
				return fail("make directory", w.path, unix.EEXIST)
			}
		} else if parents {
			if err := makeAll(w.path, mode); err != nil {
				return err
			}
		} else if err := mkdir(w.path, mode); err != nil {
			return fail("make directory", w.path, err)
		}
		e, err = fs.stat(w.path, false)
		return err
	})
	return e, err
}

// Move renames source to destination, which it replaces unless noReplace is set.
func (fs *FS) Move(source, destination, user string, noReplace bool) (*Entry, error) {
	from, err := fs.resolve(source, user)
	if err != nil {
		return nil, err
	}
	to, err := fs.resolve(destination, user)
	if err != nil {
		return nil, err
	}
	var e *Entry
	err = from.Do(func() error {
		fd, fbase, err := parent(from.path)
		if err != nil {
			return fail("move", from.path, err)
		}
		defer unix.Close(fd)
		td, tbase, err := parent(to.path)
		if err != nil {
			return fail("move to", to.path, err)
		}
		defer unix.Close(td)
		var flags uint
		if noReplace {
			flags = unix.RENAME_NOREPLACE
		}
		if err := unix.Renameat2(fd, fbase, td, tbase, flags); err != nil {
			what := from.path
			if err == unix.EEXIST || err == unix.ENOTEMPTY || err == unix.EISDIR || err == unix.ENOTDIR {
				what = to.path
			}
			return fail("move to", what, err)
		}
		e, err = fs.stat(to.path, true)
		return err
	})
	return e, err
}

// Remove removes a file, link or empty directory, or with recursive a tree. It returns
// how many entries went.
func (fs *FS) Remove(path, user string, recursive, missingOK bool) (uint64, error) {
	w, err := fs.resolve(path, user)
	if err != nil {
		return 0, err
	}
	var n uint64
	err = w.Do(func() error {
		dir, base, err := parent(w.path)
		if err == nil {
			defer unix.Close(dir)
			n, err = remove(dir, base, recursive, 0)
		}
		if err == unix.ENOENT && missingOK {
			return nil
		}
		return fail("remove", w.path, err)
	})
	return n, err
}

// remove does not follow links. Directories are opened one below the other, so a link
// put in place of one of them leads nowhere.
func remove(dir int, base string, recursive bool, depth int) (uint64, error) {
	err := unix.Unlinkat(dir, base, 0)
	if err == nil {
		return 1, nil
	}
	if err != unix.EISDIR && err != unix.EPERM {
		return 0, err
	}
	first := err
	if err = unix.Unlinkat(dir, base, unix.AT_REMOVEDIR); err == nil {
		return 1, nil
	}
	if err == unix.ENOTDIR {
		return 0, first
	}
	if err != unix.ENOTEMPTY && err != unix.EEXIST || !recursive {
		return 0, err
	}
	if depth > maxDepth {
		return 0, unix.ELOOP
	}
	fd, err := open(dir, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, unix.RESOLVE_BENEATH)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	var n uint64
	var failed error
	// Again until nothing is left: entries may be made meanwhile, and removing
	// entries while reading a directory may hide others.
	for range 8 {
		names, err := readNames(fd)
		if err != nil {
			return n, err
		}
		if len(names) == 0 {
			break
		}
		failed = nil
		for _, name := range names {
			m, err := remove(fd, name, true, depth+1)
			n += m
			if err != nil && err != unix.ENOENT && failed == nil {
				failed = err
			}
		}
		if failed != nil {
			return n, failed
		}
	}
	if err := unix.Unlinkat(dir, base, unix.AT_REMOVEDIR); err != nil {
		return n, err
	}
	return n + 1, nil
}

// Chmod changes the mode of what path names; with recursive of everything below too
// (links are left alone).
func (fs *FS) Chmod(path, user string, mode uint32, recursive bool) (*Entry, error) {
	if mode&^0o7777 != 0 {
		return nil, errs.New(errs.BadRequest, phase, "mode must be within 07777")
	}
	return fs.change(path, user, recursive, "change the mode of", func(fd int) error { return chmod(fd, mode) })
}

// chmod works on an O_PATH descriptor.
func chmod(fd int, mode uint32) error {
	var empty byte
	_, _, e := unix.Syscall6(unix.SYS_FCHMODAT2, uintptr(fd), uintptr(unsafe.Pointer(&empty)), uintptr(mode), unix.AT_EMPTY_PATH, 0, 0)
	if e == 0 {
		return nil
	}
	if e != unix.ENOSYS {
		return e
	}
	return unix.Fchmodat(unix.AT_FDCWD, fdPath(fd), mode, 0) // before Linux 6.6
}

// Chown changes the owner: "user", "user:group" or ":group", by name or number.
func (fs *FS) Chown(path, user, owner string, recursive bool) (*Entry, error) {
	name, group, hasGroup := strings.Cut(owner, ":")
	uid, gid := -1, -1
	if name != "" {
		u, err := fs.Users.Lookup(name)
		if err != nil {
			return nil, err
		}
		uid = int(u.UID)
	}
	if hasGroup && group != "" {
		u, err := fs.Users.Lookup("0:" + group)
		if err != nil {
			return nil, err
		}
		gid = int(u.GID)
	}
	if uid < 0 && gid < 0 {
		return nil, errs.New(errs.BadRequest, phase, "owner is empty")
	}
	return fs.change(path, user, recursive, "change the owner of", func(fd int) error {
		return unix.Fchownat(fd, "", uid, gid, unix.AT_EMPTY_PATH)
	})
}

func (fs *FS) change(path, user string, recursive bool, action string, f func(fd int) error) (*Entry, error) {
	w, err := fs.resolve(path, user)
	if err != nil {
		return nil, err
	}
	var e *Entry
	err = w.Do(func() error {
		fd, err := open(unix.AT_FDCWD, w.path, unix.O_PATH, 0, 0)
		if err != nil {
			return fail(action, w.path, err)
		}
		defer unix.Close(fd)
		if recursive {
			err = changeBelow(fd, f, 0)
		}
		if err == nil {
			err = f(fd)
		}
		if err != nil {
			return fail(action, w.path, err)
		}
		e, err = fs.entry(fd, w.path)
		return err
	})
	return e, err
}

// changeBelow applies f to everything below fd; a directory after what is in it.
func changeBelow(fd int, f func(fd int) error, depth int) error {
	if depth > maxDepth {
		return unix.ELOOP
	}
	dir, err := open(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0, unix.RESOLVE_BENEATH)
	if err == unix.ENOTDIR {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	names, err := readNames(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		sub, err := open(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0, unix.RESOLVE_BENEATH)
		if err == unix.ENOENT {
			continue
		}
		if err != nil {
			return err
		}
		var st unix.Stat_t
		err = unix.Fstat(sub, &st)
		kind := st.Mode & unix.S_IFMT
		if err == nil && kind == unix.S_IFDIR {
			err = changeBelow(sub, f, depth+1)
		}
		if err == nil && kind != unix.S_IFLNK {
			err = f(sub)
		}
		unix.Close(sub)
		if err != nil {
			return err
		}
	}
	return nil
}

// fdPath names an open file for calls that take no descriptor.
func fdPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }
