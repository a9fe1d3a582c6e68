package chunk

import (
	"context"
	"fmt"

	"dsec/internal/image/object"
)

// LayerUsage is what one layer takes in the store. A chunk is shared if another of the
// layers that were asked about has it too, and own if not; within a layer it counts once.
type LayerUsage struct {
	Chunks       int
	OwnBytes     int64 // uncompressed
	SharedBytes  int64
	OwnStored    int64 // compressed; what deleting this layer alone would free, in the end
	SharedStored int64
	MetaStored   int64 // the objects of metadata and map
}

// Usage is of all layers together.
type Usage struct {
	Layers []LayerUsage
	Bytes  int64 // uncompressed bytes of different chunks
	Stored int64 // their compressed bytes, maps and metadata
}

// MeasureUsage says what each layer takes. It holds some 50 bytes of memory per different
// chunk. Errors: store_corrupt, object_not_found, the store's own.
func MeasureUsage(ctx context.Context, s object.Store, layers []Layer) (Usage, error) {
	u := Usage{Layers: make([]LayerUsage, len(layers))}
	shared := map[digest]bool{}
	sizes := map[string]int64{}
	// Twice: the first tells what is shared, the second counts.
	for pass := range 2 {
		for n, l := range layers {
			for _, key := range []string{l.Meta, l.Map} {
				if key == "" {
					continue
				}
				if _, ok := sizes[key]; !ok {
					st, err := s.Stat(ctx, key)
					if err != nil {
						return u, fmt.Errorf("measure layer %d: %w", n+1, err)
					}
					sizes[key] = st.Size
					u.Stored += st.Size
				}
				if pass == 1 {
					u.Layers[n].MetaStored += sizes[key]
				}
			}
			if l.Map == "" {
				continue
			}
			m, err := LoadMap(ctx, s, l.Map)
			if err != nil {
				return u, fmt.Errorf("measure layer %d: %w", n+1, err)
			}
			seen := map[digest]bool{}
			for i := range m.chunks {
				c := &m.chunks[i]
				if seen[c.digest] {
					continue
				}
				seen[c.digest] = true
				length, stored := int64(m.length(c)), int64(c.stored)
				_, again := shared[c.digest]
				if pass == 0 {
					if !again {
						u.Bytes += length
						u.Stored += stored
					}
					shared[c.digest] = again
					continue
				}
				lu := &u.Layers[n]
				lu.Chunks++
				if shared[c.digest] {
					lu.SharedBytes += length
					lu.SharedStored += stored
				} else {
					lu.OwnBytes += length
					lu.OwnStored += stored
				}
			}
		}
	}
	return u, nil
}
