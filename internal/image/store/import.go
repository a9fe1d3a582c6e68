package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/layer"
	"dsec/internal/image/source"

	"golang.org/x/sys/unix"
)

// Phases of an import, as its progress tells them.
const (
	PhaseRead   = "read"   // the source, into the data blob
	PhaseEncode = "encode" // the metadata blob
	PhaseSync   = "sync"   // to disk
	PhaseDone   = "done"
)

// Progress of an import. Done counts bytes of file contents; Total is 0 where
// the source does not say.
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
	// Progress is called every few MiB or some hundred entries, from the
	// importing goroutine.
	Progress func(Progress)
}

const (
	progressBytes   = 4 << 20
	progressEntries = 512
	flushBytes      = 8 << 20 // how much is written before the disk is told to start
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
	spool, err := os.MkdirTemp(s.tmpDir(), "spool-")
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
	l, err := s.AddLayer(ctx, opts.Kind, func(data layer.Blob, meta io.Writer) (layer.Result, error) {
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
		tell.phase(PhaseSync)
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

// AddLayer stores the layer that write makes: its data blob and its metadata blob, and
// what they are. The layer is kept though no image has it, until [Store.Release], which
// the caller calls once in any case, after [Store.AddImage] or when there is to be no image.
// On error nothing is left and there is nothing to release.
func (s *Store) AddLayer(ctx context.Context, kind string, write func(data layer.Blob, meta io.Writer) (layer.Result, error)) (image.Layer, error) {
	var l image.Layer
	tmp, err := os.MkdirTemp(s.tmpDir(), "import-")
	if err != nil {
		return l, layer.DiskError("make import directory", err)
	}
	defer os.RemoveAll(tmp)
	meta, err := os.Create(filepath.Join(tmp, "meta"))
	if err != nil {
		return l, layer.DiskError("make metadata blob", err)
	}
	defer meta.Close()
	data, err := os.Create(filepath.Join(tmp, "data"))
	if err != nil {
		return l, layer.DiskError("make data blob", err)
	}
	defer data.Close()
	res, err := write(&flushingFile{File: data}, meta)
	if err != nil {
		return l, err
	}
	if err := ctx.Err(); err != nil {
		return l, errs.Wrap(errs.RequestCanceled, phase, "store layer", err)
	}
	for _, f := range []*os.File{data, meta} {
		if err := f.Sync(); err != nil {
			return l, layer.DiskError("sync blobs", err)
		}
	}
	l = image.Layer{Kind: kind, MetaDigest: res.MetaDigest, MetaSize: res.MetaSize, DataDigest: res.DataDigest, DataSize: res.DataSize}
	if err := s.place(ctx, l, tmp); err != nil {
		return image.Layer{}, err
	}
	return l, nil
}

// place moves the synced blobs of tmp to their places and pins them.
func (s *Store) place(ctx context.Context, l image.Layer, tmp string) error {
	// Importing again is how damage is mended, so what is there is not taken at its name.
	// Not under the lock: blobs are large.
	damaged := map[string]bool{}
	for digest, size := range map[string]int64{l.DataDigest: l.DataSize, l.MetaDigest: l.MetaSize} {
		if digest == "" {
			continue
		}
		err := s.verifyBlob(ctx, digest, size, func(int) {})
		if err != nil && !errors.Is(err, errs.ImageCorrupt) {
			return err
		}
		damaged[digest] = err != nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var placed []string
	undo := func(err error) error {
		for _, p := range placed {
			os.Remove(p)
		}
		return err
	}
	for _, bl := range []struct{ from, digest string }{{"data", l.DataDigest}, {"meta", l.MetaDigest}} {
		if bl.digest == "" {
			continue
		}
		err := os.Link(filepath.Join(tmp, bl.from), s.blob(bl.digest))
		if errors.Is(err, fs.ErrExist) {
			if !damaged[bl.digest] { // it is the same, and may be mounted
				continue
			}
			// Mounts of the old one go on with it; new ones must not share them.
			if err := os.Rename(filepath.Join(tmp, bl.from), s.blob(bl.digest)); err != nil {
				return undo(layer.DiskError("replace damaged blob", err))
			}
			s.replaced[bl.digest]++
			continue
		}
		if err != nil {
			return undo(layer.DiskError("place blob", err))
		}
		placed = append(placed, s.blob(bl.digest))
	}
	if err := syncDir(s.blobDir()); err != nil {
		return undo(err)
	}
	s.pinned[l.MetaDigest]++
	s.pinned[l.DataDigest]++
	return nil
}

// Release ends what [Store.AddLayer] began: the layer goes if no image has it.
func (s *Store) Release(l image.Layer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range []string{l.MetaDigest, l.DataDigest} {
		if s.pinned[d]--; s.pinned[d] <= 0 {
			delete(s.pinned, d)
		}
	}
	// What cannot be removed now is removed by the next Open.
	_ = s.drop(l, s.used(""))
}

// AddImage records an image of layers that AddLayer made or other images have, and
// returns it with its digest, size and time. One that is there already is returned as it
// is. Errors: image_not_found (a layer is not here), disk_full.
func (s *Store) AddImage(ctx context.Context, img image.Image) (image.Image, error) {
	if err := ctx.Err(); err != nil {
		return image.Image{}, errs.Wrap(errs.RequestCanceled, phase, "record image", err)
	}
	img.SizeBytes = 0
	for _, l := range img.Layers {
		img.SizeBytes += l.MetaSize + l.DataSize
	}
	img.Digest = digestOf(img)
	if img.CreatedUnixMS == 0 {
		img.CreatedUnixMS = s.now().UnixMilli()
	}
	p, err := json.MarshalIndent(img, "", "  ")
	if err != nil {
		return image.Image{}, errs.Wrap(errs.InternalError, phase, "encode description", err)
	}
	hexDigest := strings.TrimPrefix(img.Digest, digestPfx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.images[img.Digest]; ok {
		return old, nil
	}
	used := s.used("")
	for _, l := range img.Layers {
		if !used[l.MetaDigest] || l.DataDigest != "" && !used[l.DataDigest] {
			return image.Image{}, errs.New(errs.ImageNotFound, phase, "no layer "+l.MetaDigest+" on this node")
		}
	}
	tmp, err := os.MkdirTemp(s.tmpDir(), "image-")
	if err != nil {
		return image.Image{}, layer.DiskError("make description", err)
	}
	defer os.RemoveAll(tmp)
	desc := filepath.Join(tmp, "description")
	if err := writeSynced(desc, append(p, '\n')); err != nil {
		return image.Image{}, err
	}
	if err := os.Rename(desc, s.description(hexDigest)); err != nil {
		return image.Image{}, layer.DiskError("place description", err)
	}
	if err := syncDir(s.imageDir()); err != nil {
		os.Remove(s.description(hexDigest))
		return image.Image{}, err
	}
	s.images[img.Digest] = img
	delete(s.broken, img.Digest)
	return img, nil
}

func writeSynced(path string, p []byte) error {
	f, err := os.Create(path)
	if err != nil {
		return layer.DiskError("make description", err)
	}
	_, err = f.Write(p)
	if err == nil {
		err = f.Sync()
	}
	return layer.DiskError("write description", errors.Join(err, f.Close()))
}

// flushingFile has the disk start on what was written long before the sync.
type flushingFile struct {
	*os.File
	written, started int64
}

func (f *flushingFile) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	if f.written += int64(n); f.written-f.started >= flushBytes {
		// Only a hint; the sync at the end is what counts.
		_ = unix.SyncFileRange(int(f.Fd()), f.started, f.written-f.started, unix.SYNC_FILE_RANGE_WRITE)
		f.started = f.written
	}
	return n, err
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

func (t *teller) phase(p string) {
	t.now.Phase = p
	t.tell()
}

func (t *teller) tell() {
	if t.last = t.now; t.to != nil {
		t.to(t.now)
	}
}
