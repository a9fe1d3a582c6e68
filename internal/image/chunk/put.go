package chunk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"dsec/api/v1/errs"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

const (
	windowSize = 2 << 20 // what is read of a blob at once
	carryMax   = (maxBlocks + holeBlocks) * block
)

// PutData puts a data blob and returns the name of its Map. Only chunks that the store
// does not have are written. Errors: disk_full and the store's own, lease_lost,
// internal_error if the blob cannot be read.
//
// It reads the blob once, in order, on one goroutine that also cuts; workers hash, look
// chunks up and compress; one more puts the results in order into packs, which others
// upload. Memory is bounded by the windows between them and the packs under way, some
// 64 MiB + (Uploads + 1) packs.
func (s *Session) PutData(ctx context.Context, b Blob) (string, Stats, error) {
	if b.Size < 0 || b.Size > 1<<44 {
		return "", Stats{}, errs.New(errs.BadRequest, phase, fmt.Sprintf("a data blob of %d bytes", b.Size))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p := &put{
		s: s, ctx: ctx, cancel: cancel, blob: b,
		windows: make(chan []byte, s.w.opts.Workers+3),
		scratch: make(chan []byte, 16),
		work:    make(chan *job, 4*s.w.opts.Workers),
		ordered: make(chan *job, 64*s.w.opts.Workers),
		buffers: make(chan []byte, s.w.opts.Uploads+1),
		local:   map[digest]place{},
		m:       newMapBuilder(b.Size),
	}
	name, err := p.run()
	if err == nil {
		err = s.lease.check()
	}
	if err != nil {
		return "", p.stats, fmt.Errorf("put data blob: %w", err)
	}
	return name, p.stats, nil
}

// put is one PutData under way.
type put struct {
	s      *Session
	ctx    context.Context
	cancel context.CancelCauseFunc
	blob   Blob

	windows chan []byte // free ones; nil is one that is not made yet
	scratch chan []byte // free buffers of compressed chunks
	work    chan *job   // to the workers
	ordered chan *job   // to the collector, in the blob's order

	// Of the collector:
	pack    *packBuilder
	buffers chan []byte // free ones for packs, as windows
	uploads sync.WaitGroup
	m       *mapBuilder
	stats   Stats

	mu    sync.Mutex
	local map[digest]place // chunks of packs that are not in the index yet
}

// job is one chunk.
type job struct {
	off  int64
	data []byte
	win  *window

	done   chan struct{}
	digest digest
	found  bool
	place  place
	stored []byte // compressed, or data
	buf    []byte // what compressing used
	err    error
}

// window is a piece of the blob; who has the last job of it gives it back.
type window struct {
	buf  []byte
	mu   sync.Mutex
	refs int
}

func (p *put) release(w *window) {
	w.mu.Lock()
	w.refs--
	last := w.refs == 0
	w.mu.Unlock()
	if last {
		p.windows <- w.buf
	}
}

func (p *put) run() (string, error) {
	for range cap(p.windows) {
		p.windows <- nil
	}
	for range cap(p.buffers) {
		p.buffers <- nil
	}
	var wg sync.WaitGroup
	for range p.s.w.opts.Workers {
		wg.Go(p.hash)
	}
	wg.Go(func() {
		defer close(p.ordered)
		defer close(p.work)
		if err := p.read(); err != nil {
			p.cancel(err)
		}
	})
	err := p.collect()
	if err != nil {
		p.cancel(err)
	}
	for range p.ordered { // the reader may wait to hand one over
	}
	wg.Wait()
	p.uploads.Wait()
	if cause := context.Cause(p.ctx); cause != nil {
		return "", errs.Wrap(errs.StoreUnavailable, phase, "put", cause)
	}
	if err != nil {
		return "", err
	}
	p.m.m.size = p.blob.Size // known by now, also of a blob that grew
	p.stats.Bytes = p.blob.Size
	return p.s.putMap(p.ctx, &p.m.m, &p.stats)
}

// hash is a worker.
func (p *put) hash() {
	enc, err := newEncoder(p.s.w.opts.Level)
	for j := range p.work {
		if j.err = err; err == nil {
			j.err = p.hashOne(j, enc)
		}
		close(j.done)
	}
}

func newEncoder(level zstd.EncoderLevel) (*zstd.Encoder, error) {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(level),
		zstd.WithWindowSize(maxChunk), zstd.WithEncoderCRC(false), zstd.WithZeroFrames(false))
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "make a compressor", err)
	}
	return e, nil
}

func (p *put) hashOne(j *job, enc *zstd.Encoder) error {
	if p.ctx.Err() != nil {
		return context.Cause(p.ctx)
	}
	j.digest = sha256.Sum256(j.data)
	p.mu.Lock()
	j.place, j.found = p.local[j.digest]
	p.mu.Unlock()
	if j.found {
		return nil
	}
	var err error
	if j.place, j.found, err = p.s.w.index.find(p.ctx, j.digest, p.s.mayUse); j.found || err != nil {
		return err
	}
	select {
	case j.buf = <-p.scratch:
	default:
		j.buf = make([]byte, 0, maxChunk)
	}
	j.stored = compress(enc, j.data, j.buf)
	return nil
}

// compress returns data if compressing does not help; else it uses buf.
func compress(enc *zstd.Encoder, data, buf []byte) []byte {
	z := enc.EncodeAll(data, buf[:0])
	if len(z) >= len(data)-len(data)/32 {
		return data
	}
	return z
}

// collect takes the chunks in order, makes the map and fills packs.
func (p *put) collect() error {
	for j := range p.ordered {
		<-j.done
		err := j.err
		if err == nil {
			err = p.collectOne(j)
		}
		p.release(j.win)
		if err != nil {
			return err
		}
		if j.buf != nil {
			select {
			case p.scratch <- j.buf:
			default:
			}
		}
	}
	if p.pack != nil && p.ctx.Err() == nil {
		p.flush()
	}
	return nil
}

func (p *put) collectOne(j *job) error {
	if !j.found {
		p.mu.Lock()
		j.place, j.found = p.local[j.digest] // another worker had the same chunk
		p.mu.Unlock()
	}
	if !j.found { // or had, and its pack is stored already
		var err error
		if j.place, j.found, err = p.s.w.index.find(p.ctx, j.digest, p.s.mayUse); err != nil {
			return err
		}
	}
	p.stats.Chunks++
	if !j.found {
		if p.pack == nil {
			if err := p.newPack(); err != nil {
				return err
			}
		}
		j.place = p.pack.add(j.digest, j.stored, len(j.data))
		p.mu.Lock()
		p.local[j.digest] = j.place
		p.mu.Unlock()
		p.stats.NewChunks++
		p.stats.NewBytes += int64(len(j.data))
	}
	p.m.add(j.off, len(j.data), j.digest, j.place)
	if p.pack != nil && int64(len(p.pack.buf)) >= p.s.w.opts.PackSize {
		p.flush()
	}
	return nil
}

func (p *put) newPack() error {
	i, err := p.s.w.newID()
	if err != nil {
		return err
	}
	select {
	case buf := <-p.buffers:
		p.pack = newPack(i, buf)
		return nil
	case <-p.ctx.Done():
		return context.Cause(p.ctx)
	}
}

// flush uploads the pack in the background.
func (p *put) flush() {
	b := p.pack
	p.pack = nil
	buf := b.finish()
	p.stats.Packs++
	p.stats.Stored += int64(len(buf))
	p.uploads.Go(func() {
		err := p.s.w.store.Put(p.ctx, b.id.packKey(), int64(len(buf)), bytes.NewReader(buf))
		if err != nil {
			p.cancel(err)
			return
		}
		p.s.w.index.addPack(b.id, int64(len(buf)), b.entries)
		p.s.w.index.cache.put(b.id, b.entries)
		p.s.mu.Lock()
		p.s.usable[b.id] = true
		p.s.mu.Unlock()
		p.forget(b)
		p.buffers <- buf
	})
}

// forget takes a pack's chunks out of local; they are in the index now.
func (p *put) forget(b *packBuilder) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range b.entries {
		if p.local[e.digest].pack == b.id {
			delete(p.local, e.digest)
		}
	}
}

func (s *Session) putMap(ctx context.Context, m *Map, st *Stats) (string, error) {
	b := m.encode()
	name, stored, err := s.putContent(ctx, mapClass, sha256.Sum256(b), b)
	st.Stored += stored
	return name, err
}

// putContent puts an object that is named by d unless there is one with its bytes, and returns how
// many bytes it had to store.
func (s *Session) putContent(ctx context.Context, class string, d digest, b []byte) (string, int64, error) {
	name, err := s.existing(ctx, class, d, b)
	if err != nil || name != "" {
		return name, 0, err
	}
	nonce, err := s.w.newID()
	if err != nil {
		return "", 0, err
	}
	name = contentKey(class, d, nonce)
	return name, int64(len(b)), s.w.store.Put(ctx, name, int64(len(b)), bytes.NewReader(b))
}

// read cuts the blob and hands out its chunks.
func (p *put) read() error {
	r := cutReader{p: p}
	if p.blob.Grow != nil {
		return p.follow(&r)
	}
	holes, err := findHoles(p.blob.R)
	if err != nil {
		return err
	}
	defer holes.close()
	for pos := int64(0); pos < p.blob.Size; {
		data, err := holes.next(pos, p.blob.Size)
		if err != nil {
			return errs.Wrap(errs.InternalError, phase, "find holes of the blob", err)
		}
		if data-pos >= holeBlocks*block {
			r.hole()
			p.stats.HoleBytes += data - pos
			pos = data
			continue
		}
		n, err := r.read(pos, min(windowSize, p.blob.Size-pos))
		if err != nil {
			return err
		}
		pos += n
		if p.blob.Progress != nil {
			p.blob.Progress(pos)
		}
	}
	return r.finish()
}

// follow cuts a blob while it is written. Where chunks end does not depend on how much of
// it is there at a time.
func (p *put) follow(r *cutReader) error {
	for pos, done := int64(0), false; !done; {
		size, last, err := p.blob.Grow(p.ctx, pos)
		if err != nil {
			return err
		}
		if done = last; done {
			p.blob.Size = size
		} else {
			size &^= block - 1 // the rest of a block that is not whole comes with it
		}
		for pos < size {
			n, err := r.read(pos, min(windowSize, size-pos))
			if err != nil {
				return err
			}
			pos += n
		}
		if p.blob.Progress != nil {
			p.blob.Progress(pos)
		}
	}
	return r.finish()
}

// cutReader cuts a blob that comes in windows. What is between start and end of the
// window is not handed out yet; its last zeros bytes are blocks of zeros.
type cutReader struct {
	p   *put
	cut cutter

	win        *window
	off        int64 // of the window in the blob
	start, end int
	zeros      int
	inHole     bool // in a run of zeros that is long enough for a hole
}

// read reads and cuts the next piece, of size bytes.
func (r *cutReader) read(pos, size int64) (int64, error) {
	var buf []byte
	select {
	case buf = <-r.p.windows:
	case <-r.p.ctx.Done():
		return 0, context.Cause(r.p.ctx)
	}
	if buf == nil {
		buf = make([]byte, carryMax+windowSize)
	}
	w := &window{buf: buf, refs: 1}
	carry := 0
	if r.win != nil {
		carry = copy(buf, r.win.buf[r.start:r.end])
		r.p.release(r.win)
	}
	r.win, r.off, r.start, r.end = w, pos-int64(carry), 0, carry
	n := int(size)
	// A short read of a reader that says nothing is one too: the size was given.
	if k, err := r.p.blob.R.ReadAt(buf[carry:carry+n], pos); k < n {
		if err == nil || err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, errs.Wrap(errs.InternalError, phase, fmt.Sprintf("read the blob at %d", pos+int64(k)), err)
	}
	for r.end < carry+n {
		if err := r.block(min(block, carry+n-r.end)); err != nil {
			return 0, err
		}
	}
	return int64(n), nil
}

// block takes the next n bytes in.
func (r *cutReader) block(n int) error {
	b := r.win.buf[r.end : r.end+n]
	r.end += n
	if isZero(b) {
		if r.inHole {
			r.p.stats.HoleBytes += int64(n)
			r.start = r.end
			return nil
		}
		if r.zeros += n; r.zeros >= holeBlocks*block {
			return r.hole()
		}
		return nil
	}
	r.inHole = false
	// The zeros before it turn out to be content.
	for ; r.zeros > 0; r.zeros -= block {
		if r.cut.ends(zeroBlock[:]) {
			if err := r.emit(r.end - n - r.zeros + block); err != nil {
				return err
			}
		}
	}
	if r.cut.ends(b) {
		return r.emit(r.end)
	}
	return nil
}

// hole ends the chunk before the zeros at the end, of which there are enough for a hole.
func (r *cutReader) hole() error {
	at := max(r.end-r.zeros, r.start)
	r.p.stats.HoleBytes += int64(r.end - at)
	err := r.emit(at)
	r.cut.reset()
	r.start, r.zeros, r.inHole = r.end, 0, true
	return err
}

// finish ends the last chunk; zeros at the end are a hole of any length.
func (r *cutReader) finish() error {
	err := r.hole()
	if r.win != nil {
		r.p.release(r.win)
	}
	return err
}

// emit hands out what is before the byte at.
func (r *cutReader) emit(at int) error {
	if at == r.start {
		return nil
	}
	j := &job{off: r.off + int64(r.start), data: r.win.buf[r.start:at:at], win: r.win, done: make(chan struct{})}
	r.start = at
	r.win.mu.Lock()
	r.win.refs++
	r.win.mu.Unlock()
	select {
	case r.p.work <- j:
	case <-r.p.ctx.Done():
		return context.Cause(r.p.ctx)
	}
	r.p.ordered <- j // drained to the end even after an error
	return nil
}

// holeFinder finds holes of files; for anything else there are none.
type holeFinder struct{ f *os.File }

func findHoles(r io.ReaderAt) (holeFinder, error) {
	f, ok := r.(*os.File)
	if !ok {
		return holeFinder{}, nil
	}
	// A descriptor of our own, since looking for holes moves its offset.
	own, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return holeFinder{}, nil //nolint:nilerr // then they are read as zeros
	}
	return holeFinder{own}, nil
}

func (h holeFinder) close() {
	if h.f != nil {
		h.f.Close()
	}
}

// next is the first block at or after pos that may have data, or the size.
func (h holeFinder) next(pos, size int64) (int64, error) {
	if h.f == nil {
		return pos, nil
	}
	at, err := unix.Seek(int(h.f.Fd()), pos, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		return size, nil
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOTSUP):
		return pos, nil // the file system does not know
	case err != nil:
		return 0, err
	}
	return min(at&^(block-1), size), nil
}
