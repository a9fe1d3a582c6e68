package source

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"sort"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/layer"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// blob is one image layer in an archive, with what is known about it.
type blob struct {
	name   string
	size   int64    // of the blob as stored; -1: unknown
	packed *v1.Hash // digest of the blob as stored, if known
	plain  *v1.Hash // digest of the tar in it; checked if packed is unknown

	open func() (io.ReadCloser, int64, error) // if it is not in files
}

// applyLayers reads the layers, lowest first, into one tree.
func applyLayers(ctx context.Context, f files, blobs []blob, b *layer.Builder, opts Options) error {
	for i, bl := range blobs {
		if i > 0 {
			b.NextLayer()
		}
		if err := applyLayer(ctx, f, bl, b, opts); err != nil {
			return fmt.Errorf("layer %d of %d (%.200s): %w", i+1, len(blobs), bl.name, err)
		}
	}
	return nil
}

func applyLayer(ctx context.Context, f files, bl blob, b *layer.Builder, opts Options) error {
	if bl.open == nil {
		bl.open = func() (io.ReadCloser, int64, error) { return f.open(bl.name) }
	}
	stored, size, err := bl.open()
	if err != nil {
		return errs.Wrap(errs.ImageCorrupt, phase, "open layer", err)
	}
	defer stored.Close()
	if bl.size >= 0 && size != bl.size {
		return errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("the blob has %d bytes instead of %d", size, bl.size))
	}
	var in io.Reader = ctxReader{ctx, stored}
	var check *hashReader
	if bl.packed != nil {
		if check, err = newHashReader(in, *bl.packed); err != nil {
			return err
		}
		in = check
	}
	raw := bufio.NewReaderSize(in, readBuf)
	buffered, done, kind, err := decompress(raw, opts.MaxBytes)
	if err != nil {
		return err
	}
	defer done()
	var plain io.Reader = buffered
	if bl.packed == nil && bl.plain != nil {
		if check, err = newHashReader(plain, *bl.plain); err != nil {
			return err
		}
		plain = check
	}
	if err = readTar(ctx, plain, b, true); err == nil {
		err = drain(plain)
	}
	if err == nil && kind != "" {
		err = drain(raw)
	}
	if check == nil {
		return err
	}
	if err != nil {
		done() // no one else may read while what is left is hashed
		rest := io.Reader(raw)
		if bl.packed == nil {
			rest = check
		}
		return explain(err, check, rest)
	}
	return check.verify()
}

// explain prefers "the blob has another digest" over what a damaged blob made
// the tar reader trip on.
func explain(err error, check *hashReader, rest io.Reader) error {
	if errs.Of(err).Class() != errs.Corrupt {
		return err
	}
	if _, derr := io.CopyN(io.Discard, rest, maxTrailer); derr != io.EOF {
		return err
	}
	if verr := check.verify(); verr != nil {
		return fmt.Errorf("%w; reading it ended with: %v", verr, err)
	}
	return err
}

// hashReader hashes what passes through it.
type hashReader struct {
	r    io.Reader
	h    hash.Hash
	want v1.Hash
}

func newHashReader(r io.Reader, want v1.Hash) (*hashReader, error) {
	h, err := hasher(want)
	return &hashReader{r: r, h: h, want: want}, err
}

func (h *hashReader) Read(p []byte) (int, error) {
	n, err := h.r.Read(p)
	h.h.Write(p[:n])
	return n, err
}

func (h *hashReader) verify() error { return sameSum("the blob", h.h, h.want) }

func hasher(want v1.Hash) (hash.Hash, error) {
	switch want.Algorithm {
	case "sha256":
		return sha256.New(), nil
	case "sha512":
		return sha512.New(), nil
	}
	return nil, errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("digest %.200q", want.String()))
}

func checkBytes(what string, p []byte, want v1.Hash) error {
	h, err := hasher(want)
	if err != nil {
		return err
	}
	h.Write(p)
	return sameSum(what, h, want)
}

func sameSum(what string, h hash.Hash, want v1.Hash) error {
	if got := hex.EncodeToString(h.Sum(nil)); got != want.Hex {
		return errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("%s has the digest %s:%s instead of %s", what, want.Algorithm, got, want))
	}
	return nil
}

// parseConfig reads an image's configuration and checks that it is for us.
func parseConfig(name string, raw []byte, layers int, platform string) (*v1.ConfigFile, error) {
	cfg, err := v1.ParseConfigFile(bytes.NewReader(raw))
	if err != nil {
		return nil, errs.Wrap(errs.ImageCorrupt, phase, "read config "+name, err)
	}
	if cfg.OS != "" && cfg.Architecture != "" && !platformFits(cfg.Platform(), platform) {
		return nil, errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("image for %.60s, not %s", cfg.Platform(), platform))
	}
	if len(cfg.RootFS.DiffIDs) != layers {
		return nil, errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("the config lists %d layers, the manifest %d", len(cfg.RootFS.DiffIDs), layers))
	}
	return cfg, nil
}

func toConfig(cfg *v1.ConfigFile) image.Config {
	c := image.Config{
		Env:        cfg.Config.Env,
		Entrypoint: cfg.Config.Entrypoint,
		Cmd:        cfg.Config.Cmd,
		User:       cfg.Config.User,
		WorkDir:    cfg.Config.WorkingDir,
		Labels:     cfg.Config.Labels,
	}
	for v := range cfg.Config.Volumes {
		c.Volumes = append(c.Volumes, v)
	}
	sort.Strings(c.Volumes)
	return c
}
