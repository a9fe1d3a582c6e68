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
	return s.doImport(ctx, opts, func(b *layer.Builder, so source.Options) (source.Result, error) {
		return source.Path(ctx, path, b, so)
	})
}

// ImportStream is [Store.ImportPath] for a tar or an image archive read from r.
func (s *Store) ImportStream(ctx context.Context, r io.Reader, opts ImportOptions) (image.Image, error) {
	return s.doImport(ctx, opts, func(b *layer.Builder, so source.Options) (source.Result, error) {
		return source.Stream(ctx, r, b, so)
	})
}

type reader func(b *layer.Builder, so source.Options) (source.Result, error)

func (s *Store) doImport(ctx context.Context, opts ImportOptions, read reader) (img image.Image, err error) {
	tmp, err := os.MkdirTemp(s.tmpDir(), "import-")
	if err != nil {
		return img, layer.DiskError("make import directory", err)
	}
	defer os.RemoveAll(tmp)
	meta, err := os.Create(filepath.Join(tmp, "meta"))
	if err != nil {
		return img, layer.DiskError("make metadata blob", err)
	}
	defer meta.Close()
	data, err := os.Create(filepath.Join(tmp, "data"))
	if err != nil {
		return img, layer.DiskError("make data blob", err)
	}
	defer data.Close()

	tell := opts.teller()
	opts.Layer.Progress = tell.count
	opts.Source.SpoolDir = tmp
	b := layer.NewBuilder(&flushingFile{File: data}, opts.Layer)
	tell.phase(PhaseRead)
	got, err := read(b, opts.Source)
	if err != nil {
		return img, err
	}
	tell.phase(PhaseEncode)
	res, err := b.Finish(meta)
	if err != nil {
		return img, err
	}
	tell.phase(PhaseSync)
	if err := ctx.Err(); err != nil {
		return img, errs.Wrap(errs.RequestCanceled, phase, "import image", err)
	}
	for _, f := range []*os.File{data, meta} {
		if err := f.Sync(); err != nil {
			return img, layer.DiskError("sync blobs", err)
		}
	}
	img = describe(opts, got, res, b.Skipped())
	img.CreatedUnixMS = s.now().UnixMilli()
	if img, err = s.commit(img, tmp); err != nil {
		return img, err
	}
	tell.phase(PhaseDone)
	return img, nil
}

func describe(opts ImportOptions, got source.Result, res layer.Result, skipped map[string]int64) image.Image {
	l := image.Layer{Kind: opts.Kind, MetaDigest: res.MetaDigest, MetaSize: res.MetaSize, DataDigest: res.DataDigest, DataSize: res.DataSize}
	if l.Kind == "" {
		l.Kind = image.KindBase
	}
	img := image.Image{
		SizeBytes: l.MetaSize + l.DataSize,
		Files:     res.Files,
		Layers:    []image.Layer{l},
		Config:    got.Config,
	}
	if opts.Config != nil {
		img.Config = *opts.Config
	}
	for kind, n := range skipped {
		img.Notes = append(img.Notes, fmt.Sprintf("left out %d × %s", n, kind))
	}
	slices.Sort(img.Notes)
	img.Digest = digestOf(img)
	return img
}

// commit moves the synced blobs of tmp to their places and writes the
// description that makes the image exist.
func (s *Store) commit(img image.Image, tmp string) (image.Image, error) {
	p, err := json.MarshalIndent(img, "", "  ")
	if err != nil {
		return img, errs.Wrap(errs.InternalError, phase, "encode description", err)
	}
	desc := filepath.Join(tmp, "description")
	if err := writeSynced(desc, append(p, '\n')); err != nil {
		return img, err
	}
	l := img.Layers[0]
	// Importing again is how damage is mended, so what is there is not taken at its name.
	// Not under the lock: blobs are large.
	damaged := map[string]bool{}
	for digest, size := range map[string]int64{l.DataDigest: l.DataSize, l.MetaDigest: l.MetaSize} {
		if digest == "" {
			continue
		}
		err := s.verifyBlob(context.Background(), digest, size, func(int) {})
		if err != nil && !errors.Is(err, errs.ImageCorrupt) {
			return img, err
		}
		damaged[digest] = err != nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.images[img.Digest]; ok && !damaged[l.DataDigest] && !damaged[l.MetaDigest] {
		return old, nil
	}
	var placed []string
	undo := func(err error) (image.Image, error) {
		for _, p := range placed {
			os.Remove(p)
		}
		return image.Image{}, err
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
	hexDigest := strings.TrimPrefix(img.Digest, digestPfx)
	if err := os.Rename(desc, s.description(hexDigest)); err != nil {
		return undo(layer.DiskError("place description", err))
	}
	if err := syncDir(s.imageDir()); err != nil {
		os.Remove(s.description(hexDigest))
		return undo(err)
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
