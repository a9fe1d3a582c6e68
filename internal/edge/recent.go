package edge

import "iter"

// recent remembers the last ids that were put into it.
type recent struct {
	ids  map[string]struct{}
	ring []string // grows up to most, then next is the oldest
	most int
	next int
}

func newRecent(most int) *recent { return &recent{ids: map[string]struct{}{}, most: most} }

func (r *recent) add(id string) {
	if r.has(id) {
		return
	}
	r.ids[id] = struct{}{}
	if len(r.ring) < r.most {
		r.ring = append(r.ring, id)
		return
	}
	delete(r.ids, r.ring[r.next])
	r.ring[r.next] = id
	r.next = (r.next + 1) % r.most
}

func (r *recent) has(id string) bool {
	_, ok := r.ids[id]
	return ok
}

// all yields the ids, the oldest first.
func (r *recent) all() iter.Seq[string] {
	return func(yield func(string) bool) {
		for i := range r.ring {
			if !yield(r.ring[(r.next+i)%len(r.ring)]) {
				return
			}
		}
	}
}
