package export

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/layer"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// Image is what is exported.
type Image struct {
	Platform string    // os/arch[/variant]; default: linux on this machine's CPU
	Created  time.Time // default: 1970
	Config   image.Config
	Layers   []Layer // lowest first
}

// Layer writes the tar of one OCI layer to w.
type Layer func(ctx context.Context, w io.Writer) error

// Merged is the layers, lowest first, as one.
func Merged(opts TarOptions, layers ...*layer.Reader) Layer {
	return func(ctx context.Context, w io.Writer) error {
		_, err := Tar(ctx, w, opts, layers...)
		return err
	}
}

// Stacked is the layers, lowest first, as one each: all but the lowest hold what
// they change of those below.
func Stacked(opts TarOptions, layers ...*layer.Reader) []Layer {
	list := make([]Layer, 0, len(layers))
	for i, l := range layers {
		opts.Diff = i > 0
		list = append(list, Merged(opts, l))
	}
	return list
}

// Compression of layers.
type Compression string

// Compressions.
const (
	Gzip Compression = "" // every reader knows it
	Zstd Compression = "zstd"
	None Compression = "none"
)

// Format of manifests.
type Format string

// Formats. Docker's has no zstd.
const (
	Auto   Format = "" // docker, but oci with zstd
	Docker Format = "docker"
	OCI    Format = "oci"
)

// Options of packing; the zero value is usable.
type Options struct {
	Compression Compression
	Format      Format
	SpoolDir    string // where compressed layers lie meanwhile, in files without names
}

func (o *Options) fill() error {
	switch o.Compression {
	case Gzip, Zstd, None:
	default:
		return errs.New(errs.BadRequest, phase, fmt.Sprintf("compression %.40q: use gzip, zstd or none", o.Compression))
	}
	if o.Format == Auto {
		if o.Format = Docker; o.Compression == Zstd {
			o.Format = OCI
		}
	}
	switch {
	case o.Format != Docker && o.Format != OCI:
		return errs.New(errs.BadRequest, phase, fmt.Sprintf("image format %.40q: use docker or oci", o.Format))
	case o.Format == Docker && o.Compression == Zstd:
		return errs.New(errs.BadRequest, phase, "Docker's image format has no zstd layers: use oci, or gzip")
	}
	return nil
}

func (o *Options) layerType() types.MediaType {
	switch {
	case o.Format == Docker && o.Compression == None:
		return types.DockerUncompressedLayer
	case o.Format == Docker:
		return types.DockerLayer
	case o.Compression == Zstd:
		return types.OCILayerZStd
	case o.Compression == None:
		return types.OCIUncompressedLayer
	}
	return types.OCILayer
}

// Blob is a compressed layer in a file without a name, which Close gives up.
type Blob struct {
	Descriptor v1.Descriptor
	DiffID     v1.Hash // of the tar in it
	PlainSize  int64   // of the tar in it
	file       *os.File
}

// Reader returns a reader of the blob; several may be in use.
func (b *Blob) Reader() *io.SectionReader {
	return io.NewSectionReader(b.file, 0, b.Descriptor.Size)
}

// Close frees the blob's disk space.
func (b *Blob) Close() error { return b.file.Close() }

// Pack compresses a layer. Errors: those of the layer, disk_full, bad_request.
func Pack(ctx context.Context, l Layer, opts Options) (_ *Blob, err error) {
	if err := opts.fill(); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(opts.SpoolDir, "spool-*")
	if err != nil {
		return nil, layer.DiskError("make spool file", err)
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if err := unix.Unlink(f.Name()); err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "unlink spool file", err)
	}
	packed := &summed{w: diskWriter{f}, h: sha256.New()}
	out := bufio.NewWriterSize(packed, copyBuf)
	z, err := compressor(out, opts.Compression)
	if err != nil {
		return nil, err
	}
	plain := &summed{w: z, h: sha256.New()}
	if err := pump(ctx, l, plain); err != nil {
		return nil, err
	}
	if err := errors.Join(z.Close(), out.Flush()); err != nil {
		return nil, err
	}
	return &Blob{
		Descriptor: v1.Descriptor{MediaType: opts.layerType(), Size: packed.n, Digest: packed.digest()},
		DiffID:     plain.digest(), PlainSize: plain.n, file: f,
	}, nil
}

// pump has the layer read on one CPU while another compresses.
func pump(ctx context.Context, l Layer, to io.Writer) error {
	const depth = 4
	full, empty := make(chan []byte, depth), make(chan []byte, depth)
	for range depth {
		empty <- make([]byte, 0, copyBuf)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var lerr error
	go func() {
		defer close(full)
		w := &pumpWriter{ctx: ctx, full: full, empty: empty}
		if lerr = l(ctx, w); lerr == nil {
			lerr = w.flush()
		}
	}()
	var werr error
	for p := range full {
		if werr == nil {
			if _, werr = to.Write(p); werr != nil {
				cancel()
			}
		}
		empty <- p[:0]
	}
	if werr != nil {
		return werr
	}
	return lerr
}

type pumpWriter struct {
	ctx         context.Context
	full, empty chan []byte
	buf         []byte
}

func (w *pumpWriter) Write(p []byte) (int, error) {
	total := len(p)
	for len(p) > 0 {
		if w.buf == nil {
			select {
			case w.buf = <-w.empty:
			case <-w.ctx.Done():
				return 0, errs.Wrap(errs.RequestCanceled, phase, "write tar", w.ctx.Err())
			}
		}
		n := min(len(p), cap(w.buf)-len(w.buf))
		w.buf, p = append(w.buf, p[:n]...), p[n:]
		if len(w.buf) == cap(w.buf) {
			if err := w.flush(); err != nil {
				return 0, err
			}
		}
	}
	return total, nil
}

func (w *pumpWriter) flush() error {
	if w.buf == nil {
		return nil
	}
	w.full <- w.buf // has room for every buffer
	w.buf = nil
	return nil
}

func compressor(w io.Writer, c Compression) (io.WriteCloser, error) {
	switch c {
	case Zstd:
		z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		return z, errs.Wrap(errs.InternalError, phase, "begin zstd", err)
	case None:
		return nopCloser{w}, nil
	}
	z, err := gzip.NewWriterLevel(w, gzip.DefaultCompression)
	return z, errs.Wrap(errs.InternalError, phase, "begin gzip", err)
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

type diskWriter struct{ f *os.File }

func (d diskWriter) Write(p []byte) (int, error) {
	n, err := d.f.Write(p)
	return n, layer.DiskError("write spool file", err)
}

// summed counts and hashes what passes through it.
type summed struct {
	w io.Writer
	h hash.Hash
	n int64
}

func (s *summed) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	s.h.Write(p[:n])
	s.n += int64(n)
	return n, err
}

func (s *summed) digest() v1.Hash {
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(s.h.Sum(nil))}
}

// Documents are an image's configuration and manifest.
type Documents struct {
	Config, Manifest         []byte
	ConfigDesc, ManifestDesc v1.Descriptor
}

// Describe makes the documents of an image with the packed layers.
func Describe(img Image, blobs []*Blob, opts Options) (*Documents, error) {
	if err := opts.fill(); err != nil {
		return nil, err
	}
	if img.Platform == "" {
		img.Platform = "linux/" + runtime.GOARCH
	}
	p, err := v1.ParsePlatform(img.Platform)
	if err != nil || p.OS == "" || p.Architecture == "" {
		return nil, errs.New(errs.BadRequest, phase, fmt.Sprintf("platform %.60q: use os/arch", img.Platform))
	}
	if img.Created.IsZero() {
		img.Created = time.Unix(0, 0)
	}
	created := v1.Time{Time: img.Created.UTC()}
	cfg := v1.ConfigFile{
		OS: p.OS, Architecture: p.Architecture, Variant: p.Variant, Created: created,
		Config: v1.Config{
			Env: img.Config.Env, Entrypoint: img.Config.Entrypoint, Cmd: img.Config.Cmd,
			User: img.Config.User, WorkingDir: img.Config.WorkDir, Labels: img.Config.Labels,
		},
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{}},
	}
	for _, v := range img.Config.Volumes {
		if cfg.Config.Volumes == nil {
			cfg.Config.Volumes = map[string]struct{}{}
		}
		cfg.Config.Volumes[v] = struct{}{}
	}
	man := v1.Manifest{SchemaVersion: 2, MediaType: types.DockerManifestSchema2, Layers: []v1.Descriptor{}}
	man.Config.MediaType = types.DockerConfigJSON
	if opts.Format == OCI {
		man.MediaType, man.Config.MediaType = types.OCIManifestSchema1, types.OCIConfigJSON
	}
	for _, b := range blobs {
		cfg.RootFS.DiffIDs = append(cfg.RootFS.DiffIDs, b.DiffID)
		cfg.History = append(cfg.History, v1.History{Created: created, CreatedBy: "dsec"})
		man.Layers = append(man.Layers, b.Descriptor)
	}
	d := &Documents{}
	if d.Config, err = json.Marshal(cfg); err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "encode config", err)
	}
	d.ConfigDesc = describe(man.Config.MediaType, d.Config)
	man.Config = d.ConfigDesc
	if d.Manifest, err = json.Marshal(man); err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "encode manifest", err)
	}
	d.ManifestDesc = describe(man.MediaType, d.Manifest)
	d.ManifestDesc.Platform = &v1.Platform{OS: p.OS, Architecture: p.Architecture, Variant: p.Variant}
	return d, nil
}

func describe(m types.MediaType, p []byte) v1.Descriptor {
	h, n, err := v1.SHA256(bytes.NewReader(p))
	if err != nil {
		panic(err) // reading memory
	}
	return v1.Descriptor{MediaType: m, Size: n, Digest: h}
}

func hexName(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

// tagOf returns the tag of a reference, if it has one.
func tagOf(ref string) string {
	ref, _, _ = strings.Cut(ref, "@")
	_, tag, _ := strings.Cut(ref[strings.LastIndexByte(ref, '/')+1:], ":")
	return tag
}
