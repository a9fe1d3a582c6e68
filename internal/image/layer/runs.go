package layer

import (
	"context"
	"io"
	"slices"
	"sort"

	"golang.org/x/sys/unix"
)

// Runs says which bytes of a layer's data blob are one file's, without the holes.
type Runs struct {
	first, end []uint32 // blocks, sorted, not overlapping
}

// maxRuns bounds what Runs takes: 8 bytes each.
const maxRuns = 4 << 20

// ReadRuns reads the runs of a layer from its metadata. Of a layer with very many files it
// knows only some. Errors: image_corrupt, request_canceled.
func ReadRuns(ctx context.Context, meta io.ReaderAt, metaSize, dataSize int64) (*Runs, error) {
	r, err := NewReader(meta, metaSize, nil, dataSize)
	if err != nil {
		return nil, err
	}
	root, err := r.Root()
	if err != nil {
		return nil, err
	}
	type run struct{ first, end uint32 }
	var all []run
	seen := map[uint64]bool{root.ID: true}
	for todo := []*Entry{root}; len(todo) > 0; {
		dir := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		names, err := r.List(dir)
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			if seen[n.ID] {
				continue
			}
			seen[n.ID] = true
			e, err := r.Entry(n.ID)
			if err != nil {
				return nil, err
			}
			if e.Type() == unix.S_IFDIR {
				todo = append(todo, e)
				continue
			}
			if e.layout != layoutChunk || e.size == 0 {
				continue
			}
			c, err := r.Content(e)
			if err != nil {
				return nil, err
			}
			for pos := int64(0); pos < e.size && len(all) < maxRuns; pos += c.unit {
				addr, err := c.locate(pos)
				if err != nil {
					return nil, err
				}
				if addr == nullBlock {
					continue
				}
				end := addr + uint32((min(c.unit, e.size-pos)+blockSize-1)>>blockBits)
				if k := len(all); pos > 0 && k > 0 && all[k-1].end == addr {
					all[k-1].end = end
				} else {
					all = append(all, run{addr, end})
				}
			}
		}
	}
	slices.SortFunc(all, func(a, b run) int { return int(a.first) - int(b.first) })
	out := &Runs{first: make([]uint32, 0, len(all)), end: make([]uint32, 0, len(all))}
	for _, x := range all {
		if k := len(out.end); k > 0 && x.first < out.end[k-1] {
			continue // files that share content are one run's
		}
		out.first, out.end = append(out.first, x.first), append(out.end, x.end)
	}
	return out, nil
}

// At returns the run that the byte at off of the blob is in, as bytes [first, end); both
// are 0 if it is in none.
func (r *Runs) At(off int64) (first, end int64) {
	b := off >> blockBits
	i := sort.Search(len(r.first), func(k int) bool { return int64(r.first[k]) > b }) - 1
	if i < 0 || b >= int64(r.end[i]) {
		return 0, 0
	}
	return int64(r.first[i]) << blockBits, int64(r.end[i]) << blockBits
}
