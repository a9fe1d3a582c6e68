package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"hash"
	"io"
	"math/bits"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

const (
	blockBits = 12
	blockSize = 1 << blockBits

	holeMin   = 64 << 10 // smallest hole that is left out of the data blob
	maxChunks = 1 << 16  // chunk addresses of one file
	bufSize   = 1 << 20

	nullBlock = ^uint32(0) // a chunk that is a hole
	maxBlocks = int64(nullBlock) - 1
)

// Blob is where contents go: written once from start to end, and, if names were
// replaced on the way, read back and rewritten without what they leave behind.
type Blob interface {
	io.Writer
	io.ReaderAt
	io.WriterAt
	Truncate(size int64) error
}

// Sparse is a reader that knows where its holes are.
type Sparse interface {
	io.Reader
	// Hole returns how many bytes from here on are a hole.
	Hole() (int64, error)
	// Skip moves n bytes on.
	Skip(n int64) error
}

// extent says where a file's content is in the data blob: one run from start, or
// with chunks set one address per unit of 1<<unitBits bytes.
type extent struct {
	start    uint32
	unitBits uint8
	chunks   []uint32
}

// dataWriter appends to the blob through a buffer and hashes what it writes.
type dataWriter struct {
	w       Blob
	sum     hash.Hash
	off     int64 // logical end, buffered bytes included
	buf     []byte
	scratch []byte
	zero    []byte
}

func newDataWriter(w Blob) *dataWriter {
	return &dataWriter{
		w: w, sum: sha256.New(),
		buf: make([]byte, 0, bufSize), scratch: make([]byte, holeMin), zero: make([]byte, holeMin),
	}
}

func (d *dataWriter) write(p []byte) error {
	d.off += int64(len(p))
	for len(p) > 0 {
		n := copy(d.buf[len(d.buf):cap(d.buf)], p)
		d.buf, p = d.buf[:len(d.buf)+n], p[n:]
		if len(d.buf) == cap(d.buf) {
			if err := d.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// flush hashes and writes at once: each takes about as long as the other.
func (d *dataWriter) flush() error {
	hashed := make(chan struct{})
	hash := func() { d.sum.Write(d.buf); close(hashed) }
	if len(d.buf) < bufSize/4 {
		hash()
	} else {
		go hash()
	}
	_, err := d.w.Write(d.buf)
	<-hashed
	d.buf = d.buf[:0]
	return DiskError("write data blob", err)
}

func (d *dataWriter) writeZeros(n int64) error {
	for n > 0 {
		k := min(n, int64(len(d.zero)))
		if err := d.write(d.zero[:k]); err != nil {
			return err
		}
		n -= k
	}
	return nil
}

func (d *dataWriter) pad() error { return d.writeZeros(-d.off & (blockSize - 1)) }

// unitFor picks the hole granularity so that the address table stays bounded.
func unitFor(size int64) uint8 {
	unit := uint8(bits.Len(uint(holeMin - 1)))
	for (size-1)>>unit >= maxChunks {
		unit++
	}
	return unit
}

// put copies size bytes of r into the blob, leaving out aligned units of zeros.
func (d *dataWriter) put(ctx context.Context, path string, size int64, r io.Reader, progress func(int64)) (extent, error) {
	e := extent{start: nullBlock, unitBits: unitFor(max(size, 1))}
	sparse, _ := r.(Sparse)
	holes := 0
	for pos, n := int64(0), int64(0); pos < size; pos += n {
		if err := ctx.Err(); err != nil {
			return e, err
		}
		n = min(int64(1)<<e.unitBits, size-pos)
		at, err := d.putUnit(path, n, r, sparse, progress)
		if err != nil {
			return e, err
		}
		if at == nullBlock {
			holes++
		} else if e.start == nullBlock {
			e.start = at
		}
		if holes > 0 && e.chunks == nil { // the first hole: spell out the units before it
			for i := range uint32(pos >> e.unitBits) {
				e.chunks = append(e.chunks, e.start+i<<(e.unitBits-blockBits))
			}
		}
		if holes > 0 {
			e.chunks = append(e.chunks, at)
		}
	}
	if e.start == nullBlock {
		e.chunks = nil // nothing but a hole: one address is enough
	}
	return e, d.pad()
}

// putUnit copies one unit of n bytes and returns its block, or nullBlock if it is all zeros.
func (d *dataWriter) putUnit(path string, n int64, r io.Reader, sparse Sparse, progress func(int64)) (uint32, error) {
	if sparse != nil {
		hole, err := sparse.Hole()
		if err == nil && hole >= n {
			err = sparse.Skip(n)
			progress(n)
			return nullBlock, readError(path, err)
		}
		if err != nil {
			return 0, readError(path, err)
		}
	}
	at, zeros := nullBlock, int64(0)
	for n > 0 {
		p := d.scratch[:min(n, int64(len(d.scratch)))]
		if _, err := io.ReadFull(r, p); err != nil {
			return 0, readError(path, err)
		}
		n -= int64(len(p))
		progress(int64(len(p)))
		if at == nullBlock && bytes.Equal(p, d.zero[:len(p)]) {
			zeros += int64(len(p))
			continue
		}
		if at == nullBlock {
			if (d.off+zeros+n)>>blockBits >= maxBlocks {
				return 0, errs.New(errs.BodyTooLarge, phase, "data blob over 16 TiB at "+quote(path))
			}
			at = uint32(d.off >> blockBits)
			if err := d.writeZeros(zeros); err != nil {
				return 0, err
			}
		}
		if err := d.write(p); err != nil {
			return 0, err
		}
	}
	return at, nil
}

// readError types a failure to read a file's content from the source.
func readError(path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return corrupt(path, "content ends early", io.ErrUnexpectedEOF)
	}
	return errs.Wrap(errs.ImageCorrupt, phase, "read content of "+quote(path), err)
}

// DiskError types a failure to write: a full disk as disk_full, the rest as internal.
func DiskError(action string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		return errs.Wrap(errs.DiskFull, phase, action, err)
	}
	return errs.Wrap(errs.InternalError, phase, action, err)
}
