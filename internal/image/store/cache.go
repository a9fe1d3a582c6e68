package store

import (
	"errors"
	"os"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/lazy"
)

// Layers returns the layers of which something may be here.
func (s *Store) Layers() []image.Layer {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]image.Layer, 0, len(s.layers))
	for _, l := range s.layers {
		out = append(out, l)
	}
	return out
}

// Cached is what is here of a layer, and what was done with it since Open.
type Cached struct {
	lazy.Stats       // of its data
	MetaBytes  int64 // of its metadata, on disk
}

// Cached says what is here of each of the layers.
func (s *Store) Cached(layers []image.Layer) []Cached {
	data := s.data.Stats()
	out := make([]Cached, len(layers))
	for i, l := range layers {
		out[i].Stats = data[l.DataDigest]
		if fi, err := os.Stat(s.path("meta", l.MetaDigest)); err == nil {
			out[i].MetaBytes = fi.Size()
		}
	}
	return out
}

// Trim forgets images that are not to be kept, and drops what is here of layers that are
// not, unless they are in use or were made here just now.
func (s *Store) Trim(keepImage, keepLayer func(digest string) bool) error {
	roots, err := s.Roots()
	if err != nil {
		return err
	}
	own := map[string]bool{}
	for _, l := range roots {
		own[l.MetaDigest] = true
	}
	for _, img := range s.List() {
		made := false
		for _, l := range img.Layers {
			made = made || own[l.MetaDigest]
		}
		if keepImage(img.Digest) || made {
			continue
		}
		if err := s.Delete(img.Digest); err != nil && !errors.Is(err, errs.ImageNotFound) {
			return err
		}
	}
	for _, l := range s.Layers() {
		if keepLayer(l.MetaDigest) || own[l.MetaDigest] {
			continue
		}
		if err := s.Drop(l); err != nil && !errors.Is(err, errs.StateConflict) {
			return err
		}
	}
	return nil
}
