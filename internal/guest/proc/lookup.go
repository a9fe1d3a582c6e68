package proc

import (
	"io/fs"
	"strconv"
	"strings"
	"syscall"

	"dsec/api/v1/errs"
)

// lookup finds cmd as a shell would, in the PATH of env; cwd is where relative names
// start. The second result says why it cannot be run.
func lookup(cmd, cwd string, env []string) (string, *errs.Error) {
	if strings.IndexByte(cmd, '/') >= 0 {
		path := cmd
		if cmd[0] != '/' {
			path = cwd + "/" + cmd
		}
		switch err := executable(path); err {
		case nil:
			return path, nil
		case fs.ErrPermission:
			return "", cannot(cmd, "permission denied: not an executable file")
		default:
			return "", notFound(cmd, "no such file or directory")
		}
	}
	var list string
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			list = v
		}
	}
	found := false
	for dir := range strings.SplitSeq(list, ":") {
		path := dir + "/" + cmd
		if dir == "" || dir[0] != '/' {
			path = cwd + "/" + path
		}
		switch executable(path) {
		case nil:
			return path, nil
		case fs.ErrPermission:
			found = true
		}
	}
	if found {
		return "", cannot(cmd, "permission denied: not an executable file")
	}
	return "", notFound(cmd, "command not found in PATH="+list)
}

// executable returns nil, fs.ErrPermission or fs.ErrNotExist.
func executable(path string) error {
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return fs.ErrNotExist
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFREG || st.Mode&0o111 == 0 {
		return fs.ErrPermission
	}
	return nil
}

func notFound(cmd, why string) *errs.Error {
	if strings.ContainsAny(cmd, " |;&") {
		why += " (a whole line is for a shell: sh -c 'LINE')"
	}
	return errs.New(errs.CommandNotFound, "guest.start", cmd+": "+why)
}

func cannot(cmd, why string) *errs.Error {
	return errs.New(errs.CommandNotExec, "guest.start", cmd+": "+why)
}

// notExecutable says why the kernel refused a file that is there.
func notExecutable(cmd, path string, errno syscall.Errno) *errs.Error {
	switch errno {
	case syscall.ENOENT, syscall.ENOTDIR:
		if interp := interpreter(path); interp != "" {
			return notFound(cmd, "its interpreter "+strconv.Quote(interp)+" does not exist")
		}
		return notFound(cmd, "the program's loader or the program itself does not exist")
	case syscall.ENOEXEC:
		return cannot(cmd, "exec format error: not a program for this machine, and no #! line")
	case syscall.EACCES:
		return cannot(cmd, "permission denied")
	}
	return cannot(cmd, errno.Error())
}

// interpreter returns what a script's #! line names, or "".
func interpreter(path string) string {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer syscall.Close(fd)
	var buf [256]byte
	n, _ := syscall.Read(fd, buf[:])
	line, ok := strings.CutPrefix(string(buf[:max(n, 0)]), "#!")
	if !ok {
		return ""
	}
	line, _, _ = strings.Cut(line, "\n")
	interp, _, _ := strings.Cut(strings.TrimLeft(line, " \t"), " ")
	return strings.TrimRight(interp, "\t\r")
}
