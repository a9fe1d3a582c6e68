package file

import (
	"slices"
	"syscall"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// Bounds of walks.
const (
	maxDepth    = 1000    // of trees: each level is an open directory
	maxListed   = 1 << 16 // entries of one answer
	listEntries = 10000   // where a request sets no limit
)

// List describes what is below a directory, depth levels deep (0: 1), at most limit
// entries (0: 10,000; then truncated). A link at the root is followed, others are not;
// paths are reported under the requested one.
func (fs *FS) List(path, user string, depth uint32, limit uint64) (entries []*Entry, truncated bool, err error) {
	w, err := fs.resolve(path, user)
	if err != nil {
		return nil, false, err
	}
	l := lister{fs: fs, limit: listEntries}
	if limit > 0 {
		l.limit = int(min(limit, maxListed))
	}
	err = w.Do(func() error {
		fd, err := open(unix.AT_FDCWD, w.path, unix.O_RDONLY|unix.O_DIRECTORY, 0, 0)
		if err != nil {
			return fail("list", w.path, err)
		}
		defer unix.Close(fd)
		return l.walk(fd, w.path, int(min(max(depth, 1), maxDepth)))
	})
	return l.entries, l.truncated, err
}

type lister struct {
	fs        *FS
	limit     int
	entries   []*Entry
	truncated bool
}

func (l *lister) walk(dir int, path string, depth int) error {
	names, err := readNames(dir)
	if err != nil {
		return fail("list", path, err)
	}
	slices.Sort(names)
	if path == "/" {
		path = ""
	}
	for _, name := range names {
		if len(l.entries) >= l.limit {
			l.truncated = true
			return nil
		}
		fd, err := open(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0, unix.RESOLVE_BENEATH)
		if err != nil {
			continue // gone since, or the guest's own
		}
		e, err := l.fs.entry(fd, path+"/"+name)
		if err == nil {
			l.entries = append(l.entries, e)
		}
		if err == nil && e.Type == TypeDirectory && depth > 1 {
			sub, err := open(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0, unix.RESOLVE_BENEATH)
			if err == nil { // what the user may not read is listed, its content is not
				err = l.walk(sub, e.Path, depth-1)
				unix.Close(sub)
			}
			if err != nil && errs.Of(err).Code == errs.InternalError {
				unix.Close(fd)
				return err
			}
		}
		unix.Close(fd)
	}
	return nil
}

// readNames reads the names in a directory from its start.
func readNames(fd int) ([]string, error) {
	if _, err := unix.Seek(fd, 0, 0); err != nil {
		return nil, err
	}
	var names []string
	buf := make([]byte, 8192)
	for {
		n, err := unix.Getdents(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return names, err
		}
		_, _, names = syscall.ParseDirent(buf[:n], -1, names)
	}
}
