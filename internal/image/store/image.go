package store

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/chunk"
)

// own is an image made here that the catalogue may not have yet.
type own struct {
	UnixMS int64         `json:"unix_ms"`
	Digest string        `json:"digest"`
	Layers []image.Layer `json:"layers"`
}

// ownTime is how long the collector is told of an image made here. The catalogue has it
// within seconds, or never.
const ownTime = time.Hour

// putTime is how long an image made here may take to be in the catalogue.
const putTime = time.Minute

// AddImage records an image of layers that AddLayer made and that are not released, or
// that something else keeps in the object store: a sandbox, an image. It returns the
// image with its digest, size and time. The caller has it put into the catalogue at
// once. Errors: image_corrupt (img says a digest, and it is not that image's),
// image_not_found (a layer is in no object store), lease_lost (the object
// store may have lost a layer while it was written: add it again), disk_full, the
// object store's.
func (s *Store) AddImage(ctx context.Context, img image.Image) (image.Image, error) {
	if err := ctx.Err(); err != nil {
		return image.Image{}, errs.Wrap(errs.RequestCanceled, phase, "record image", err)
	}
	img.SizeBytes = 0
	for _, l := range img.Layers {
		if err := Stored(l); err != nil {
			return image.Image{}, err
		}
		img.SizeBytes += l.MetaSize + l.DataSize
	}
	digest := digestOf(img)
	if img.Digest != "" && img.Digest != digest {
		return image.Image{}, errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("what is described is the image %s, not %.100s", digest, img.Digest))
	}
	img.Digest = digest
	if img.CreatedUnixMS == 0 {
		img.CreatedUnixMS = s.now().UnixMilli()
	}
	name, err := s.recordOwn(img)
	if err != nil {
		return image.Image{}, err
	}
	if err := s.commit(ctx, img.Layers); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.own, name)
		return image.Image{}, errors.Join(err, s.removeNote("own", name))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.images[img.Digest]; ok { // the same content again
		img.CreatedUnixMS = old.CreatedUnixMS
	}
	s.images[img.Digest] = img
	if err := s.writeNote("images", strings.TrimPrefix(img.Digest, digestPfx), img, false); err != nil {
		s.log.Warn("an image that was made here is not noted", "image", img.Digest, "err", err)
	}
	return img, nil
}

// Retain has the collector told of an image's layers for an hour, as of one that is made
// here: the catalogue is about to have other layers in their place, and what begins to use the
// image just now may still have been told of these.
func (s *Store) Retain(img image.Image) error {
	_, err := s.recordOwn(img)
	return err
}

func (s *Store) recordOwn(img image.Image) (name string, err error) {
	var random [16]byte
	_, _ = rand.Read(random[:]) // never fails
	name = hex.EncodeToString(random[:])
	o := own{UnixMS: s.now().UnixMilli(), Digest: img.Digest, Layers: img.Layers}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.writeNote("own", name, o, true); err != nil {
		return "", err
	}
	s.own[name] = o
	return name, nil
}

const commitTries = 3

// commit gives up the leases under which layers were put, which are recorded now.
func (s *Store) commit(ctx context.Context, layers []image.Layer) error {
	var sessions []*chunk.Session
	s.mu.Lock()
	for _, l := range layers {
		if p := s.pins[l.MetaDigest]; p != nil {
			sessions = append(sessions, p.sessions...)
			p.sessions = nil
		}
	}
	s.mu.Unlock()
	var first error
	for _, c := range sessions {
		err := c.Commit(ctx)
		for try := 1; err != nil && !errors.Is(err, errs.LeaseLost) && ctx.Err() == nil && try < commitTries; try++ {
			err = c.Commit(ctx)
		}
		if err != nil {
			c.Close(ctx)
			if first == nil {
				first = err
			}
		}
	}
	return first
}

// Roots are the layers that the object store must keep for this node: of images that
// were made here and that the catalogue may not have yet.
func (s *Store) Roots() ([]image.Layer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []image.Layer
	for name, o := range s.own {
		if s.now().Sub(time.UnixMilli(o.UnixMS)) < ownTime {
			out = append(out, o.Layers...)
			continue
		}
		if err := s.removeNote("own", name); err != nil {
			return nil, err
		}
		delete(s.own, name)
	}
	return out, nil
}

func (s *Store) removeNote(dir, name string) error {
	err := os.Remove(s.path(dir, name+jsonExt))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errs.Wrap(errs.InternalError, phase, "remove note", err)
}

// digestOf is over what makes an image what it is: not when it was made, nor
// what its source held that could not be kept, nor where it is stored.
func digestOf(img image.Image) string {
	img.Digest, img.CreatedUnixMS, img.Notes = "", 0, nil
	if img.Made != nil {
		img.Layers, img.Made, img.SizeBytes = img.Made, nil, 0
		for _, l := range img.Layers {
			img.SizeBytes += l.MetaSize + l.DataSize
		}
	}
	img.Layers = slices.Clone(img.Layers)
	for i := range img.Layers {
		img.Layers[i].MetaObject, img.Layers[i].MapObject = "", ""
	}
	p, err := json.Marshal(img) // maps are marshalled sorted
	if err != nil {
		panic(err) // plain strings and numbers
	}
	sum := sha256.Sum256(p)
	return digestPfx + hex.EncodeToString(sum[:])
}

// Stored is nil if a layer says where it is in an object store, else image_not_found.
func Stored(l image.Layer) error {
	if strings.HasPrefix(l.MetaObject, "meta/"+l.MetaDigest+".") && (l.DataDigest == "") == (l.MapObject == "") {
		return nil
	}
	return errs.New(errs.ImageNotFound, phase, fmt.Sprintf("layer %.64s is in no object store; import its image again", l.MetaDigest))
}

// Get returns an image that was made or used here. Errors: image_not_found.
func (s *Store) Get(digest string) (image.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if img, ok := s.images[digest]; ok {
		return img, nil
	}
	return image.Image{}, errs.New(errs.ImageNotFound, phase, fmt.Sprintf("no image %.100s on this node", digest))
}

// List returns the images that were made or used here, oldest first.
func (s *Store) List() []image.Image {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]image.Image, 0, len(s.images))
	for _, img := range s.images {
		list = append(list, img)
	}
	slices.SortFunc(list, func(a, b image.Image) int {
		if a.CreatedUnixMS != b.CreatedUnixMS {
			return int(a.CreatedUnixMS - b.CreatedUnixMS)
		}
		return strings.Compare(a.Digest, b.Digest)
	})
	return list
}

// Used notes that an image is used here.
func (s *Store) Used(img image.Image) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.images[img.Digest]; ok {
		return
	}
	s.images[img.Digest] = img
	if err := s.writeNote("images", strings.TrimPrefix(img.Digest, digestPfx), img, false); err != nil {
		s.log.Warn("an image that is used here is not noted", "image", img.Digest, "err", err)
	}
}

// Delete forgets an image that the catalogue has no more, and drops what is here of layers
// that no other image noted here has; those in use stay until they are not. Errors:
// image_not_found.
func (s *Store) Delete(digest string) error {
	s.mu.Lock()
	for name, o := range s.own { // but for one that was just made again
		if o.Digest != digest || s.now().Sub(time.UnixMilli(o.UnixMS)) < putTime {
			continue
		}
		if err := s.removeNote("own", name); err != nil {
			s.mu.Unlock()
			return err
		}
		delete(s.own, name)
	}
	img, ok := s.images[digest]
	if !ok {
		s.mu.Unlock()
		return errs.New(errs.ImageNotFound, phase, fmt.Sprintf("no image %.100s on this node", digest))
	}
	if err := s.removeNote("images", strings.TrimPrefix(digest, digestPfx)); err != nil {
		s.mu.Unlock()
		return err
	}
	delete(s.images, digest)
	needed := map[string]bool{}
	for _, other := range s.images {
		for _, l := range other.Layers {
			needed[l.MetaDigest] = true
		}
	}
	s.mu.Unlock()
	for _, l := range img.Layers {
		if needed[l.MetaDigest] {
			continue
		}
		if err := s.Drop(l); err != nil && !errors.Is(err, errs.StateConflict) {
			return err
		}
	}
	return nil
}
