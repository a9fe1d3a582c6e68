package file

import (
	"strconv"
	"strings"
	"syscall"

	"dsec/api/v1/errs"
	"dsec/internal/guest/user"

	"golang.org/x/sys/unix"
)

// FS does file operations for the sandbox's users.
type FS struct {
	Users *user.Database
	User  string // who acts where a request names nobody; empty: root
	Cwd   string // what an empty path means; empty: the user's home
}

// phase is the step in errors of this package.
const phase = "guest.file"

// who is the acting user and the path that a request means.
type who struct {
	*user.User
	path string
}

// resolve finds the user, and turns the path of a request into an absolute one: empty is
// the default working directory, ~ is the user's home, a relative path starts there.
func (fs *FS) resolve(path, name string) (who, error) {
	if name == "" {
		name = fs.User
	}
	u, err := fs.Users.Lookup(name)
	if err != nil {
		return who{}, err
	}
	abs, err := Absolute(path, u.Home, fs.Cwd)
	return who{u, abs}, err
}

// Absolute is the rule of paths: see resolve. The result is absolute and clean of empty
// and "." parts; ".." is left to the kernel, which knows the links. Errors: errs.BadPath.
func Absolute(path, home, cwd string) (string, error) {
	bad := func(why string) (string, error) {
		return "", errs.New(errs.BadPath, phase, "path "+strconv.Quote(shorten(path))+" "+why)
	}
	if strings.IndexByte(path, 0) >= 0 {
		return bad("holds a NUL byte")
	}
	if home == "" {
		home = "/"
	}
	switch {
	case path == "":
		if path = cwd; path == "" {
			path = home
		}
	case path == "~":
		path = home
	case strings.HasPrefix(path, "~/"):
		path = home + path[1:]
	case path[0] == '~':
		return bad("names another user's home; use an absolute path")
	case path[0] != '/':
		path = home + "/" + path
	}
	var b strings.Builder
	for part := range strings.SplitSeq(path, "/") {
		if part == "" || part == "." {
			continue
		}
		if len(part) > 255 {
			return bad("has a part longer than 255 bytes")
		}
		b.WriteByte('/')
		b.WriteString(part)
	}
	if b.Len() == 0 {
		return "/", nil
	}
	if b.Len() >= 4096 {
		return bad("is longer than 4095 bytes")
	}
	return b.String(), nil
}

// shorten keeps an error message readable.
func shorten(s string) string {
	if len(s) > 200 {
		return s[:200] + "..."
	}
	return s
}

// open opens path below dir (unix.AT_FDCWD for absolute ones) as the calling thread's
// user. It follows no magic link, does not wait for a FIFO's other side, takes no
// terminal, and refuses the guest's own files of procfs.
func open(dir int, path string, flags int, mode uint32, resolve uint64) (int, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags | unix.O_CLOEXEC),
		Resolve: resolve | unix.RESOLVE_NO_MAGICLINKS,
	}
	if flags&unix.O_PATH == 0 {
		how.Flags |= unix.O_NONBLOCK | unix.O_NOCTTY
	}
	if flags&unix.O_CREAT != 0 || flags&unix.O_TMPFILE == unix.O_TMPFILE {
		how.Mode = uint64(mode)
	}
	for tries := 0; ; tries++ {
		fd, err := unix.Openat2(dir, path, &how)
		if err == unix.EINTR || err == unix.EAGAIN && tries < 64 { // EAGAIN: a rename raced with a guarded lookup
			continue
		}
		if err != nil {
			return -1, err
		}
		if ownProc(fd) {
			unix.Close(fd)
			return -1, unix.EACCES
		}
		return fd, nil
	}
}

// ownProc reports whether fd is a file of procfs about the guest itself.
func ownProc(fd int) bool {
	var st unix.Statfs_t
	if unix.Fstatfs(fd, &st) != nil || st.Type != unix.PROC_SUPER_MAGIC {
		return false
	}
	var buf [4200]byte
	n, err := unix.Readlink("/proc/self/fd/"+strconv.Itoa(fd), buf[:])
	if err != nil || n == 0 || buf[0] != '/' {
		return true // cannot tell what it is
	}
	pid := unix.Getpid()
	for part := range strings.SplitSeq(string(buf[1:n]), "/") {
		id, err := strconv.Atoi(part)
		if err != nil {
			continue
		}
		// PID 1 by whatever number a nested procfs shows, or one of our threads.
		if id == 1 || id == pid || unix.Tgkill(pid, id, 0) == nil {
			return true
		}
	}
	return false
}

// parent opens the directory that holds path and returns it with the last part.
func parent(path string) (dir int, base string, err error) {
	i := strings.LastIndexByte(path, '/')
	base = path[i+1:]
	if base == "" || base == ".." {
		return -1, "", unix.EINVAL
	}
	dir, err = open(unix.AT_FDCWD, path[:i+1], unix.O_PATH|unix.O_DIRECTORY, 0, 0)
	return dir, base, err
}

// fail gives an errno its place in the error table. action reads like "read /etc/x".
func fail(action, path string, err error) error {
	if err == nil {
		return nil
	}
	errno, ok := err.(syscall.Errno)
	code := errs.InternalError
	if ok {
		code = codeOf(errno)
	}
	err = errs.Wrap(code, phase, action+" "+strconv.Quote(shorten(path)), err)
	if hint := hintOf(errno); hint != "" {
		errs.Of(err).Advise(hint)
	}
	return err
}

// hintOf is what to do where the hint of codeOf's code would mislead.
func hintOf(e syscall.Errno) string {
	switch e {
	case syscall.ENOTEMPTY:
		return "the directory is not empty: remove what it holds too, or choose another path"
	case syscall.EROFS:
		return "it is on a file system that nobody may write to; choose another path"
	case syscall.ETXTBSY:
		return "a process runs this program: end it first, or write a new file and move it there"
	case syscall.ENAMETOOLONG:
		return "a name has at most 255 bytes, a path 4095"
	case syscall.ELOOP:
		return "its links lead in a circle, or into /proc; name what they should point to"
	case syscall.EXDEV:
		return "the two paths are on different file systems: copy, then remove"
	case syscall.EBUSY:
		return "something is mounted there or uses it; choose another path"
	case syscall.EINVAL, syscall.ENXIO:
		return "the kernel refuses this for such a file; choose another path"
	}
	return ""
}

func codeOf(e syscall.Errno) errs.Code {
	switch e {
	case syscall.ENOENT:
		return errs.PathNotFound
	case syscall.EEXIST, syscall.ENOTEMPTY:
		return errs.PathExists
	case syscall.ENOTDIR:
		return errs.NotDirectory
	case syscall.EISDIR:
		return errs.IsDirectory
	case syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.ETXTBSY:
		return errs.PermissionDenied
	case syscall.ENOSPC, syscall.EDQUOT, syscall.EMLINK:
		return errs.DiskFull
	case syscall.ENAMETOOLONG, syscall.EINVAL, syscall.ELOOP, syscall.EXDEV, syscall.ENXIO, syscall.EBUSY:
		return errs.BadPath
	case syscall.EFBIG:
		return errs.BodyTooLarge
	case syscall.ENOTSUP, syscall.ENOSYS, syscall.ENODEV:
		return errs.NotSupported
	}
	return errs.InternalError
}
