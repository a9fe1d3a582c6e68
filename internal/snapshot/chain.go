package snapshot

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	"dsec/api/v1/errs"
	"dsec/internal/image"
)

const chainPhase = "snapshot.chain"

// View names what a stack of layers shows: a digest over the layers from the lowest on.
// The empty View is that of no layers.
type View string

// With returns the view of layer l on top of v.
func (v View) With(l image.Layer) View {
	// Lengths are fixed (hex digests), so that no two stacks are written alike.
	sum := sha256.Sum256(fmt.Appendf(nil, "%64s %64s %64s", string(v), l.MetaDigest, l.DataDigest))
	return View(hex.EncodeToString(sum[:]))
}

// Link is one layer of a chain and what it was made on.
type Link struct {
	Layer  image.Layer `json:"layer"`
	Parent View        `json:"parent,omitempty"` // of all layers below, when this one was made
	View   View        `json:"view"`             // with this layer
	// Replaces are the layers, lowest first, that Flatten made this one of. The view is
	// still theirs: what was made on top of them fits on top of this.
	Replaces []image.Layer `json:"replaces,omitempty"`
}

// Chain is what a root is composed of, lowest first.
type Chain []Link

// Layers returns the chain's layers, lowest first.
func (c Chain) Layers() []image.Layer {
	out := make([]image.Layer, len(c))
	for i, l := range c {
		out[i] = l.Layer
	}
	return out
}

// View is that of the whole chain.
func (c Chain) View() View {
	if len(c) == 0 {
		return ""
	}
	return c[len(c)-1].View
}

// On returns the chain with layer l, made on top of c, added.
func (c Chain) On(l image.Layer) Chain {
	v := c.View()
	return append(c[:len(c):len(c)], Link{Layer: l, Parent: v, View: v.With(l)})
}

// Replace returns the chain with the layers from, to (exclusive) replaced by flat, which
// Flatten made of them.
func (c Chain) Replace(from, to int, flat image.Layer) (Chain, error) {
	if from < 0 || to > len(c) || to-from < 1 {
		return nil, errs.New(errs.InternalError, chainPhase, fmt.Sprintf("layers %d to %d of %d", from, to, len(c)))
	}
	l := Link{Layer: flat, Parent: c[:from].View(), View: c[to-1].View}
	for _, old := range c[from:to] {
		if old.Replaces != nil {
			l.Replaces = append(l.Replaces, old.Replaces...)
		} else {
			l.Replaces = append(l.Replaces, old.Layer)
		}
	}
	out := append(c[:from:from], l)
	return append(out, c[to:]...), nil
}

// Made returns the layers that the chain's were made of, lowest first: those that were
// merged in the place of what they were merged into.
func (c Chain) Made() []image.Layer {
	var out []image.Layer
	for _, l := range c {
		if l.Replaces != nil {
			out = append(out, l.Replaces...)
		} else {
			out = append(out, l.Layer)
		}
	}
	return out
}

// CheckParts says whether the chain begins with the layers of parts that it was composed of, the lowest part
// first, and whether each of those is whole by itself: image_corrupt if not. A layer that several
// parts have counts in the highest.
func (c Chain) CheckParts(parts []Chain) error {
	var want []image.Layer
	for n, p := range parts {
		if err := p.Check(); err != nil {
			return errs.Wrap(errs.ImageCorrupt, chainPhase, fmt.Sprintf("part %d", n+1), err)
		}
		for _, l := range p {
			want = slices.DeleteFunc(want, func(low image.Layer) bool { return low.MetaDigest == l.Layer.MetaDigest })
			want = append(want, l.Layer)
		}
	}
	have := c.Made()
	for i, w := range want {
		if i >= len(have) || have[i].MetaDigest != w.MetaDigest || have[i].DataDigest != w.DataDigest {
			return errs.New(errs.ImageCorrupt, chainPhase, fmt.Sprintf("layer %d of the chain is not that of the images that it is composed of", i+1)).With("want", w.MetaDigest)
		}
	}
	return nil
}

// Check says whether each layer is on top of what it was made on: image_corrupt if not,
// with the layer's number and both views.
func (c Chain) Check() error {
	var v View
	for i, l := range c {
		if l.Parent != v {
			return broken(i, "the layer was made on other layers", v, l.Parent)
		}
		own := l.Replaces
		if own == nil {
			own = []image.Layer{l.Layer}
		}
		for _, x := range own {
			v = v.With(x)
		}
		if l.View != v {
			return broken(i, "the layer is not the one that was recorded", v, l.View)
		}
	}
	return nil
}

func broken(i int, what string, have, want View) error {
	return errs.New(errs.ImageCorrupt, chainPhase, fmt.Sprintf("layer %d of the chain: %s", i+1, what)).
		With("have", string(have)).With("want", string(want))
}

// Policy says when a chain is flattened.
type Policy struct {
	Keep   int   // the lowest so many layers are shared with others: left as they are
	Small  int64 // neighbours that are both smaller than this many bytes (both blobs) are merged
	Layers int   // more layers than this are too many; 0: any number is fine
}

// Range is the layers of a chain from, to (exclusive).
type Range struct{ From, To int }

// Plan returns the ranges to flatten, lowest first, none overlapping. Small neighbours go
// together, and the result of one range counts as small only if it is, by its parts' sum. If
// too many layers are left, those neighbours are merged that together are the least to rewrite
// (of equal ones the highest, which fewer others share).
func (p Policy) Plan(c Chain) []Range {
	type run struct {
		Range
		size int64
	}
	var runs []run
	for i, l := range c {
		size := l.Layer.MetaSize + l.Layer.DataSize
		if n := len(runs); i > p.Keep && n > 0 && runs[n-1].size < p.Small && size < p.Small {
			runs[n-1].To, runs[n-1].size = i+1, runs[n-1].size+size
			continue
		}
		runs = append(runs, run{Range{i, i + 1}, size})
	}
	for p.Layers > 0 && len(runs) > max(p.Layers, p.Keep+1) {
		best := -1
		for i := p.Keep; i+1 < len(runs); i++ {
			if best < 0 || runs[i].size+runs[i+1].size <= runs[best].size+runs[best+1].size {
				best = i
			}
		}
		runs[best].To, runs[best].size = runs[best+1].To, runs[best].size+runs[best+1].size
		runs = append(runs[:best+1], runs[best+2:]...)
	}
	var out []Range
	for _, r := range runs {
		if r.To-r.From > 1 {
			out = append(out, r.Range)
		}
	}
	return out
}
