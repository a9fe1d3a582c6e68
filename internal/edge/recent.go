package edge

import (
	"iter"

	v1 "dsec/api/v1"
)

// recent remembers the last ids that were put into it, and how each ended.
type recent struct {
	ids  map[string]v1.Ending
	ring []string // grows up to most, then next is the oldest
	most int
	next int
}

func newRecent(most int) *recent { return &recent{ids: map[string]v1.Ending{}, most: most} }

// add remembers id; how one ended that is known already stays what was said first.
func (r *recent) add(id string, how v1.Ending) {
	if _, ok := r.ids[id]; ok {
		return
	}
	r.ids[id] = how
	if len(r.ring) < r.most {
		r.ring = append(r.ring, id)
		return
	}
	delete(r.ids, r.ring[r.next])
	r.ring[r.next] = id
	r.next = (r.next + 1) % r.most
}

func (r *recent) get(id string) (v1.Ending, bool) {
	how, ok := r.ids[id]
	return how, ok
}

// all yields the ids, the oldest first.
func (r *recent) all() iter.Seq2[string, v1.Ending] {
	return func(yield func(string, v1.Ending) bool) {
		for i := range r.ring {
			id := r.ring[(r.next+i)%len(r.ring)]
			if !yield(id, r.ids[id]) {
				return
			}
		}
	}
}
