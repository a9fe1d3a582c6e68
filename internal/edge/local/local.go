// Package local joins a node's image store to what an edge and its backends ask of it:
// imports, snapshots, transfers and removals for the edge, mounted layers for containers. It owns no state
// beyond the store's. Start reading at [Images]; pack.go keeps snapshots and their chains, collapse.go makes those shorter,
// registry.go talks to
// registries, archive.go has the format of a snapshot's archive.
package local

import (
	"context"
	"errors"
	"io"
	"slices"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/source"
	"dsec/internal/image/store"
	"dsec/internal/image/trace"
)

// Images implements edge.Images and container.Layers over a store.
type Images struct {
	store  *store.Store
	mounts *store.Mounts
}

// idleMount is how long a layer stays mounted that no sandbox uses: creates come in bursts.
const idleMount = 5 * time.Minute

// New joins to s; close it before s.
func New(s *store.Store) *Images { return &Images{store: s, mounts: store.NewMounts(s, idleMount)} }

// Close lets go of the mounts; sandboxes keep theirs.
func (i *Images) Close() { i.mounts.Close() }

// formats of the API. A directory arrives as a tar of itself.
var formats = map[string]source.Format{
	"": source.Auto, "auto": source.Auto, "tar": source.Tar, "dir": source.Tar, "docker-archive": source.Docker, "oci-layout": source.OCI,
}

// Import implements edge.Images.
func (i *Images) Import(ctx context.Context, archive io.Reader, format string, progress func(v1.ImageProgress)) (v1.Image, error) {
	if format == v1.ExportSnapshot {
		return i.readArchive(ctx, archive, progress)
	}
	f, ok := formats[format]
	if !ok {
		return v1.Image{}, errs.New(errs.BadRequest, "image.import", "unknown format "+format+"; known: auto, tar, docker-archive, oci-layout, dir")
	}
	img, err := i.store.ImportStream(ctx, archive, store.ImportOptions{
		Source: source.Options{Format: f},
		Progress: func(p store.Progress) {
			progress(v1.ImageProgress{Phase: p.Phase, Done: p.Done, Total: p.Total, Entries: p.Entries})
		},
	})
	if err != nil {
		return v1.Image{}, err
	}
	return wire(img), nil
}

// Delete implements edge.Images.
func (i *Images) Delete(_ context.Context, digest string) error { return i.store.Delete(digest) }

// List implements edge.Images.
func (i *Images) List(context.Context) ([]v1.Image, error) {
	var out []v1.Image
	for _, img := range i.store.List() {
		out = append(out, wire(img))
	}
	return out, nil
}

// Ready implements edge.Images: nothing of the image needs to be here, if it is known where
// its layers are.
func (i *Images) Ready(img *v1.Image) error {
	list := layers(img)
	for _, l := range list {
		if err := store.Stored(l); err != nil {
			return err
		}
	}
	_, err := checked(img)
	return err
}

// Has implements edge.Images.
func (i *Images) Has(digest string) bool {
	_, err := i.store.Get(digest)
	return err == nil
}

// Acquire implements container.Layers: the image's layers, highest first.
func (i *Images) Acquire(ctx context.Context, img *v1.Image) (mounts []int, release func(), err error) {
	list := layers(img)
	slices.Reverse(list)
	if mounts, release, err = i.acquire(ctx, list); err != nil {
		release()
		return nil, nil, err
	}
	i.store.Started(img.Digest, layers(img))
	if len(img.Parts) == 0 {
		i.store.Used(unwire(img))
	}
	return mounts, release, nil
}

// Roots implements edge.Images.
func (i *Images) Roots() ([]v1.Layer, error) {
	list, err := i.store.Roots()
	return wireLayers(list), err
}

// Cache implements edge.Images.
func (i *Images) Cache(of []v1.Layer) v1.ImageCache {
	c := i.store.Cache()
	out := v1.ImageCache{Mode: string(c.Mode()), UsedBytes: c.Used(), LimitBytes: c.Limit()}
	list := layers(&v1.Image{Layers: of})
	if of == nil {
		list = i.store.Layers()
	}
	for n, has := range i.store.Cached(list) {
		out.Layers = append(out.Layers, v1.LayerCache{
			MetaDigest: list[n].MetaDigest, CachedBytes: has.MetaBytes + has.Cached, ReadBytes: has.Read, FetchedBytes: has.Fetched, FailedReads: has.Failed,
		})
	}
	return out
}

// Warm implements edge.Images.
func (i *Images) Warm(ctx context.Context, img *v1.Image, all bool, progress func(done, total int64)) (traced bool, err error) {
	var t trace.Trace
	if !all {
		if t, err = i.store.LoadTrace(ctx, img.Digest); err != nil {
			return false, err
		}
	}
	return t != nil, i.store.Warm(ctx, layers(img), all, t, progress)
}

// Evict implements edge.Images.
func (i *Images) Evict(list []v1.Layer) (freed int64, inUse int, err error) {
	for _, l := range layers(&v1.Image{Layers: list}) {
		i.mounts.Forget(l)
		has := i.store.Cached([]image.Layer{l})[0]
		switch err := i.store.Drop(l); {
		case errors.Is(err, errs.StateConflict):
			inUse++
		case err != nil:
			return freed, inUse, err
		default:
			freed += has.MetaBytes + has.Cached
		}
	}
	return freed, inUse, nil
}

// Trim implements edge.Images.
func (i *Images) Trim(keep v1.EdgeKeep) error {
	in := func(list []string) func(string) bool {
		set := make(map[string]bool, len(list))
		for _, d := range list {
			set[d] = true
		}
		return func(d string) bool { return set[d] }
	}
	keepLayer := in(keep.Layers)
	for _, l := range i.store.Layers() {
		if !keepLayer(l.MetaDigest) {
			i.mounts.Forget(l)
		}
	}
	return i.store.Trim(in(keep.Images), keepLayer)
}
