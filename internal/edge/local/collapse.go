package local

import (
	"context"
	"runtime"
	"slices"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/edge"
	"dsec/internal/image"
	"dsec/internal/snapshot"

	"golang.org/x/sys/unix"
)

const collapsePhase = "image.collapse"

// Collapse implements edge.Images. Nothing refers to what it makes until the catalogue does, so
// that whenever it ends half-way the image is as before; what was made so far is garbage.
func (i *Images) Collapse(ctx context.Context, img *v1.Image, below int64, least int, progress func(v1.ImageProgress)) (v1.Image, error) {
	if len(img.Parts) > 0 {
		return v1.Image{}, errs.New(errs.BadRequest, collapsePhase, "a composition is in no catalogue: collapse the images that it is made of")
	}
	old := unwire(img)
	chain, err := checked(img)
	if err != nil {
		return v1.Image{}, err
	}
	plan := snapshot.Policy{Keep: shared(old.Layers), Small: below}.Plan(chain)
	var total int64
	saved := 0
	for _, r := range plan {
		saved += r.To - r.From - 1
		for _, l := range chain[r.From:r.To] {
			total += l.Layer.DataSize
		}
	}
	if saved < max(1, least) {
		return *img, nil
	}
	var made []image.Layer
	defer func() {
		for _, l := range made {
			i.store.Release(l)
		}
	}()
	tell := edge.Thin(progress)
	tell(v1.ImageProgress{Phase: "merge", Total: total})
	var done int64
	for _, r := range slices.Backward(plan) { // the highest first: the others' numbers stay as they are
		var bytes int64
		for _, l := range chain[r.From:r.To] {
			bytes += l.Layer.DataSize
		}
		flat, err := i.mergeSlowly(ctx, chain[r.From:r.To].Layers(), r.From == 0, func(n, entries int64) {
			tell(v1.ImageProgress{Phase: "merge", Done: done + min(n, bytes), Total: total, Entries: entries})
		})
		if err != nil {
			return v1.Image{}, err
		}
		made = append(made, flat)
		if slices.ContainsFunc(chain, func(l snapshot.Link) bool { return l.Layer.MetaDigest == flat.MetaDigest }) {
			continue // an overlay takes no layer twice
		}
		if chain, err = chain.Replace(r.From, r.To, flat); err != nil {
			return v1.Image{}, err
		}
		done += bytes
	}
	if len(chain) == len(old.Layers) {
		return *img, nil
	}
	tell(v1.ImageProgress{Phase: "store", Done: total, Total: total})
	merged := old
	merged.Layers = recorded(chain)
	if merged.Made == nil {
		merged.Made = slices.Clone(old.Layers)
		for n := range merged.Made {
			merged.Made[n].MetaObject, merged.Made[n].MapObject = "", ""
		}
	}
	if err := i.store.Retain(old); err != nil {
		return v1.Image{}, err
	}
	got, err := i.store.AddImage(ctx, merged)
	if err != nil {
		return v1.Image{}, err
	}
	return wire(got), nil
}

// shared is how many of the lowest layers other images are likely to have as they are: up to
// the last one that was imported.
func shared(list []image.Layer) int {
	for n, l := range slices.Backward(list) {
		if l.Kind != image.KindDiff {
			return n + 1
		}
	}
	return 0
}

// mergeSlowly is flatten on a thread of its own with the lowest priority. The thread ends with it.
func (i *Images) mergeSlowly(ctx context.Context, layers []image.Layer, bottom bool, progress func(bytes, entries int64)) (l image.Layer, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked
		if err = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), 19); err != nil {
			err = errs.Wrap(errs.InternalError, collapsePhase, "lower the thread's priority", err)
			return
		}
		l, err = i.flatten(ctx, layers, bottom, progress)
	}()
	<-done
	return l, err
}
