package container

import (
	"errors"
	"sync"
)

// rangeSize is how many uids and gids each sandbox has.
const rangeSize = 1 << 16

// ranges hands out disjoint id ranges to sandboxes. A range returns to the pool when its
// sandbox is gone, last in the queue, so that it is reused as late as possible.
type ranges struct {
	mu    sync.Mutex
	first uint32
	next  uint32 // never used so far
	free  []uint32
	used  map[uint32]string // by whom
}

func newRanges(first uint32) *ranges {
	return &ranges{first: first, next: first, used: map[uint32]string{}}
}

var errNoRange = errors.New("all id ranges are in use")

// take returns the first id of a free range, which is then the sandbox's.
func (r *ranges) take(sandbox string) (uint32, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.next <= 1<<32-2*rangeSize {
		id := r.next
		r.next += rangeSize
		if _, used := r.used[id]; !used {
			r.used[id] = sandbox
			return id, nil
		}
	}
	if len(r.free) == 0 {
		return 0, errNoRange
	}
	id := r.free[0]
	r.free = r.free[1:]
	r.used[id] = sandbox
	return id, nil
}

// claim marks a range as used by an adopted sandbox.
func (r *ranges) claim(id uint32, sandbox string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.used[id] = sandbox
}

// ownerOf is the sandbox that has an id; "": none.
func (r *ranges) ownerOf(id uint32) string {
	if id < r.first {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.used[id-(id-r.first)%rangeSize]
}

// put gives a range back.
func (r *ranges) put(id uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, used := r.used[id]; used {
		delete(r.used, id)
		if id < r.next { // else take comes to it anyway
			r.free = append(r.free, id)
		}
	}
}
