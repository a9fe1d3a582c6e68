package proc

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dsec/internal/guest/clock"
)

// Kind is an output stream of a process.
type Kind uint8

// Kinds. A terminal has one stream, which shares its place with stdout.
const (
	Stdout Kind = iota
	Stderr
	kinds
)

// Sizes of the output log.
const (
	DefaultLimit = 1 << 20  // bytes of output kept in memory
	minLimit     = 4 << 10  // what a smaller limit means
	maxLimit     = 64 << 20 // what a larger limit means
	maxChunk     = 64 << 10
	minChunk     = 1 << 10
	firstRead    = 512
)

// chunk is a run of one kind's bytes: in memory, or in a slot of the spill file.
type chunk struct {
	off  int64 // of its first byte in the kind
	n    int   // bytes written; they never change afterwards
	buf  []byte
	pins int // readers that hold a slice of buf
	slot int // in the spill file; -1: in memory
}

func (c *chunk) end() int64 { return c.off + int64(c.n) }

// stream is one kind's part of a log.
type stream struct {
	chunks []*chunk // oldest first; spilled ones before those in memory
	end    int64    // bytes written in all
	mem    int      // bytes allocated
}

// start is the oldest offset that is still kept.
func (s *stream) start() int64 {
	if len(s.chunks) == 0 {
		return s.end
	}
	return s.chunks[0].off
}

// Log is the append-only output of one process, with byte offsets for each kind.
//
// A log keeps its last Limit bytes in memory and the bytes before those in a spill file
// up to its own limit; older ones are dropped, from the kind that uses more. Writing
// never waits for readers, but for one case: while a reader that still moves would lose
// bytes to the cap, the writer is told to come back later (see stall).
type Log struct {
	mu      sync.Mutex
	streams [kinds]stream
	limit   int
	free    []*chunk // recycled full-size buffers, while output flows
	spill   *spill
	readers map[*Reader]struct{}
	blocked bool          // a writer waits for a reader to move
	ended   bool          // the process has exited and its pipes were drained
	held    bool          // who started the process has not yet looked at it
	doomed  bool          // its process is forgotten: keep nothing when nobody reads it
	discard bool          // keep nothing
	room    chan struct{} // closed when writers may try again; nil: nobody waits
	stall   time.Duration // after which a reader that does not move is treated as absent

	lastWrite atomic.Int64 // a clock.Instant
	clock     *clock.Clock
}

func newLog(limit, spillLimit int64, spillDir string, stall time.Duration, c *clock.Clock) *Log {
	l := &Log{stall: stall, clock: c, held: true}
	switch {
	case limit == 0:
		l.limit = DefaultLimit
	default:
		l.limit = int(min(max(limit, minLimit), maxLimit))
	}
	if spillLimit > 0 {
		l.spill = &spill{dir: spillDir, slots: int(min((spillLimit+maxChunk-1)/maxChunk, 1<<20))}
	}
	return l
}

// Sizes returns the bytes written of each kind, kept or not.
func (l *Log) Sizes() (stdout, stderr int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.streams[Stdout].end, l.streams[Stderr].end
}

// Kept returns the offsets from which the output is still kept.
func (l *Log) Kept() (stdout, stderr int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.streams[Stdout].start(), l.streams[Stderr].start()
}

// isHeld says whether who started the process still looks at it.
func (l *Log) isHeld() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held
}

// cost is what keeping the log takes: memory, and a descriptor counts as some.
func (l *Log) cost() int {
	n := l.Memory()
	if l.spill != nil {
		n += maxChunk
	}
	return n
}

// Memory returns the bytes that the log holds in memory.
func (l *Log) Memory() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.free) * maxChunk
	for i := range l.streams {
		n += l.streams[i].mem
	}
	return n
}

// fillState is what fill found.
type fillState int

const (
	fillMore  fillState = iota // there may be more to read
	fillEmpty                  // nothing now
	fillEOF                    // the other end is closed, or broken
	fillFull                   // a reader needs time: wait for room
)

// fill reads once from fd, which does not block, into the log. force does not wait
// for readers: it is used to drain a pipe after an exit. most bounds the read (0: no bound).
func (l *Log) fill(k Kind, fd int, force bool, most int) (int, fillState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &l.streams[k]
	if l.discard {
		var sink [4096]byte
		n, state := readFD(fd, sink[:])
		s.end += int64(n)
		return n, state
	}
	var tail *chunk
	if len(s.chunks) > 0 {
		tail = s.chunks[len(s.chunks)-1]
	}
	if tail == nil || tail.slot >= 0 || tail.n == len(tail.buf) {
		if tail == nil {
			// Most processes write little or nothing: a buffer is made only when
			// there are bytes for it.
			var small [firstRead]byte
			b := small[:]
			if most > 0 && most < len(b) {
				b = b[:most]
			}
			n, state := readFD(fd, b)
			if n > 0 {
				l.appendLocked(k, b[:n])
			}
			return n, state
		}
		size := min(max(2*len(tail.buf), minChunk), maxChunk, chunkFor(l.limit))
		if !l.makeRoom(size, force) {
			return 0, fillFull
		}
		tail = l.addChunk(s, size)
	}
	b := tail.buf[tail.n:]
	if most > 0 && most < len(b) {
		b = b[:most]
	}
	n, state := readFD(fd, b)
	if n > 0 {
		l.wrote(s, tail, n)
	}
	return n, state
}

// chunkFor is the largest chunk of a log with this limit: several must fit.
func chunkFor(limit int) int {
	c := minChunk
	for c*2 <= limit/4 && c < maxChunk {
		c *= 2
	}
	return c
}

// Append adds bytes that do not come from a pipe, such as the guest's own message about
// a command that cannot be started.
func (l *Log) Append(k Kind, p []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.appendLocked(k, p)
}

func (l *Log) appendLocked(k Kind, p []byte) {
	s := &l.streams[k]
	for len(p) > 0 {
		var tail *chunk
		if len(s.chunks) > 0 {
			tail = s.chunks[len(s.chunks)-1]
		}
		if tail == nil || tail.slot >= 0 || tail.n == len(tail.buf) {
			size := minChunk
			if len(p) < firstRead {
				size = firstRead
			}
			l.makeRoom(size, true)
			tail = l.addChunk(s, size)
		}
		n := copy(tail.buf[tail.n:], p)
		l.wrote(s, tail, n)
		p = p[n:]
	}
}

// addChunk appends an empty chunk to s. Its buffer counts against the limit at once.
func (l *Log) addChunk(s *stream, size int) *chunk {
	var c *chunk
	if n := len(l.free); size == maxChunk && n > 0 {
		c = l.free[n-1]
		l.free = l.free[:n-1]
		*c = chunk{buf: c.buf}
	} else {
		c = &chunk{buf: make([]byte, size)}
	}
	c.off, c.slot = s.end, -1
	s.chunks = append(s.chunks, c)
	s.mem += len(c.buf)
	return c
}

// wrote accounts n new bytes at the end of tail and wakes the readers.
func (l *Log) wrote(s *stream, tail *chunk, n int) {
	tail.n += n
	s.end += int64(n)
	now := l.clock.Now()
	l.lastWrite.Store(int64(now))
	for r := range l.readers {
		if r.waits { // it had everything: its time starts now
			r.waits, r.moved = false, now
		}
		r.wake()
	}
}

// makeRoom spills or drops old chunks until size more bytes fit in memory. It does not
// drop what a moving reader still needs: then it returns false, or with force lets the
// log grow beyond its limit.
func (l *Log) makeRoom(size int, force bool) bool {
	for {
		s, k := &l.streams[Stdout], Stdout
		if l.streams[Stderr].mem > s.mem {
			s, k = &l.streams[Stderr], Stderr
		}
		if l.streams[Stdout].mem+l.streams[Stderr].mem+size <= l.limit || s.mem == 0 {
			return true
		}
		i := 0 // the oldest in memory
		for s.chunks[i].slot >= 0 {
			i++
		}
		c := s.chunks[i]
		if l.spill != nil {
			if slot := l.spill.take(); slot >= 0 {
				if l.spill.write(slot, c.buf[:c.n]) == nil {
					c.slot = slot
					l.giveUp(s, c)
					continue
				}
				// The disk is full or broken: the bytes are dropped instead.
				l.spill.fail()
			}
		}
		// The oldest kept goes: it may be on the disk.
		old := s.chunks[0]
		if l.needed(k, old) {
			if force {
				return true
			}
			l.blocked = true
			return false
		}
		l.dropFirst(s)
	}
}

// needed reports whether a reader that still moves has not yet had all of c.
func (l *Log) needed(k Kind, c *chunk) bool {
	for r := range l.readers {
		if r.follow && r.pos[k] < c.end() && !r.absent(l.stall) {
			return true
		}
	}
	return false
}

// absent says whether r has not moved for so long, and still does not a little later: after
// a pause of the sandbox the first look may come before the clock was told of it.
func (r *Reader) absent(stall time.Duration) bool {
	c := r.log.clock
	switch {
	case c.Since(r.moved) < stall:
		r.doubted = false
		return false
	case !r.doubted:
		r.doubted, r.doubt = true, c.Now()
		return false
	}
	return c.Since(r.doubt) >= min(stall, clock.Patience)
}

// giveUp frees c's memory; a reader that holds a slice of it keeps it alive.
func (l *Log) giveUp(s *stream, c *chunk) {
	s.mem -= len(c.buf)
	if c.pins == 0 && len(c.buf) == maxChunk && len(l.free) < 4 && !l.ended {
		l.free = append(l.free, &chunk{buf: c.buf})
	}
	c.buf = nil
}

func (l *Log) dropFirst(s *stream) {
	c := s.chunks[0]
	s.chunks[0] = nil
	s.chunks = s.chunks[1:]
	if c.slot >= 0 {
		l.spill.put(c.slot)
		return
	}
	l.giveUp(s, c)
}

// waitRoom blocks until a reader moved, or one may count as absent meanwhile.
func (l *Log) waitRoom() {
	l.mu.Lock()
	if !l.blocked {
		l.mu.Unlock()
		return
	}
	if l.room == nil {
		l.room = make(chan struct{})
	}
	room := l.room
	l.mu.Unlock()
	t := time.NewTimer(min(l.stall, clock.Patience))
	defer t.Stop()
	select {
	case <-room:
	case <-t.C:
	}
}

// unblock lets waiting writers try again. l.mu is held.
func (l *Log) unblock() {
	l.blocked = false
	if l.room != nil {
		close(l.room)
		l.room = nil
	}
}

// end marks that the process is finished: readers end after what is kept now. Bytes of
// descendants may still be added.
func (l *Log) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	l.free = nil
	for i := range l.streams {
		l.streams[i].shrink()
	}
	for r := range l.readers {
		r.wake()
	}
	l.unblock()
}

// shrink gives back what the last chunk has too much. A reader may hold the old buffer.
func (s *stream) shrink() {
	if len(s.chunks) == 0 {
		return
	}
	c := s.chunks[len(s.chunks)-1]
	if c.slot >= 0 || c.n > len(c.buf)/2 {
		return
	}
	buf := make([]byte, c.n)
	copy(buf, c.buf)
	s.mem -= len(c.buf) - len(buf)
	c.buf = buf
}

// trim gives back buffers that are only kept for speed.
func (l *Log) trim() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.free = nil
}

// Discard drops everything, and what will still be written, once nobody reads it.
func (l *Log) Discard() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.doomed = true
	l.discardUnused()
}

// discardUnused does what Discard asked for, if it can be done now. l.mu is held.
func (l *Log) discardUnused() {
	if !l.doomed || l.held || l.discard || len(l.readers) > 0 {
		return
	}
	l.discard = true
	l.free = nil
	for i := range l.streams {
		for len(l.streams[i].chunks) > 0 {
			l.dropFirst(&l.streams[i])
		}
	}
	if l.spill != nil {
		l.spill.close()
	}
	l.unblock()
}

// release ends the hold that a log begins with.
func (l *Log) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = false
	l.discardUnused()
}

// readFD reads once.
func readFD(fd int, b []byte) (int, fillState) {
	for {
		n, err := syscall.Read(fd, b)
		switch {
		case n > 0:
			// Even after a short read: readiness is reported once, and the end of
			// the pipe may have been part of the same report.
			return n, fillMore
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, fillEmpty
		default:
			return 0, fillEOF
		}
	}
}
