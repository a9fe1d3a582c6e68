package chunk

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// A metadata object is "DSECMETA", the blob's size(8), and the blob compressed. It is
// named by the SHA-256 of the blob itself.
const (
	metaMagic  = "DSECMETA"
	metaHeader = 16
	metaWindow = 8 << 20
)

// PutMeta puts a metadata blob whole and returns its name. One that the store has is not
// put again. The compressed blob is held in memory.
func (s *Session) PutMeta(ctx context.Context, b Blob) (string, Stats, error) {
	name, st, err := s.putMeta(ctx, b)
	if err == nil {
		err = s.lease.check()
	}
	if err != nil {
		return "", st, fmt.Errorf("put metadata blob: %w", err)
	}
	return name, st, nil
}

func (s *Session) putMeta(ctx context.Context, b Blob) (string, Stats, error) {
	st := Stats{Bytes: b.Size}
	out := &writeBuffer{b: binary.LittleEndian.AppendUint64([]byte(metaMagic), uint64(b.Size))}
	enc, err := zstd.NewWriter(out, zstd.WithEncoderConcurrency(s.w.opts.Workers), zstd.WithWindowSize(metaWindow))
	if err != nil {
		return "", st, errs.Wrap(errs.InternalError, phase, "make a compressor", err)
	}
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(h, enc), &ctxReader{ctx, io.NewSectionReader(b.R, 0, b.Size), b.Progress, 0})
	if cerr := enc.Close(); err == nil {
		err = cerr
	}
	if err == nil && n != b.Size {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return "", st, errs.Wrap(errs.InternalError, phase, "read the blob", err)
	}
	var d digest
	h.Sum(d[:0])
	name, stored, err := s.putContent(ctx, metaClass, d, out.b)
	st.Stored = stored
	return name, st, err
}

type writeBuffer struct{ b []byte }

func (w *writeBuffer) Write(p []byte) (int, error) {
	w.b = append(w.b, p...)
	return len(p), nil
}

type ctxReader struct {
	ctx      context.Context
	r        io.Reader
	progress func(int64)
	done     int64
}

func (r *ctxReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := r.r.Read(p)
	if r.done += int64(n); r.progress != nil {
		r.progress(r.done)
	}
	return n, err
}

// GetMeta writes the metadata blob of a layer to the file path, which is there whole,
// verified and durable, or not at all. Errors: store_corrupt, object_not_found, disk_full,
// the store's own.
func GetMeta(ctx context.Context, s object.Store, l Layer, path string) (err error) {
	want, err := parseContentKey(metaClass, l.Meta)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return localError("make file for metadata", err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	for last := false; ; last = true {
		err := fetchMeta(ctx, s, l, want, f)
		if err == nil {
			break
		}
		if last || !errors.Is(err, errs.StoreCorrupt) {
			return fmt.Errorf("get metadata blob: %w", err)
		}
	}
	if err := f.Chmod(0o644); err != nil {
		return localError("write metadata", err)
	}
	if err := f.Sync(); err != nil {
		return localError("sync metadata", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return localError("name metadata", err)
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return localError("sync directory of metadata", err)
	}
	defer d.Close()
	return localError("sync directory of metadata", d.Sync())
}

func localError(action string, err error) error {
	code := errs.InternalError
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG) {
		code = errs.DiskFull
	}
	return errs.Wrap(code, phase, action, err)
}

// fetchMeta writes the blob to f, from its start.
func fetchMeta(ctx context.Context, s object.Store, l Layer, want digest, f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return localError("write metadata", err)
	}
	rc, err := s.Get(ctx, l.Meta, 0, -1)
	if err != nil {
		return err
	}
	defer rc.Close()
	src := &storeReader{r: rc}
	head := make([]byte, metaHeader)
	if _, err := io.ReadFull(src, head); err != nil {
		return src.failed(l.Meta, "it is too short", err)
	}
	if string(head[:8]) != metaMagic || binary.LittleEndian.Uint64(head[8:]) != uint64(l.MetaSize) {
		return corrupt(l.Meta, "its header is not that of the blob", nil)
	}
	dec, err := zstd.NewReader(src, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(metaWindow))
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "make a decompressor", err)
	}
	defer dec.Close()
	h, out := sha256.New(), &fileWriter{f: f}
	n, err := io.Copy(io.MultiWriter(h, out), io.LimitReader(dec, l.MetaSize+1))
	switch {
	case out.err != nil:
		return localError("write metadata", out.err)
	case err != nil:
		return src.failed(l.Meta, "it cannot be decompressed", err)
	case n != l.MetaSize:
		return corrupt(l.Meta, fmt.Sprintf("the blob has not %d bytes", l.MetaSize), nil)
	}
	var got digest
	if h.Sum(got[:0]); got != want {
		return corrupt(l.Meta, "the blob is not what its name says", nil)
	}
	return nil
}

// storeReader remembers an error of the store, to tell it from damage.
type storeReader struct {
	r   io.Reader
	err error
}

func (r *storeReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if err != nil && err != io.EOF {
		r.err = err
	}
	return n, err
}

func (r *storeReader) failed(key, what string, err error) error {
	if r.err != nil {
		return r.err
	}
	return corrupt(key, what, err)
}

type fileWriter struct {
	f   *os.File
	off int64
	err error
}

func (w *fileWriter) Write(p []byte) (int, error) {
	n, err := w.f.WriteAt(p, w.off)
	w.off += int64(n)
	if err != nil {
		w.err = err
	}
	return n, err
}
