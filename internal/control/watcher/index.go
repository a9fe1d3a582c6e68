package watcher

import (
	"slices"
	"strings"

	v1 "dsec/api/v1"
)

// chunkMax bounds how much an insertion moves.
const chunkMax = 512

// index holds entries ordered by id, in sorted chunks: insertion and removal cost
// one binary search and a short move, a page costs its length.
type index struct {
	chunks [][]*entry
	n      int
}

func byID(e *entry, id string) int { return strings.Compare(e.sb.ID, id) }

// chunk returns the position of the chunk that id belongs in.
func (x *index) chunk(id string) int {
	i, found := slices.BinarySearchFunc(x.chunks, id, func(c []*entry, id string) int { return byID(c[0], id) })
	if !found && i > 0 {
		i--
	}
	return i
}

func (x *index) insert(e *entry) {
	x.n++
	if len(x.chunks) == 0 {
		x.chunks = [][]*entry{{e}}
		return
	}
	i := x.chunk(e.sb.ID)
	c := x.chunks[i]
	at, _ := slices.BinarySearchFunc(c, e.sb.ID, byID)
	c = slices.Insert(c, at, e)
	x.chunks[i] = c
	if len(c) > chunkMax {
		half := len(c) / 2
		x.chunks[i] = slices.Clip(c[:half])
		x.chunks = slices.Insert(x.chunks, i+1, slices.Clone(c[half:]))
	}
}

func (x *index) remove(id string) {
	if len(x.chunks) == 0 {
		return
	}
	i := x.chunk(id)
	at, found := slices.BinarySearchFunc(x.chunks[i], id, byID)
	if !found {
		return
	}
	x.n--
	x.chunks[i] = slices.Delete(x.chunks[i], at, at+1)
	if len(x.chunks[i]) == 0 {
		x.chunks = slices.Delete(x.chunks, i, i+1)
	}
}

// ascend calls visit for the entries after id, in order, until it returns false.
func (x *index) ascend(after string, visit func(*entry) bool) {
	if len(x.chunks) == 0 {
		return
	}
	for i := x.chunk(after); i < len(x.chunks); i++ {
		c := x.chunks[i]
		at, found := slices.BinarySearchFunc(c, after, byID)
		if found {
			at++
		}
		for _, e := range c[at:] {
			if !visit(e) {
				return
			}
		}
	}
}

// recent remembers the last max ids added, and how each ended.
type recent struct {
	ids  map[string]v1.Ending
	ring []string
	next int
}

func newRecent(max int) *recent {
	return &recent{ids: map[string]v1.Ending{}, ring: make([]string, 0, max)}
}

// add remembers id; how one ended that is known already stays what was said first.
func (r *recent) add(id string, how v1.Ending) {
	if _, ok := r.ids[id]; ok {
		return
	}
	r.ids[id] = how
	if len(r.ring) < cap(r.ring) {
		r.ring = append(r.ring, id)
		return
	}
	delete(r.ids, r.ring[r.next])
	r.ring[r.next] = id
	r.next = (r.next + 1) % len(r.ring)
}

func (r *recent) has(id string) bool { _, ok := r.ids[id]; return ok }
