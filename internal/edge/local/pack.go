package local

import (
	"context"
	"io"
	"slices"
	"strings"

	v1 "dsec/api/v1"
	"dsec/internal/edge"
	"dsec/internal/image"
	"dsec/internal/image/layer"
	"dsec/internal/snapshot"
)

// Chains of layers: each layer costs every open of a file a look, so that a chain is
// flattened when it is long, to much less, so that this is rare.
const (
	longChain  = 32
	shortChain = 16
	smallLayer = 4 << 20 // neighbours below it are merged first
	listedOut  = 100     // paths that an image says were left out
)

// Pack implements edge.Images.
func (i *Images) Pack(ctx context.Context, p edge.Pack) (v1.Image, error) {
	chain, err := checked(p.On)
	if err != nil {
		return v1.Image{}, err
	}
	var man snapshot.Manifest
	l, err := i.store.AddLayer(ctx, image.KindDiff, func(data layer.Blob, meta io.Writer) (res layer.Result, err error) {
		res, man, err = p.Write(data, meta)
		return res, err
	})
	if err != nil {
		return v1.Image{}, err
	}
	defer i.store.Release(l)
	chain, release, err := i.shorten(ctx, chain, l)
	defer release()
	if err != nil {
		return v1.Image{}, err
	}
	about := unwireSnapshot(&p.About)
	about.Entries, about.Bytes, about.Notes = man.Entries, man.Bytes, man.Notes
	about.LeftOut, about.Omitted = man.LeftOut[:min(len(man.LeftOut), listedOut)], man.LeftOutCount
	made := image.Image{Files: p.On.Files + man.Entries, Layers: recorded(chain), Config: image.Config(p.Config), Snapshot: about}
	if p.Plain {
		made.Snapshot, made.Notes = nil, man.Notes
	}
	img, err := i.store.AddImage(ctx, made)
	if err != nil {
		return v1.Image{}, err
	}
	return wire(img), nil
}

// shorten puts l on top of the chain, and flattens that if it is long. The layers that it
// makes are the store's until release.
func (i *Images) shorten(ctx context.Context, c snapshot.Chain, l image.Layer) (_ snapshot.Chain, release func(), err error) {
	var made []image.Layer
	release = func() {
		for _, l := range made {
			i.store.Release(l)
		}
	}
	same := slices.IndexFunc(c, func(x snapshot.Link) bool { return x.Layer.MetaDigest == l.MetaDigest })
	if same >= 0 && same == len(c)-1 {
		return c, release, nil // it says again what the topmost says
	}
	c = c.On(l)
	var plan []snapshot.Range
	switch {
	case same >= 0: // an overlay takes no layer twice
		plan = []snapshot.Range{{From: same, To: len(c)}}
	case len(c) > longChain:
		keep := slices.IndexFunc(c, func(x snapshot.Link) bool { return x.Layer.Kind == image.KindDiff })
		plan = snapshot.Policy{Keep: keep, Small: smallLayer, Layers: max(shortChain, keep+1)}.Plan(c)
	}
	for _, r := range slices.Backward(plan) { // the highest first: the others' numbers stay as they are
		flat, err := i.flatten(ctx, c[r.From:r.To].Layers(), r.From == 0, nil)
		if err != nil {
			return nil, release, err
		}
		made = append(made, flat)
		if c, err = c.Replace(r.From, r.To, flat); err != nil {
			return nil, release, err
		}
	}
	return c, release, nil
}

// flatten stores the layers, lowest first, as one.
func (i *Images) flatten(ctx context.Context, layers []image.Layer, bottom bool, progress func(bytes, entries int64)) (image.Layer, error) {
	fds, release, err := i.acquire(ctx, layers)
	defer release()
	if err != nil {
		return image.Layer{}, err
	}
	return i.store.AddLayer(ctx, image.KindDiff, func(data layer.Blob, meta io.Writer) (layer.Result, error) {
		res, _, err := snapshot.Flatten(ctx, snapshot.FlattenOptions{Layers: fds, Bottom: bottom, Blob: data, Meta: meta, Progress: progress})
		return res, err
	})
}

// acquire mounts layers, in their order.
func (i *Images) acquire(ctx context.Context, list []image.Layer) (fds []int, release func(), err error) {
	var releases []func()
	release = func() {
		for _, r := range releases {
			r()
		}
	}
	for _, l := range list {
		fd, r, err := i.mounts.Acquire(ctx, l)
		if err != nil {
			return nil, release, err
		}
		fds, releases = append(fds, fd), append(releases, r)
	}
	return fds, release, nil
}

// checked is the chain that an image's layers are: each is on what it was made on, and those of
// the images that it was composed of, or the sandbox that it is a snapshot of, are the lowest.
func checked(img *v1.Image) (snapshot.Chain, error) {
	list, parts := layers(img), img.Parts
	switch {
	case len(parts) > 0: // what these were made on is in the parts; together they are on what they are on now
		for n := range list {
			list[n].Parent, list[n].View, list[n].Replaces = "", "", ""
		}
	case img.Snapshot != nil:
		parts = img.Snapshot.Parts
	}
	chain := chainOf(list)
	if err := chain.Check(); err != nil {
		return nil, err
	}
	var chains []snapshot.Chain
	for _, p := range unwireParts(parts) {
		if len(p.Layers) == 0 { // recorded by an earlier version
			return chain, nil
		}
		chains = append(chains, chainOf(p.Layers))
	}
	return chain, chain.CheckParts(chains)
}

// chainOf is the chain that an image's layers are by what they say of themselves. Layers
// that no snapshot made go on whatever is below.
func chainOf(layers []image.Layer) (c snapshot.Chain) {
	for _, l := range layers {
		if l.View == "" {
			c = c.On(l)
			continue
		}
		link := snapshot.Link{Layer: l, Parent: snapshot.View(l.Parent), View: snapshot.View(l.View)}
		for _, r := range fields(l.Replaces) {
			meta, data, _ := strings.Cut(r, " ")
			link.Replaces = append(link.Replaces, image.Layer{MetaDigest: meta, DataDigest: data})
		}
		c = append(c, link)
	}
	return c
}

// recorded are the chain's layers, those of snapshots with what they were made on.
func recorded(c snapshot.Chain) []image.Layer {
	out := c.Layers()
	for n, link := range c {
		l := &out[n]
		if l.Kind != image.KindDiff {
			continue
		}
		var replaces []string
		for _, r := range link.Replaces {
			replaces = append(replaces, strings.TrimSpace(r.MetaDigest+" "+r.DataDigest))
		}
		l.Parent, l.View, l.Replaces = string(link.Parent), string(link.View), strings.Join(replaces, ",")
	}
	return out
}

// fields of a list, which is empty if the text is.
func fields(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}
