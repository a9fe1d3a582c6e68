package store

import (
	"context"
	"sync"
	"sync/atomic"

	"dsec/internal/image/chunk"
	"dsec/internal/image/layer"
)

// filler fills a data blob from the object store. Its chunks are the map's, with one
// more for each hole between them.
type filler struct {
	r      *chunk.Reader
	m      *chunk.Map
	bounds []int64
	of     []int32 // the map's chunk; -1 is a hole
	runs   atomic.Pointer[layer.Runs]
}

func newFiller(r *chunk.Reader, m *chunk.Map) *filler {
	f := &filler{r: r, m: m, bounds: make([]int64, 1, m.Len()+2), of: make([]int32, 0, m.Len()+1)}
	end := int64(0)
	add := func(to int64, k int32) {
		f.bounds = append(f.bounds, to)
		f.of = append(f.of, k)
		end = to
	}
	for k := range m.Len() {
		c := m.Chunk(k)
		if c.Off > end {
			add(c.Off, -1)
		}
		add(c.Off+int64(c.Len), int32(k))
	}
	if end < m.Size() {
		add(m.Size(), -1)
	}
	return f
}

// Bounds implements lazy.Filler.
func (f *filler) Bounds() []int64 { return f.bounds }

// Hole implements lazy.Filler.
func (f *filler) Hole(i int) bool { return f.of[i] < 0 }

// Group implements lazy.Grouped, once the layer's files are known.
func (f *filler) Group(off int64) (first, end int64) {
	if r := f.runs.Load(); r != nil {
		return r.At(off)
	}
	return 0, 0
}

// Fetch implements lazy.Filler.
func (f *filler) Fetch(ctx context.Context, i, j int, put func(off int64, p []byte) error) error {
	for i < j && f.of[i] < 0 {
		i++
	}
	for i < j && f.of[j-1] < 0 {
		j--
	}
	if i == j {
		return nil
	}
	var mu sync.Mutex
	return f.r.Read(ctx, f.m, int(f.of[i]), int(f.of[j-1])+1, func(k int, p []byte) error {
		mu.Lock()
		defer mu.Unlock()
		return put(f.m.Chunk(k).Off, p)
	})
}
