package local

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/export"
	"dsec/internal/image/layer"
	"dsec/internal/image/registry"
	"dsec/internal/image/source"
	"dsec/internal/image/store"
	"dsec/internal/snapshot"
)

// Pull implements edge.Images.
func (i *Images) Pull(ctx context.Context, req v1.RegistryRequest, progress func(v1.ImageProgress)) (v1.Image, error) {
	img, err := i.store.Import(ctx, store.ImportOptions{Progress: func(p store.Progress) {
		if p.Phase != store.PhaseRead { // which the registry's own progress tells
			progress(v1.ImageProgress{Phase: p.Phase, Done: p.Done, Total: p.Total, Entries: p.Entries})
		}
	}}, func(b *layer.Builder, so source.Options) (source.Result, error) {
		o := registryOptions(req, progress)
		o.SpoolDir = so.SpoolDir
		got, err := registry.Pull(ctx, req.Ref, b, o)
		return source.Result{Config: got.Config}, err
	})
	if err != nil {
		return v1.Image{}, err
	}
	return wire(img), nil
}

func registryOptions(req v1.RegistryRequest, progress func(v1.ImageProgress)) registry.Options {
	return registry.Options{
		Platform: req.Platform, PlainHTTP: req.PlainHTTP, SkipVerify: req.SkipVerify,
		Auth: registry.Auth{Username: req.Username, Password: req.Password, Token: req.Token, IdentityToken: req.Identity},
		Progress: func(p registry.Progress) {
			if p.Phase != registry.PhaseConvert { // goes with the download
				progress(v1.ImageProgress{Phase: p.Phase, Done: p.Done, Total: p.Total})
			}
		},
	}
}

// Push implements edge.Images.
func (i *Images) Push(ctx context.Context, img *v1.Image, req v1.RegistryRequest, progress func(v1.ImageProgress)) (v1.Pushed, error) {
	dir, err := i.store.TempDir("push-")
	if err != nil {
		return v1.Pushed{}, err
	}
	defer os.RemoveAll(dir)
	progress(v1.ImageProgress{Phase: "read"})
	out, done, err := i.exported(ctx, img, dir)
	if err != nil {
		return v1.Pushed{}, err
	}
	defer done()
	o := registry.PushOptions{Options: registryOptions(req, progress)}
	o.SpoolDir = dir
	res, err := registry.Push(ctx, req.Ref, out, o)
	return v1.Pushed{Ref: res.Ref, Digest: res.Digest, Bytes: res.Size, SentBytes: res.SentBytes, Sent: res.Sent, Skipped: res.Skipped}, err
}

// Export implements edge.Images.
func (i *Images) Export(ctx context.Context, img *v1.Image, format string, w io.Writer) error {
	o := export.Options{Format: export.Docker}
	switch format {
	case v1.ExportSnapshot:
		return i.writeArchive(ctx, img, w)
	case v1.ExportOCI:
		o.Format = export.OCI
	case v1.ExportDocker:
	default:
		return errs.New(errs.BadRequest, "image.export", "unknown format "+format+"; known: docker, oci, snapshot")
	}
	dir, err := i.store.TempDir("export-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	out, done, err := i.exported(ctx, img, dir)
	if err != nil {
		return err
	}
	defer done()
	o.SpoolDir = dir
	return export.Archive(ctx, w, out, img.Name, o)
}

// exported is an image for others to read, until done, with room for work in dir. Several
// layers become one: a renamed directory of a snapshot cannot be told in theirs.
func (i *Images) exported(ctx context.Context, img *v1.Image, dir string) (_ export.Image, done func(), err error) {
	out := export.Image{Created: time.UnixMilli(img.CreatedAt.UnixMilli()), Config: image.Config(img.Config)}
	list := layers(img)
	var meta, data *os.File
	var res layer.Result
	if len(list) == 1 {
		meta, data, done, err = i.open(ctx, list[0])
		res.MetaSize, res.DataSize = list[0].MetaSize, list[0].DataSize
	} else {
		meta, data, done, res, err = i.merged(ctx, list, dir)
	}
	if err != nil {
		return out, nil, err
	}
	var content io.ReaderAt
	if data != nil { // a nil *os.File is no nil io.ReaderAt
		content = data
	}
	r, err := layer.NewReader(meta, res.MetaSize, content, res.DataSize)
	if err != nil {
		done()
		return out, nil, err
	}
	out.Layers = []export.Layer{export.Merged(export.TarOptions{}, r)}
	return out, done, nil
}

// merged writes the layers as one into dir.
func (i *Images) merged(ctx context.Context, list []image.Layer, dir string) (meta, data *os.File, done func(), res layer.Result, err error) {
	fds, release, err := i.acquire(ctx, list)
	defer release()
	if err != nil {
		return nil, nil, nil, res, err
	}
	if meta, err = os.Create(filepath.Join(dir, "meta")); err != nil {
		return nil, nil, nil, res, layer.DiskError("make a file for the merged layers", err)
	}
	if data, err = os.Create(filepath.Join(dir, "data")); err != nil {
		meta.Close()
		return nil, nil, nil, res, layer.DiskError("make a file for the merged layers", err)
	}
	done = func() {
		meta.Close()
		data.Close()
	}
	res, _, err = snapshot.Flatten(ctx, snapshot.FlattenOptions{Layers: fds, Bottom: true, Blob: data, Meta: meta})
	if err != nil {
		done()
	}
	return meta, data, done, res, err
}

// open opens a layer's blobs; data is nil if there are none.
func (i *Images) open(ctx context.Context, l image.Layer) (meta, data *os.File, end func(), err error) {
	files, release, err := i.store.Use(ctx, l)
	if err != nil {
		return nil, nil, nil, err
	}
	if meta, err = os.Open(files.Meta); err == nil && files.Data != "" {
		if data, err = os.Open(files.Data); err != nil {
			meta.Close()
		}
	}
	if err != nil {
		release()
		return nil, nil, nil, errs.Wrap(errs.InternalError, "image.open", "open a layer", err)
	}
	return meta, data, func() {
		meta.Close()
		if data != nil {
			data.Close()
		}
		release()
	}, nil
}
