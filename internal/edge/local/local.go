// Package local joins a node's image store to what an edge and its backends ask of it:
// imports and removals for the edge, mounted layers for containers. It owns no state
// beyond the store's. Start reading at [Images].
package local

import (
	"bufio"
	"context"
	"io"
	"os"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/export"
	"dsec/internal/image/layer"
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

// exportChunk is what is written at once of an export.
const exportChunk = 256 << 10

// Export implements edge.Images.
func (i *Images) Export(ctx context.Context, digest string, w io.Writer) error {
	img, err := i.store.Get(digest)
	if err != nil {
		return err
	}
	var files []*os.File
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	open := func(path string) (*os.File, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, errs.Wrap(errs.ImageCorrupt, "image.export", "open a blob of the image", err)
		}
		files = append(files, f)
		return f, nil
	}
	var layers []*layer.Reader
	for _, l := range img.Layers {
		blobs := i.store.LayerFiles(l)
		meta, err := open(blobs.Meta)
		if err != nil {
			return err
		}
		var data io.ReaderAt
		if blobs.Data != "" {
			if data, err = open(blobs.Data); err != nil {
				return err
			}
		}
		r, err := layer.NewReader(meta, l.MetaSize, data, l.DataSize)
		if err != nil {
			return err
		}
		layers = append(layers, r)
	}
	out := bufio.NewWriterSize(w, exportChunk)
	if _, err := export.Tar(ctx, out, export.TarOptions{}, layers...); err != nil {
		return err
	}
	return out.Flush()
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

// Find implements edge.Images.
func (i *Images) Find(digest string) error {
	_, err := i.store.Get(digest)
	return err
}

// Acquire implements container.Layers: the image's layers, highest first.
func (i *Images) Acquire(ctx context.Context, img *v1.Image) (mounts []int, release func(), err error) {
	var releases []func()
	release = func() {
		for _, r := range releases {
			r()
		}
	}
	for n := len(img.Layers) - 1; n >= 0; n-- {
		l := img.Layers[n]
		fd, r, err := i.mounts.Acquire(ctx, image.Layer{Kind: l.Kind, MetaDigest: l.MetaDigest, MetaSize: l.MetaBytes, DataDigest: l.DataDigest, DataSize: l.DataBytes})
		if err != nil {
			release()
			return nil, nil, err
		}
		mounts = append(mounts, fd)
		releases = append(releases, r)
	}
	return mounts, release, nil
}

func wire(img image.Image) v1.Image {
	out := v1.Image{
		Digest: img.Digest, CreatedAt: time.UnixMilli(img.CreatedUnixMS).UTC(), Bytes: img.SizeBytes, Files: img.Files,
		Config: v1.ImageConfig{
			Env: img.Config.Env, Entrypoint: img.Config.Entrypoint, Cmd: img.Config.Cmd, User: img.Config.User,
			WorkDir: img.Config.WorkDir, Volumes: img.Config.Volumes, Labels: img.Config.Labels,
		},
	}
	for _, l := range img.Layers {
		out.Layers = append(out.Layers, v1.Layer{Kind: l.Kind, MetaDigest: l.MetaDigest, MetaBytes: l.MetaSize, DataDigest: l.DataDigest, DataBytes: l.DataSize})
	}
	return out
}
