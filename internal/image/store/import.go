package store

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"

	"dsec/internal/image"
	"dsec/internal/image/layer"
	"dsec/internal/image/source"
)

// Phases of an import, as its progress tells them.
const (
	PhaseRead   = "read"   // the source, into the data blob
	PhaseEncode = "encode" // the metadata blob
	PhaseStore  = "store"  // both, into the object store
	PhaseDone   = "done"
)

// Progress of an import. Done counts bytes of file contents, in PhaseStore of the data
// blob; Total is 0 where the source does not say.
type Progress struct {
	Phase   string
	Done    int64
	Total   int64
	Entries int64
}

// ImportOptions of an import; the zero value is usable.
type ImportOptions struct {
	Source source.Options
	Layer  layer.Options // its Progress is not used
	Kind   string        // image.KindBase by default
	// Config, if set, replaces the source's: a plain tree or tar has none.
	Config *image.Config
	// Total is how many bytes the source holds, if known, for progress.
	Total int64
	// Progress is called every few MiB or some hundred entries, from one goroutine at
	// a time.
	Progress func(Progress)
}

const (
	progressBytes   = 4 << 20
	progressEntries = 512
)

// ImportPath imports the directory or file at path. Importing the same content
// again returns the same image. On error nothing is left. Errors: image_corrupt,
// image_unsupported, body_too_large, path_not_found, disk_full, bad_request.
func (s *Store) ImportPath(ctx context.Context, path string, opts ImportOptions) (image.Image, error) {
	return s.Import(ctx, opts, func(b *layer.Builder, so source.Options) (source.Result, error) {
		return source.Path(ctx, path, b, so)
	})
}

// ImportStream is [Store.ImportPath] for a tar or an image archive read from r.
func (s *Store) ImportStream(ctx context.Context, r io.Reader, opts ImportOptions) (image.Image, error) {
	return s.Import(ctx, opts, func(b *layer.Builder, so source.Options) (source.Result, error) {
		return source.Stream(ctx, r, b, so)
	})
}

// Import makes an image of one layer from what read puts into the builder: packages
// source and registry read. read is given opts.Source with a directory to spool in.
// Importing the same content again returns the same image. On error nothing is left.
func (s *Store) Import(ctx context.Context, opts ImportOptions, read func(*layer.Builder, source.Options) (source.Result, error)) (image.Image, error) {
	var img image.Image
	spool, err := os.MkdirTemp(s.path("tmp"), "spool-")
	if err != nil {
		return img, layer.DiskError("make spool directory", err)
	}
	defer os.RemoveAll(spool)
	tell := opts.teller()
	opts.Layer.Progress = tell.count
	opts.Source.SpoolDir = spool
	if opts.Kind == "" {
		opts.Kind = image.KindBase
	}
	l, err := s.addLayer(ctx, opts.Kind, true, tell.stored, func(data layer.Blob, meta io.Writer) (layer.Result, error) {
		b := layer.NewBuilder(data, opts.Layer)
		tell.phase(PhaseRead)
		got, err := read(b, opts.Source)
		if err != nil {
			return layer.Result{}, err
		}
		tell.phase(PhaseEncode)
		res, err := b.Finish(meta)
		if err != nil {
			return layer.Result{}, err
		}
		img.Files, img.Config = res.Files, got.Config
		for kind, n := range b.Skipped() {
			img.Notes = append(img.Notes, fmt.Sprintf("left out %d × %s", n, kind))
		}
		slices.Sort(img.Notes)
		tell.store(res.DataSize)
		return res, nil
	})
	if err != nil {
		return image.Image{}, err
	}
	defer s.Release(l)
	if opts.Config != nil {
		img.Config = *opts.Config
	}
	img.Layers = []image.Layer{l}
	if img, err = s.AddImage(ctx, img); err != nil {
		return image.Image{}, err
	}
	tell.phase(PhaseDone)
	return img, nil
}

// teller thins progress out.
type teller struct {
	to   func(Progress)
	now  Progress
	last Progress
}

func (o *ImportOptions) teller() *teller {
	return &teller{to: o.Progress, now: Progress{Total: o.Total}}
}

func (t *teller) count(bytes, entries int64) {
	t.now.Done, t.now.Entries = bytes, entries
	if t.now.Done-t.last.Done >= progressBytes || t.now.Entries-t.last.Entries >= progressEntries {
		t.tell()
	}
}

// store begins the phase in which stored is called.
func (t *teller) store(total int64) {
	t.now.Done, t.now.Total = 0, total
	t.phase(PhaseStore)
}

func (t *teller) stored(done int64) {
	t.now.Done = done
	if t.now.Done-t.last.Done >= progressBytes {
		t.tell()
	}
}

func (t *teller) phase(p string) {
	t.now.Phase = p
	t.tell()
}

func (t *teller) tell() {
	if t.last = t.now; t.to != nil {
		t.to(t.now)
	}
}
