package edge

import (
	"sync"

	v1 "dsec/api/v1"
)

// feed is the numbered sequence of what changed on this edge, kept for a while so that
// whoever watches can go on after a break.
type feed struct {
	mu   sync.Mutex
	ring []change
	seq  uint64        // of the newest change; the first is 1
	wake chan struct{} // closed and replaced at each change
}

type change struct {
	sandbox *v1.Sandbox
	removed string
}

func newFeed(size int, start uint64) *feed {
	return &feed{ring: make([]change, size), seq: start, wake: make(chan struct{})}
}

func (f *feed) changed(v v1.Sandbox) { f.add(change{sandbox: &v}) }
func (f *feed) removed(id string)    { f.add(change{removed: id}) }

func (f *feed) add(c change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seq++
	f.ring[f.seq%uint64(len(f.ring))] = c
	close(f.wake)
	f.wake = make(chan struct{})
}

// since returns up to limit changes after seq, the number of the last one returned, and
// a channel that is closed when there is more. ok is false if some are not kept any more.
func (f *feed) since(seq uint64, limit int) (changes []change, last uint64, wake <-chan struct{}, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if seq > f.seq || f.seq-seq > uint64(len(f.ring)) {
		return nil, f.seq, f.wake, false
	}
	for last = seq; last < f.seq && len(changes) < limit; {
		last++
		c := f.ring[last%uint64(len(f.ring))]
		if c.sandbox == nil && c.removed == "" { // before the start of this process
			return nil, f.seq, f.wake, false
		}
		changes = append(changes, c)
	}
	return changes, last, f.wake, true
}

func (f *feed) now() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seq
}
