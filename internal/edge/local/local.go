// Package local joins a node's image store to what an edge and its backends ask of it:
// imports and removals for the edge, mounted layers for containers. It owns no state
// beyond the store's. Start reading at [Images].
package local

import (
	"context"
	"io"
	"slices"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/image/source"
	"dsec/internal/image/store"
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
	if img.Snapshot == nil || len(img.Parts) > 0 {
		return nil
	}
	return chainOf(list).Check()
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
	if len(img.Parts) == 0 {
		i.store.Used(unwire(img))
	}
	return mounts, release, nil
}
