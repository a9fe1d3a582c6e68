package file

import (
	"strconv"
	"strings"
	"syscall"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// WriteOptions says how a file is written.
type WriteOptions struct {
	Mode     uint32 // of a new file; 0: 0644
	Parents  bool   // make missing directories
	Offset   uint64 // where to start; holes stay holes
	Keep     bool   // do not truncate
	Append   bool
	Atomic   bool // write beside it, then rename
	Metadata map[string]string
}

// Writer writes one file. Exactly one of Commit and Abort ends it.
type Writer struct {
	fs       *FS
	w        who
	fd       int
	off      int64
	append   bool
	bytes    int64
	metadata map[string]string
	setMeta  bool

	dir       int // of an atomic write: where the final name goes; -1 otherwise
	tmp, base string
}

// OpenWrite opens path for writing and makes it if it is missing.
func (fs *FS) OpenWrite(path, user string, o WriteOptions) (*Writer, error) {
	w, err := fs.resolve(path, user)
	if err != nil {
		return nil, err
	}
	switch {
	case o.Append && (o.Keep || o.Offset != 0 || o.Atomic):
		return nil, errs.New(errs.BadRequest, phase, "append goes with neither keep, offset nor atomic")
	case o.Atomic && (o.Keep || o.Offset != 0):
		return nil, errs.New(errs.BadRequest, phase, "atomic writes a whole file: no keep and no offset")
	case o.Offset > 1<<62:
		return nil, errs.New(errs.BadRequest, phase, "offset must be below 2^62")
	case o.Mode&^0o7777 != 0:
		return nil, errs.New(errs.BadRequest, phase, "mode must be within 07777")
	}
	if o.Mode == 0 {
		o.Mode = 0o644
	}
	meta, err := checkMetadata(o.Metadata)
	if err != nil {
		return nil, err
	}
	x := &Writer{
		fs: fs, w: w, off: int64(o.Offset), append: o.Append, dir: -1,
		metadata: meta, setMeta: len(meta) > 0 || !o.Keep && !o.Append,
	}
	err = w.Do(func() error {
		if o.Parents {
			if err := makeParents(w.path); err != nil {
				return err
			}
		}
		if o.Atomic {
			return x.openAtomic(o)
		}
		return x.openPlain(o)
	})
	if err != nil {
		return nil, err
	}
	return x, nil
}

func (x *Writer) openPlain(o WriteOptions) error {
	path := x.w.path
	flags := unix.O_WRONLY
	if o.Append {
		flags |= unix.O_APPEND
	}
	fd, made, err := create(path, flags, o.Mode)
	if err != nil {
		return fail("open", path, err)
	}
	x.fd = fd
	var st syscall.Stat_t
	err = fail("stat", path, fstat(fd, &st))
	if err == nil {
		err = regular(st.Mode, path)
	}
	if err == nil && made {
		err = fail("chmod", path, unix.Fchmod(fd, o.Mode)) // whatever the umask
	}
	if err == nil && !made && !o.Keep && !o.Append {
		err = fail("truncate", path, unix.Ftruncate(fd, 0))
	}
	if err == nil {
		err = x.applyMetadata()
	}
	if err != nil {
		unix.Close(fd)
		if made {
			unix.Unlink(path)
		}
	}
	return err
}

// create opens path, and tells whether it made it.
func create(path string, flags int, mode uint32) (fd int, made bool, err error) {
	for range 16 {
		if fd, err = open(unix.AT_FDCWD, path, flags, 0, 0); err != unix.ENOENT {
			return fd, false, err
		}
		fd, err = open(unix.AT_FDCWD, path, flags|unix.O_CREAT|unix.O_EXCL, mode, 0)
		if err != unix.EEXIST {
			return fd, true, err
		}
		// Made since by somebody else, or a link whose target is missing.
		if fd, err = open(unix.AT_FDCWD, path, flags|unix.O_CREAT, mode, 0); err != unix.ENOENT {
			return fd, false, err
		}
	}
	return -1, false, err
}

func (x *Writer) openAtomic(o WriteOptions) error {
	// The file that a link names is replaced, not the link.
	path := x.w.path
	for range 16 {
		target, err := readlink(unix.AT_FDCWD, path)
		if err != nil {
			break
		}
		if target[0] != '/' {
			target = path[:strings.LastIndexByte(path, '/')+1] + target
		}
		path = target
	}
	dir, base, err := parent(path)
	if err != nil {
		return fail("open the directory of", path, err)
	}
	mode := o.Mode
	var st unix.Stat_t
	if unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
		if err := regular(st.Mode, path); err != nil {
			unix.Close(dir)
			return err
		}
		mode = st.Mode & 0o7777 // the replacement keeps it, as a plain write does
	}
	for i := range 100 {
		x.tmp = "." + base[:min(len(base), 200)] + ".dsec" + strconv.Itoa(unix.Getpid()) + "." + strconv.Itoa(i)
		x.fd, err = open(dir, x.tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, mode, unix.RESOLVE_BENEATH)
		if err != unix.EEXIST {
			break
		}
	}
	if err != nil {
		unix.Close(dir)
		return fail("create a file beside", path, err)
	}
	x.dir, x.base = dir, base
	err = fail("chmod", path, unix.Fchmod(x.fd, mode))
	if err == nil {
		err = x.applyMetadata()
	}
	if err != nil {
		x.abort()
	}
	return err
}

func (x *Writer) applyMetadata() error {
	if !x.setMeta {
		return nil
	}
	return fail("set the metadata of", x.w.path, setMetadata(x.fd, x.metadata))
}

// Write writes b at the current place.
func (x *Writer) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		var n int
		var err error
		if x.append {
			n, err = syscall.Write(x.fd, b[done:])
		} else {
			n, err = syscall.Pwrite(x.fd, b[done:], x.off)
		}
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return done, fail("write", x.w.path, err)
		}
		done, x.off, x.bytes = done+n, x.off+int64(n), x.bytes+int64(n)
	}
	return done, nil
}

// Commit finishes the write and returns what the file is now and the bytes written.
func (x *Writer) Commit() (*Entry, int64, error) {
	if x.dir >= 0 {
		err := x.w.Do(func() error { return unix.Renameat(x.dir, x.tmp, x.dir, x.base) })
		if err != nil {
			x.Abort()
			return nil, 0, fail("rename the new file to", x.w.path, err)
		}
	}
	e, err := x.fs.entry(x.fd, x.w.path)
	x.closeAll()
	return e, x.bytes, err
}

// Abort gives up: an atomic write leaves nothing, another one what it has written.
func (x *Writer) Abort() {
	x.w.Do(func() error { x.abort(); return nil })
}

func (x *Writer) abort() {
	if x.dir >= 0 {
		unix.Unlinkat(x.dir, x.tmp, 0)
	}
	x.closeAll()
}

func (x *Writer) closeAll() {
	unix.Close(x.fd)
	if x.dir >= 0 {
		unix.Close(x.dir)
	}
}

// Put writes a whole small file.
func (fs *FS) Put(path, user string, o WriteOptions, data []byte) (*Entry, int64, error) {
	if len(data) > MaxBody {
		return nil, 0, errs.New(errs.BodyTooLarge, phase, "the body is larger than the 1 MiB that one request carries")
	}
	x, err := fs.OpenWrite(path, user, o)
	if err != nil {
		return nil, 0, err
	}
	if _, err := x.Write(data); err != nil {
		x.Abort()
		return nil, 0, err
	}
	return x.Commit()
}
