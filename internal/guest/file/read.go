package file

import (
	"io"
	"strconv"
	"syscall"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// MaxBody is the most that a unary read or write carries.
const MaxBody = 1 << 20

// Reader reads a range of one file.
type Reader struct {
	Entry *Entry
	fd    int
	off   int64
	left  int64 // -1: to the end
}

// OpenRead opens a range of a regular file; length 0 is to the end. Errors also:
// errs.IsDirectory, errs.BadPath (a device, pipe or socket).
func (fs *FS) OpenRead(path, user string, offset, length uint64) (*Reader, error) {
	w, err := fs.resolve(path, user)
	if err != nil {
		return nil, err
	}
	if offset > 1<<62 || length > 1<<62 {
		return nil, errs.New(errs.BadRequest, phase, "offset and length must be below 2^62")
	}
	var r *Reader
	err = w.Do(func() error {
		r, err = fs.openRead(w.path)
		return err
	})
	if err != nil {
		return nil, err
	}
	r.off, r.left = int64(offset), int64(length)
	if length == 0 {
		r.left = -1
	}
	return r, nil
}

func (fs *FS) openRead(path string) (*Reader, error) {
	fd, err := open(unix.AT_FDCWD, path, unix.O_RDONLY, 0, 0)
	if err != nil {
		return nil, fail("open", path, err)
	}
	e, err := fs.entry(fd, path)
	if err == nil {
		err = regular(e.Mode, path)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &Reader{Entry: e, fd: fd}, nil
}

func regular(mode uint32, path string) error {
	switch mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		return nil
	case syscall.S_IFDIR:
		return fail("open", path, syscall.EISDIR)
	}
	return errs.New(errs.BadPath, phase, strconv.Quote(path)+" is a device, pipe or socket, not a file").
		Advise("read it with a command inside the sandbox, such as head -c SIZE")
}

// Read reads the next bytes of the range.
func (r *Reader) Read(b []byte) (int, error) {
	if r.left >= 0 && int64(len(b)) > r.left {
		b = b[:r.left]
	}
	if len(b) == 0 {
		return 0, io.EOF
	}
	for {
		n, err := syscall.Pread(r.fd, b, r.off)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			return 0, fail("read", r.Entry.Path, err)
		case n == 0:
			return 0, io.EOF
		}
		r.off += int64(n)
		if r.left >= 0 {
			r.left -= int64(n)
		}
		return n, nil
	}
}

// Close closes the file.
func (r *Reader) Close() { unix.Close(r.fd) }

// Get reads a range of at most MaxBody bytes. eof says that it reached the file's end.
// Errors also: errs.BodyTooLarge, for a larger range or, without a length, a larger file.
func (fs *FS) Get(path, user string, offset, length uint64) (e *Entry, data []byte, eof bool, err error) {
	tooLarge := func() error {
		return errs.New(errs.BodyTooLarge, phase, strconv.Quote(path)+" is larger than the 1 MiB that one answer carries")
	}
	if length > MaxBody {
		return nil, nil, false, tooLarge()
	}
	r, err := fs.OpenRead(path, user, offset, length)
	if err != nil {
		return nil, nil, false, err
	}
	defer r.Close()
	// One byte more shows whether there is more. Files of procfs have no size.
	want := int64(length)
	if want == 0 {
		want = MaxBody
	}
	r.left = want + 1
	hint := max(min(r.Entry.Size-r.off, want)+1, 512)
	data = make([]byte, 0, hint)
	for {
		if len(data) == cap(data) {
			data = append(data, 0)[:len(data)]
		}
		n, err := r.Read(data[len(data):cap(data)])
		data = data[:len(data)+n]
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, nil, false, err
		}
	}
	if int64(len(data)) <= want {
		return r.Entry, data, true, nil
	}
	if length == 0 {
		return nil, nil, false, tooLarge()
	}
	return r.Entry, data[:want], false, nil
}
