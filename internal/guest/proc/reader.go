package proc

import (
	"context"
	"io"

	"dsec/internal/guest/clock"
)

// maxPiece bounds what one Next returns.
const maxPiece = maxChunk

// Piece is a run of output, or a gap in it.
type Piece struct {
	Kind Kind
	Off  int64
	Data []byte // valid until the next call of Next or Close
	Gap  int64  // with Data nil: the bytes from Off to Gap are no longer kept
}

// Reader reads a log from given offsets. It is used by one goroutine.
type Reader struct {
	log    *Log
	pos    [kinds]int64
	follow bool
	signal chan struct{}
	pinned *chunk
	moved  clock.Instant // when it last took something, or got something to take
	waits  bool          // it has taken everything
	turn   Kind          // the kind to look at first
	buf    []byte        // for spilled bytes

	doubted bool
	doubt   clock.Instant // when it first seemed absent
}

// From says where a reader starts.
type From struct {
	Stdout, Stderr int64
	End            bool // only output from now on
	NoFollow       bool // end when what is kept has been read
}

// Read returns a reader. Offsets beyond the end wait for output to reach them.
func (l *Log) Read(from From) *Reader {
	r := &Reader{log: l, pos: [kinds]int64{from.Stdout, from.Stderr}, follow: !from.NoFollow, signal: make(chan struct{}, 1)}
	l.mu.Lock()
	defer l.mu.Unlock()
	for k := range r.pos {
		if from.End {
			r.pos[k] = l.streams[k].end
		}
	}
	r.moved = l.clock.Now()
	if l.readers == nil {
		l.readers = map[*Reader]struct{}{}
	}
	l.readers[r] = struct{}{}
	return r
}

func (r *Reader) wake() {
	select {
	case r.signal <- struct{}{}:
	default:
	}
}

// Next returns the next piece of any kind. It returns io.EOF when the process has
// finished (or, without follow, at once) and everything kept was read.
func (r *Reader) Next(ctx context.Context) (Piece, error) {
	for {
		p, ok, err := r.take()
		if ok || err != nil {
			return p, err
		}
		select {
		case <-r.signal:
		case <-ctx.Done():
			return Piece{}, ctx.Err()
		}
	}
}

// Ready is signalled when there may be something to read: for callers that wait for
// other things too, and then use TryNext.
func (r *Reader) Ready() <-chan struct{} { return r.signal }

// Follow says whether the writer may be held back for this reader. Without it a reader
// that falls behind gets a gap.
func (r *Reader) Follow(on bool) {
	r.log.mu.Lock()
	defer r.log.mu.Unlock()
	r.follow = on
	r.moved = r.log.clock.Now()
	if !on {
		r.log.unblock()
	}
}

// TryNext is Next that does not wait; ok is false when there is nothing now.
func (r *Reader) TryNext() (p Piece, ok bool) {
	p, ok, _ = r.take()
	return p, ok
}

func (r *Reader) take() (Piece, bool, error) {
	l := r.log
	l.mu.Lock()
	defer l.mu.Unlock()
	r.unpin()
	r.moved, r.waits, r.doubted = l.clock.Now(), false, false
	for range kinds {
		k := r.turn
		r.turn = (r.turn + 1) % kinds
		s := &l.streams[k]
		pos := r.pos[k]
		if pos >= s.end {
			continue
		}
		if start := s.start(); pos < start {
			r.pos[k] = start
			l.unblock()
			return Piece{Kind: k, Off: pos, Gap: start}, true, nil
		}
		c := s.find(pos)
		data, err := r.bytes(c, int(pos-c.off))
		if err != nil { // the spill file cannot be read: its bytes are lost
			r.pos[k] = c.end()
			l.unblock()
			return Piece{Kind: k, Off: pos, Gap: c.end()}, true, nil
		}
		r.pos[k] = pos + int64(len(data))
		l.unblock()
		return Piece{Kind: k, Off: pos, Data: data}, true, nil
	}
	if l.ended || l.discard || !r.follow {
		return Piece{}, false, io.EOF
	}
	r.waits = true
	return Piece{}, false, nil
}

// bytes returns c's bytes from i on. r.log.mu is held.
func (r *Reader) bytes(c *chunk, i int) ([]byte, error) {
	if c.slot < 0 {
		c.pins++
		r.pinned = c
		return c.buf[i:c.n:c.n], nil
	}
	if r.buf == nil {
		r.buf = make([]byte, maxPiece)
	}
	return r.buf[:c.n-i], r.log.spill.read(c.slot, i, r.buf[:c.n-i])
}

func (r *Reader) unpin() {
	if r.pinned != nil {
		r.pinned.pins--
		r.pinned = nil
	}
}

// Close detaches the reader.
func (r *Reader) Close() {
	l := r.log
	l.mu.Lock()
	defer l.mu.Unlock()
	r.unpin()
	delete(l.readers, r)
	l.discardUnused()
	l.unblock()
}

// find returns the chunk that holds offset pos, which the stream keeps.
func (s *stream) find(pos int64) *chunk {
	lo, hi := 0, len(s.chunks)-1
	for lo < hi {
		mid := (lo + hi + 1) / 2
		if s.chunks[mid].off <= pos {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	return s.chunks[lo]
}
