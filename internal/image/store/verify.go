package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image"
)

// Verify reads an image's description and blobs again and compares their sizes
// and digests; progress, if set, is told the bytes read. Errors: image_corrupt
// (what, where), image_not_found.
func (s *Store) Verify(ctx context.Context, digest string, progress func(done, total int64)) error {
	img, err := s.Get(digest)
	if err != nil {
		return err
	}
	if _, err := readDescription(s.description(strings.TrimPrefix(digest, digestPfx)), digest); err != nil {
		return err
	}
	var done int64
	read := func(n int) {
		if done += int64(n); progress != nil {
			progress(done, img.SizeBytes)
		}
	}
	for i, l := range img.Layers {
		for _, b := range []struct {
			what, digest string
			size         int64
		}{{"metadata", l.MetaDigest, l.MetaSize}, {"data", l.DataDigest, l.DataSize}} {
			if b.digest == "" {
				continue
			}
			if err := s.verifyBlob(ctx, b.digest, b.size, read); err != nil {
				return fmt.Errorf("verify %s of layer %d of image %s: %w", b.what, i+1, digest, err)
			}
		}
	}
	return nil
}

// mountKey tells layers apart that must not share a mount.
func (s *Store) mountKey(l image.Layer) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.replaced[l.MetaDigest] + s.replaced[l.DataDigest]; n > 0 {
		return l.MetaDigest + "#" + strconv.Itoa(n)
	}
	return l.MetaDigest
}

func (s *Store) verifyBlob(ctx context.Context, digest string, size int64, read func(int)) error {
	f, err := os.Open(s.blob(digest))
	if errors.Is(err, fs.ErrNotExist) {
		return errs.New(errs.ImageCorrupt, phase, "blob "+digest+" is missing")
	}
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "open blob", err)
	}
	defer f.Close()
	h := sha256.New()
	var total int64
	for buf := make([]byte, 1<<20); ; {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, phase, "verify image", err)
		}
		n, err := f.Read(buf)
		h.Write(buf[:n])
		total += int64(n)
		read(n)
		if err == io.EOF {
			break
		}
		if err != nil {
			return errs.Wrap(errs.ImageCorrupt, phase, "read blob "+digest, err)
		}
	}
	if total != size {
		return errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("blob %s has %d bytes instead of %d", digest, total, size))
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != digest {
		return errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("blob %s has the digest %s", digest, got))
	}
	return nil
}
