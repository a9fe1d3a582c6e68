package chunk

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sort"
	"sync"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"

	"github.com/klauspost/compress/zstd"
)

// ReaderOptions of a Reader. Zero values mean the defaults.
type ReaderOptions struct {
	Parallel int     // reads from the store at once, per call (4)
	MaxRead  int64   // bytes of one read from the store (4 MiB)
	MaxGap   int64   // unwanted bytes that are read to join two reads (32 KiB)
	Damage   *Damage // is told of packs that are damaged (nobody)
}

// Reader fetches chunks. It has no state but where moved chunks went, and may be used
// concurrently; each call holds up to Parallel × (MaxRead + 256 KiB) of memory.
type Reader struct {
	store object.Store
	opts  ReaderOptions
	bufs  sync.Pool // of *[]byte
	decs  chan *zstd.Decoder

	mu    sync.Mutex
	moved map[id][]*moved // of packs that were found to be gone
}

// NewReader returns a Reader of what is in the store.
func NewReader(store object.Store, opts ReaderOptions) (*Reader, error) {
	if opts.Parallel == 0 {
		opts.Parallel = 4
	}
	if opts.MaxRead == 0 {
		opts.MaxRead = 4 << 20
	}
	if opts.MaxGap == 0 {
		opts.MaxGap = 32 << 10
	}
	r := &Reader{store: store, opts: opts, moved: map[id][]*moved{}, decs: make(chan *zstd.Decoder, runtime.GOMAXPROCS(0)+opts.Parallel)}
	for range cap(r.decs) {
		d, err := newDecoder()
		if err != nil {
			return nil, err
		}
		r.decs <- d
	}
	return r, nil
}

func newDecoder() (*zstd.Decoder, error) {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxChunk), zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "make a decompressor", err)
	}
	return d, nil
}

// Read fetches the chunks i to j-1 of m and calls each once per chunk with its number
// and its bytes, which are verified and valid during the call. It may be called from
// several goroutines at once and in any order; its first error ends the Read.
//
// Errors: store_corrupt (what is stored is damaged or missing; not retryable), the
// store's own (retryable where they say so), and each's. A chunk for which each was not
// called was not read.
func (r *Reader) Read(ctx context.Context, m *Map, i, j int, each func(k int, data []byte) error) error {
	if i < 0 || j > m.Len() || i > j {
		return errs.New(errs.BadRequest, phase, fmt.Sprintf("chunks %d to %d of a map of %d", i, j, m.Len()))
	}
	wants := make([]want, 0, j-i)
	for k := i; k < j; k++ {
		wants = append(wants, want{k: k, place: m.place(k)})
	}
	return r.read(ctx, m, wants, 0, each)
}

// Verify reads all chunks of a layer's data.
func (r *Reader) Verify(ctx context.Context, m *Map) error {
	return r.Read(ctx, m, 0, m.Len(), func(int, []byte) error { return nil })
}

// want is chunk k of a map, and where it is.
type want struct {
	k int
	place
}

// span is some wants that are read at once.
type span struct {
	wants    []want
	off, end uint32 // in the pack
}

func (r *Reader) read(ctx context.Context, m *Map, wants []want, hops int, f func(int, []byte) error) error {
	return each(ctx, r.opts.Parallel, r.spans(wants), func(ctx context.Context, s span) error {
		err := r.readSpan(ctx, m, s, f)
		if !errors.Is(err, errPackGone) {
			return err
		}
		if hops == maxHops {
			return corrupt(s.wants[0].pack.packKey(), "its chunks have moved in a circle", nil)
		}
		wants, err := r.follow(ctx, s.wants)
		if err != nil {
			return err
		}
		return r.read(ctx, m, wants, hops+1, f)
	})
}

// spans joins what is near to each other in a pack.
func (r *Reader) spans(wants []want) []span {
	sort.SliceStable(wants, func(a, b int) bool {
		x, y := &wants[a], &wants[b]
		if x.pack != y.pack {
			// Packs in the order of the blob, as far as that says anything.
			return string(x.pack[:]) < string(y.pack[:])
		}
		return x.off < y.off
	})
	var all []span
	for i, w := range wants {
		end := w.off + w.stored
		if n := len(all); n > 0 {
			s := &all[n-1]
			if s.wants[0].pack == w.pack && int64(w.off)-int64(s.end) <= r.opts.MaxGap && int64(max(s.end, end)-s.off) <= r.opts.MaxRead {
				s.wants = wants[i-len(s.wants) : i+1]
				s.end = max(s.end, end)
				continue
			}
		}
		all = append(all, span{wants: wants[i : i+1], off: w.off, end: end})
	}
	sort.SliceStable(all, func(a, b int) bool { return all[a].wants[0].k < all[b].wants[0].k })
	return all
}

var errPackGone = errors.New("the pack is gone")

// readSpan reads and hands out a span. A chunk that is damaged is read once more, alone,
// since it may have been so on the way only.
func (r *Reader) readSpan(ctx context.Context, m *Map, s span, f func(int, []byte) error) error {
	buf, err := r.fetch(ctx, s)
	if buf != nil {
		defer r.bufs.Put(buf)
	}
	if err != nil {
		return r.noted(s, err)
	}
	dec := <-r.decs
	defer func() { r.decs <- dec }()
	out := r.buffer(maxChunk)
	defer r.bufs.Put(out)
	base := int(s.off)
	if s.off == headerLen {
		base = 0
	}
	for _, w := range s.wants {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.StoreUnavailable, phase, "read chunks", err)
		}
		stored := (*buf)[int(w.off)-base:][:w.stored]
		data, err := unpack(dec, &m.chunks[w.k], m.length(&m.chunks[w.k]), w.place, stored, *out)
		if err != nil {
			again, ferr := r.fetch(ctx, span{wants: []want{w}, off: w.off, end: w.off + w.stored})
			if again == nil || ferr != nil {
				if ferr != nil && !errors.Is(ferr, errPackGone) && !errors.Is(ferr, errs.StoreCorrupt) {
					return ferr
				}
				return r.noted(s, err)
			}
			defer r.bufs.Put(again)
			stored = (*again)[len(*again)-int(w.stored):]
			if data, err = unpack(dec, &m.chunks[w.k], m.length(&m.chunks[w.k]), w.place, stored, *out); err != nil {
				return r.noted(s, err)
			}
		}
		if err := f(w.k, data); err != nil {
			return err
		}
	}
	return nil
}

// noted has writers not rely on the pack of s if err says that it is damaged.
func (r *Reader) noted(s span, err error) error {
	if errors.Is(err, errs.StoreCorrupt) {
		r.opts.Damage.note(s.wants[0].pack)
	}
	return err
}

func (r *Reader) buffer(n int) *[]byte {
	p, ok := r.bufs.Get().(*[]byte)
	if !ok || cap(*p) < n {
		b := make([]byte, n, max(n, maxChunk))
		p = &b
	}
	*p = (*p)[:n]
	return p
}

// fetch reads a span; with the first chunk of a pack its header too.
func (r *Reader) fetch(ctx context.Context, s span) (*[]byte, error) {
	pack := s.wants[0].pack
	off := int64(s.off)
	if s.off == headerLen {
		off = 0
	}
	n := int64(s.end) - off
	for last := false; ; last = true {
		rc, err := r.store.Get(ctx, pack.packKey(), off, n)
		if errors.Is(err, errs.ObjectNotFound) {
			return nil, errPackGone
		}
		if err != nil {
			return nil, err
		}
		buf := r.buffer(int(n))
		_, err = io.ReadFull(rc, *buf)
		rc.Close()
		switch {
		case err == io.EOF, err == io.ErrUnexpectedEOF:
			r.bufs.Put(buf)
			return nil, corrupt(pack.packKey(), "it is shorter than the map says", nil)
		case err != nil:
			r.bufs.Put(buf)
			return nil, errs.Wrap(errs.StoreUnavailable, phase, "read pack "+pack.String(), err)
		}
		if off > 0 {
			return buf, nil
		}
		if err := checkHeader(pack, (*buf)[:headerLen]); err != nil {
			r.bufs.Put(buf)
			if last {
				return nil, err
			}
			continue
		}
		return buf, nil
	}
}

// unpack returns the verified bytes of a chunk, in out or in stored.
func unpack(dec *zstd.Decoder, c *mapChunk, length int, p place, stored, out []byte) ([]byte, error) {
	data := stored
	if len(stored) != length {
		var err error
		data, err = dec.DecodeAll(stored, out[:0:length])
		if err != nil || len(data) != length {
			return nil, corrupt(p.pack.packKey(), fmt.Sprintf("the chunk at %d is damaged", p.off), err)
		}
	}
	if sha256.Sum256(data) != c.digest {
		return nil, corrupt(p.pack.packKey(), fmt.Sprintf("the chunk at %d is damaged", p.off), nil)
	}
	return data, nil
}

// follow finds where chunks of a pack that is gone went.
func (r *Reader) follow(ctx context.Context, wants []want) ([]want, error) {
	from := wants[0].pack
	r.mu.Lock()
	tables, known := r.moved[from]
	r.mu.Unlock()
	if !known {
		var err error
		if tables, err = loadMoved(ctx, r.store, from); err != nil {
			return nil, err
		}
		// Where several lead, one that leads to a pack which is there, or was moved on.
		if len(tables) > 1 {
			if tables, err = r.alive(ctx, tables); err != nil {
				return nil, err
			}
		}
		if len(tables) > 0 {
			r.mu.Lock()
			r.moved[from] = tables
			r.mu.Unlock()
		}
	}
	now := make([]want, 0, len(wants))
next:
	for _, w := range wants {
		for _, t := range tables {
			if off, ok := t.find(w.off); ok {
				w.pack, w.off = t.to, off
				now = append(now, w)
				continue next
			}
		}
		return nil, corrupt(from.packKey(), "it is missing", nil)
	}
	return now, nil
}

func (r *Reader) alive(ctx context.Context, tables []*moved) ([]*moved, error) {
	var good []*moved
	for _, t := range tables {
		_, err := r.store.Stat(ctx, t.to.packKey())
		if errors.Is(err, errs.ObjectNotFound) {
			var on []*moved
			if on, err = loadMoved(ctx, r.store, t.to); err == nil && len(on) == 0 {
				continue
			}
		}
		if err != nil {
			return nil, err
		}
		good = append(good, t)
	}
	return good, nil
}
