package lazy

// stream is one reader that goes forward through a blob. Readers are not told
// apart: what counts is where the next read would be.
type stream struct {
	first int // chunk at which the reader began
	next  int // chunk at which the reader goes on
	ahead int // chunks before this one have been asked for
	age   uint32
}

// firstWindow is how far a reader must have come for anything to be fetched ahead of it.
const firstWindow = 512 << 10

// observe looks at a read of the chunks [i, j) and fetches ahead of it if it goes
// on where another one ended. It returns the bytes it began to fetch.
func (b *blob) observe(i, j int) int64 {
	limit := b.c.opts.Readahead
	if limit <= 0 || i == j {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left == 0 {
		return 0
	}
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
		return 0
	}
	s.age = newest + 1
	if j <= s.next {
		return 0 // the rest of a chunk it had begun
	}
	s.next, s.ahead = j, max(s.ahead, j)
	// As much as it has read: what lies behind a file's end, which nothing here knows, is not
	// wanted, and most files are small.
	window := min(b.t.bounds[j]-b.t.bounds[s.first], limit)
	if window < min(firstWindow, limit) {
		return 0
	}
	n := b.t.n()
	if s.ahead >= n || b.t.bounds[s.ahead]-b.t.bounds[j] >= window/2 || b.c.gate.waiting() >= b.c.opts.Queue {
		return 0
	}
	end := s.ahead
	for end < n && b.t.bounds[end]-b.t.bounds[j] < window {
		end++
	}
	started := b.launch(s.ahead, end, false)
	s.ahead = end
	b.stats.ahead.Add(started)
	return started
}
