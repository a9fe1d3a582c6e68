package container

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

// No two sandboxes ever have the same range, adopted ones included.
func TestRangesAreDisjoint(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		const first = 1 << 20
		r := newRanges(first)
		held := map[uint32]bool{}
		name := func(id uint32) string { return fmt.Sprint("sandbox of ", id) }
		for range rapid.IntRange(0, 3).Draw(rt, "adopted") {
			id := uint32(first + rangeSize*rapid.IntRange(0, 6).Draw(rt, "range"))
			if !held[id] {
				r.claim(id, name(id))
				held[id] = true
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"take": func(rt *rapid.T) {
				id, err := r.take("")
				if err != nil {
					rt.Fatal(err)
				}
				r.claim(id, name(id))
				if held[id] || id < first || (id-first)%rangeSize != 0 {
					rt.Fatalf("range %d was given out twice or is odd; held %v", id, held)
				}
				held[id] = true
			},
			"put": func(rt *rapid.T) {
				for id := range held {
					r.put(id)
					r.put(id) // twice does no harm
					delete(held, id)
					return
				}
				rt.Skip("none held")
			},
			"": func(rt *rapid.T) {
				for id := range held {
					for _, one := range []uint32{id, id + 1, id + rangeSize - 1} {
						if got := r.ownerOf(one); got != name(id) {
							rt.Fatalf("id %d is of %q, want %q", one, got, name(id))
						}
					}
				}
				if got := r.ownerOf(first - 1); got != "" {
					rt.Fatalf("an id of the host is of %q", got)
				}
			},
		})
	})
}

func TestRangesRunOut(t *testing.T) {
	t.Parallel()
	r := newRanges(1<<32 - 3*rangeSize)
	a, err := r.take("")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.take(""); err != nil {
		t.Fatal(err)
	}
	if _, err := r.take(""); err == nil {
		t.Error("ids beyond 32 bits")
	}
	r.put(a)
	if b, err := r.take(""); err != nil || b != a {
		t.Errorf("a range that came back: %d, %v", b, err)
	}
}
