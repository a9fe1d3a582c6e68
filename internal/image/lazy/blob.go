package lazy

import (
	"bytes"
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// What a chunk is.
const (
	missing  = iota // to be fetched; a flight may be on its way
	filled          // in the data file, and said so in the state
	evicting        // being punched out; readers wait
)

// span is a run of chunks [i, j).
type span struct{ i, j int }

// blob is one data blob of the cache. Its chunks change under mu only:
//
//	missing → filled    a flight has written and noted it (flight.go)
//	filled → evicting   no reader is let through any more (evict.go)
//	evicting → missing  the hole is punched
type blob struct {
	c      *Cache
	digest string
	dir    string

	// op serialises what changes the blob as a whole: set-up, guarding, removal.
	op     sync.Mutex
	t      *table
	st     *state
	data   *os.File // opened before the mark: reads and writes make no events
	dev    device   // nil: nobody is stopped at reading; all chunks are there, or it is not in use
	gone   bool     // removed; look it up again
	broken bool     // it was in use while nobody guarded it

	mu      sync.Mutex
	chunk   []byte // missing, filled, evicting
	have    bitmap // chunk == filled
	left    int    // chunks not filled
	bytes   int64  // of filled chunks that are no holes
	flight  map[int]*flight
	failed  map[int]time.Time     // chunks of which nothing came until the deadline, and when that was
	wake    map[int]chan struct{} // evicting chunks
	touched []uint32              // seconds since the cache's epoch
	pins    map[uint64]span       // readers let through and perhaps not done
	unsure  bool                  // readers may have been let through that pins does not know
	streams [4]stream
	filler  Filler
	come    chan struct{} // closed when there is a filler
	asked   *ask          // Reopen is being asked for one
	used    time.Time
	refs    int // guarded by Cache.mu
	rec     []*Recorder

	stats stats
}

// device is what stops readers of a blob until their bytes are there.
type device interface {
	// path is the file to give to the kernel.
	path() string
	// mounted says whether anyone has the file open.
	mounted() bool
	// pinned and unpinned tell of changes in pins. The blob's mutex is held.
	pinned(key uint64, s span)
	unpinned(key uint64)
	// close stops serving. With forget the reader's guard goes too: all chunks
	// must be filled, or nobody may have the file open.
	close(forget bool)
}

func newBlob(c *Cache, digest string) *blob {
	return &blob{
		c: c, digest: digest, dir: c.blobDir(digest),
		flight: map[int]*flight{}, failed: map[int]time.Time{}, wake: map[int]chan struct{}{}, pins: map[uint64]span{}, come: make(chan struct{}),
	}
}

// setUp takes table and state into use. b.op is held.
func (b *blob) setUp(st *state, t *table, have bitmap) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.t, b.st = t, st
	b.chunk = make([]byte, t.n())
	b.touched = make([]uint32, t.n())
	b.have = newBitmap(t.n())
	now := b.c.seconds()
	b.left, b.bytes = 0, 0
	for i := range t.n() {
		b.touched[i] = now
		switch {
		case t.hole.has(i):
			b.chunk[i] = filled
			b.have.set(i)
		case have.has(i):
			b.chunk[i] = filled
			b.have.set(i)
			b.bytes += t.len(i)
		default:
			b.left++
		}
	}
	b.c.used.Add(b.bytes)
}

func (b *blob) setFiller(f Filler) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.filler == nil {
		close(b.come)
	}
	b.filler = f
}

// ask is one question to Reopen; all that wait for its answer take it.
type ask struct {
	done chan struct{}
	err  error
}

// getFiller waits for the filler of a blob that was taken over from a process
// that died: from Reopen, or from whoever opens the blob.
func (b *blob) getFiller(ctx context.Context) (Filler, error) {
	b.mu.Lock()
	f, q, mine := b.filler, b.asked, false
	if f == nil && q == nil && b.c.opts.Reopen != nil {
		q, mine = &ask{done: make(chan struct{})}, true
		b.asked = q
	}
	b.mu.Unlock()
	if f != nil {
		return f, nil
	}
	if mine {
		q.err = b.reopen(ctx)
		b.mu.Lock()
		b.asked = nil // if it failed, the next one asks again
		b.mu.Unlock()
		close(q.done)
	}
	var answered chan struct{}
	if q != nil {
		answered = q.done
	}
	select {
	case <-b.come:
	case <-answered:
	case <-ctx.Done():
		return nil, errs.Wrap(errs.DeadlineExceeded, phase, "wait for blob "+b.digest+" to be opened again", ctx.Err())
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.filler == nil {
		return nil, q.err
	}
	return b.filler, nil
}

func (b *blob) reopen(ctx context.Context) error {
	f, err := b.c.opts.Reopen(ctx, b.digest, b.t.size())
	if err != nil {
		return err
	}
	t, err := newTable(f, b.t.size())
	if err != nil {
		return err
	}
	if !t.is(b.t) {
		return errs.New(errs.ImageCorrupt, phase, "blob "+b.digest+" is cut in another way than before")
	}
	b.setFiller(f)
	return nil
}

// serve makes the chunks [i, j) present for one reader and, if it then is let
// through at once, pins them under key until unpin.
func (b *blob) serve(ctx context.Context, key uint64, owner string, i, j int) error {
	for !b.tryPin(key, i, j) {
		if err := b.ensure(ctx, owner, i, j, true); err != nil {
			return err
		}
	}
	return nil
}

// absent is how many of n bytes from off are not there.
func (b *blob) absent(off, n int64) (bytes int64) {
	i, j := b.t.chunks(off, n)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left == 0 {
		return 0
	}
	for k := i; k < j; k++ {
		if b.chunk[k] != filled {
			bytes += min(off+n, b.t.bounds[k+1]) - max(off, b.t.bounds[k])
		}
	}
	return bytes
}

// tryPin pins the chunks [i, j) if all are filled. From here until unpin none of
// them is evicted; key 0 is a reader that cannot be told from others.
func (b *blob) tryPin(key uint64, i, j int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := i; k < j; k++ {
		if b.chunk[k] != filled {
			return false
		}
	}
	now := b.c.seconds()
	for k := i; k < j; k++ {
		b.touched[k] = now
	}
	if b.c.opts.Limit <= 0 || b.dev == nil {
		return true
	}
	if key == 0 {
		b.unsure = true
	} else {
		b.pins[key] = span{i, j}
	}
	b.dev.pinned(key, span{i, j})
	return true
}

// unpin says that the reader is done with what it was let through for.
func (b *blob) unpin(key uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.pins[key]; ok {
		delete(b.pins, key)
		if b.dev != nil {
			b.dev.unpinned(key)
		}
	}
}

// ensure waits until the chunks [i, j) are filled, or were for a moment. Missing
// ones are fetched, neighbours together, each once however many wait.
func (b *blob) ensure(ctx context.Context, owner string, i, j int, urgent bool) error {
	b.mu.Lock()
	b.launch(owner, i, j, urgent)
	mine := map[*flight]bool{}
	for k := i; k < j; k++ {
		if f := b.flight[k]; f != nil {
			mine[f] = true
			if urgent {
				b.c.gate.hurry(f.place)
			}
		}
	}
	k := i
	for {
		for k < j && b.chunk[k] == filled {
			k++
		}
		if k == j {
			b.mu.Unlock()
			return nil
		}
		var wait chan struct{}
		f := b.flight[k]
		switch {
		case f != nil:
			wait = f.step
		case b.chunk[k] == evicting:
			wait = b.wake[k]
		default: // its flight has ended, or it was evicted since
			for f := range mine {
				if f.i <= k && k < f.j && f.err != nil {
					b.mu.Unlock()
					return f.err
				}
			}
			b.launch(owner, k, j, urgent)
			for x := k; x < j; x++ {
				if f := b.flight[x]; f != nil {
					mine[f] = true
				}
			}
			continue
		}
		b.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			return errs.Wrap(errs.DeadlineExceeded, phase, "wait for blob "+b.digest, ctx.Err())
		}
		b.mu.Lock()
	}
}

// launch starts flights for the missing chunks of [i, j), on an owner's account. b.mu is
// held.
func (b *blob) launch(owner string, i, j int, urgent bool) {
	for k := i; k < j; {
		if b.chunk[k] != missing || b.flight[k] != nil {
			k++
			continue
		}
		a, end, size := k, k, int64(0)
		for k < j && (b.chunk[k] == missing && b.flight[k] == nil || b.t.hole.has(k)) && (end == a || size+b.t.len(k) <= b.c.opts.MaxFetch) {
			if b.chunk[k] == missing {
				size += b.t.len(k)
				end = k + 1
			}
			k++
		}
		b.fly(owner, a, end, size, urgent)
	}
}

// note writes chunks that are filled now. b.mu is held.
func (b *blob) markFilled(i, j int) error {
	var grown int64
	for k := i; k < j; k++ {
		if b.chunk[k] == missing {
			b.have.set(k)
			grown += b.t.len(k)
		}
	}
	if err := b.st.note(b.have, i, j); err != nil {
		for k := i; k < j; k++ {
			if b.chunk[k] == missing {
				b.have.clear(k)
			}
		}
		return err
	}
	now := b.c.seconds()
	for k := i; k < j; k++ {
		if b.chunk[k] == missing {
			b.chunk[k] = filled
			b.touched[k] = now
			b.left--
			delete(b.flight, k)
		}
	}
	b.bytes += grown
	b.c.grow(grown)
	return nil
}

func (b *blob) snapshot() bitmap {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.have)
}

func (b *blob) complete() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left == 0
}

// save makes what is filled durable. b.op is held.
func (b *blob) save() error {
	if b.st == nil || b.data == nil {
		return nil
	}
	return b.st.save(b.data, b.snapshot)
}

// lease takes the file for us alone: while it is held, opening waits. It fails
// if anyone has the file open, a mount above all.
func lease(f *os.File) (release func(), ok bool) {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		return nil, false
	}
	return func() { unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK) }, true
}

func openRaw(path string) (bool, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return false, err
	}
	defer f.Close()
	release, ok := lease(f)
	if ok {
		release()
	}
	return !ok, nil
}

// stats are counted without locks.
type stats struct {
	read, fetched, ahead, evicted, hits, misses, failed, fetches atomic.Int64
}

func isDiskFull(err error) bool { return errors.Is(err, errs.DiskFull) }
