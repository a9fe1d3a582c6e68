package layer

import (
	"errors"
	"io"

	"golang.org/x/sys/unix"
)

// FileReader reads the regular file fd, whose stat is st, from its start; if it is sparse,
// the reader is a [Sparse]. The descriptor's own offset is left alone unless it is sparse.
func FileReader(fd int, st *unix.Stat_t) io.Reader {
	if st.Blocks*512 < st.Size {
		return SparseReader(fd, st.Size)
	}
	return &fdReader{fd: fd}
}

// SparseReader is FileReader for a file that may be sparse though its stat does not say
// so, as with EROFS.
func SparseReader(fd int, size int64) io.Reader {
	return &holes{fdReader: fdReader{fd: fd}, size: size}
}

// fdReader reads a regular file by its bare descriptor: an os.File costs two
// system calls more for each of 10^5 files.
type fdReader struct {
	fd  int
	pos int64
}

func (r *fdReader) Read(p []byte) (int, error) {
	for {
		n, err := unix.Pread(r.fd, p, r.pos)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return 0, err
		case n == 0 && len(p) > 0:
			return 0, io.EOF
		}
		r.pos += int64(n)
		return n, nil
	}
}

// holes reads a sparse file, telling where its holes are.
type holes struct {
	fdReader
	size     int64
	nextData int64 // first data at or after pos, valid if above pos
}

func (h *holes) Hole() (int64, error) {
	if h.nextData <= h.pos {
		off, err := unix.Seek(h.fd, h.pos, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // no more data
			off, err = h.size, nil
		}
		if err != nil {
			return 0, err
		}
		h.nextData = off
	}
	return h.nextData - h.pos, nil
}

func (h *holes) Skip(n int64) error { h.pos += n; return nil }
