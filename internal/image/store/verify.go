package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"

	"dsec/api/v1/errs"
	"dsec/internal/image"
)

// Verify reads layers as sandboxes would, fetching what is not here, and compares sizes
// and digests; progress, if set, is told the bytes read. Errors: image_corrupt (which
// layer, what), those of [Store.Use].
func (s *Store) Verify(ctx context.Context, layers []image.Layer, progress func(done, total int64)) error {
	var done, total int64
	for _, l := range layers {
		total += l.MetaSize + l.DataSize
	}
	read := func(n int) {
		if done += int64(n); progress != nil {
			progress(done, total)
		}
	}
	for i, l := range layers {
		if err := s.verifyLayer(ctx, l, read); err != nil {
			return fmt.Errorf("verify layer %d: %w", i+1, err)
		}
	}
	return nil
}

func (s *Store) verifyLayer(ctx context.Context, l image.Layer, read func(int)) error {
	f, release, err := s.Use(ctx, l)
	if err != nil {
		return err
	}
	defer release()
	if err := verifyBlob(ctx, "metadata", f.Meta, l.MetaDigest, l.MetaSize, read); err != nil || f.Data == "" {
		return err
	}
	return verifyBlob(ctx, "data", f.Data, l.DataDigest, l.DataSize, read)
}

func verifyBlob(ctx context.Context, what, path, digest string, size int64, read func(int)) error {
	f, err := os.Open(path)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "open "+what, err)
	}
	defer f.Close()
	h := sha256.New()
	var total int64
	for buf := make([]byte, 1<<20); ; {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, phase, "verify "+what, err)
		}
		n, err := f.Read(buf)
		h.Write(buf[:n])
		total += int64(n)
		read(n)
		if err == io.EOF {
			break
		}
		if err != nil {
			return errs.Wrap(errs.ImageCorrupt, phase, "read "+what+" "+digest, err)
		}
	}
	if total != size {
		return errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("%s %s has %d bytes instead of %d", what, digest, total, size))
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != digest {
		return errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("%s %s has the digest %s; 'dsec image evict' has it fetched again", what, digest, got))
	}
	return nil
}
