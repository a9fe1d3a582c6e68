package lazy

// stream is one reader that goes forward through a blob. Readers are not told
// apart: what counts is where the next read would be.
type stream struct {
	first int // chunk at which the reader began
	next  int // chunk at which the reader goes on
	ahead int // chunks before this one have been asked for
	age   uint32
}

// firstWindow is how far a reader must have come for anything to be fetched ahead of it,
// unless it is known what belongs together: then as much is fetched with its beginning.
const firstWindow = 512 << 10

// observe looks at a read of n bytes from off and fetches ahead of it what belongs to
// it, or, if it goes on where another one ended, what is next, on its owner's account.
func (b *blob) observe(owner string, off, n int64) {
	limit := b.c.opts.Readahead
	i, j := b.t.chunks(off, n)
	if limit <= 0 || i == j {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left == 0 {
		return
	}
	last := b.t.n() // nothing from this chunk on is fetched
	if g, ok := b.filler.(Grouped); ok {
		if _, end := g.Group(off); end > 0 {
			_, last = b.t.chunks(off, end-off)
			last = max(last, j)
			if end-off <= min(firstWindow, limit) {
				b.fetchAhead(owner, i, j, last) // with what is waited for, by one fetch
				return
			}
		}
	}
	s := b.follow(i, j)
	if s == nil {
		return
	}
	// As much as it has read: most files are small, and most readers of large ones stop early.
	window := min(b.t.bounds[j]-b.t.bounds[s.first], limit)
	if window < min(firstWindow, limit) || s.ahead >= last || b.t.bounds[s.ahead]-b.t.bounds[j] >= window/2 {
		return
	}
	end := s.ahead
	for end < last && b.t.bounds[end]-b.t.bounds[j] < window {
		end++
	}
	from := s.ahead
	s.ahead = end
	b.fetchAhead(owner, from, from, end)
}

// follow returns the reader who goes on with a read of the chunks [i, j); nil if it is a
// new one, or still in a chunk that it had begun. b.mu is held.
func (b *blob) follow(i, j int) *stream {
	var s, old *stream
	newest := uint32(0)
	for k := range b.streams {
		x := &b.streams[k]
		if x.next > 0 && i <= x.next && x.next <= j || x.next == i && i > 0 {
			s = x
		}
		if old == nil || x.age < old.age {
			old = x
		}
		newest = max(newest, x.age)
	}
	if s == nil {
		*old = stream{first: i, next: j, ahead: j, age: newest + 1}
		return nil
	}
	s.age = newest + 1
	if j <= s.next {
		return nil
	}
	s.next, s.ahead = j, max(s.ahead, j)
	return s
}

// fetchAhead begins to fetch the chunks [i, j), if not too much waits already; those before
// k are waited for. b.mu is held.
func (b *blob) fetchAhead(owner string, i, k, j int) {
	if i >= j || b.c.gate.waiting() >= b.c.opts.Queue {
		return
	}
	for x := k; x < j; x++ {
		if b.chunk[x] == missing && b.flight[x] == nil {
			b.stats.ahead.Add(b.t.len(x))
		}
	}
	b.launch(owner, i, j, false)
}
