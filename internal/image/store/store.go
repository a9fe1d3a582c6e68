package store

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

const (
	phase     = "image.store"
	digestPfx = "sha256:"
	jsonExt   = ".json"
)

// Store is safe for concurrent use.
type Store struct {
	dir  string
	now  func() time.Time
	lock *os.File

	mu     sync.Mutex // guards the maps, and the directory's blobs and images
	images map[string]image.Image
	broken map[string]error
	// replaced counts, by digest, the blobs that were found damaged and replaced.
	replaced map[string]int
	// pinned counts, by digest, who added a blob and has not released it.
	pinned map[string]int
}

// Options of a store; the zero value is usable.
type Options struct {
	Now func() time.Time // for CreatedUnixMS
}

// Open opens the store in dir, making it if needed, and removes what a crash
// left. A second process is refused with state_conflict. An unreadable
// description does not stop it: that one image is then reported as corrupt.
func Open(dir string, opts Options) (*Store, error) {
	s := &Store{dir: dir, now: opts.Now, images: map[string]image.Image{}, broken: map[string]error{}, replaced: map[string]int{}, pinned: map[string]int{}}
	if s.now == nil {
		s.now = time.Now
	}
	for _, d := range []string{s.blobDir(), s.imageDir(), s.tmpDir()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, layer.DiskError("make store directory", err)
		}
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, layer.DiskError("open store lock", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, errs.New(errs.StateConflict, phase, "another process has the image store "+dir+" open").Because(err)
	}
	s.lock = lock
	if err := s.load(); err != nil {
		lock.Close()
		return nil, err
	}
	return s, nil
}

// Close gives the store up to other processes.
func (s *Store) Close() error { return s.lock.Close() }

func (s *Store) blobDir() string           { return filepath.Join(s.dir, "blobs", "sha256") }
func (s *Store) imageDir() string          { return filepath.Join(s.dir, "images") }
func (s *Store) tmpDir() string            { return filepath.Join(s.dir, "tmp") }
func (s *Store) blob(digest string) string { return filepath.Join(s.blobDir(), digest) }
func (s *Store) description(hexDigest string) string {
	return filepath.Join(s.imageDir(), hexDigest+jsonExt)
}

// load reads the descriptions and removes what no description needs.
func (s *Store) load() error {
	if err := removeAllIn(s.tmpDir()); err != nil {
		return err
	}
	names, err := os.ReadDir(s.imageDir())
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "list images", err)
	}
	for _, n := range names {
		hexDigest, ok := strings.CutSuffix(n.Name(), jsonExt)
		if !ok {
			continue
		}
		digest := digestPfx + hexDigest
		img, err := readDescription(s.description(hexDigest), digest)
		if err != nil {
			s.broken[digest] = err
			continue
		}
		s.images[digest] = img
	}
	if len(s.broken) > 0 { // who knows what those need
		return nil
	}
	blobs, err := os.ReadDir(s.blobDir())
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "list blobs", err)
	}
	used := s.used("")
	for _, b := range blobs {
		if !used[b.Name()] {
			if err := os.Remove(s.blob(b.Name())); err != nil {
				return errs.Wrap(errs.InternalError, phase, "remove unused blob", err)
			}
		}
	}
	return nil
}

func removeAllIn(dir string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "list unfinished imports", err)
	}
	for _, e := range list {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return errs.Wrap(errs.InternalError, phase, "remove unfinished import", err)
		}
	}
	return nil
}

func readDescription(path, digest string) (image.Image, error) {
	var img image.Image
	p, err := os.ReadFile(path)
	if err != nil {
		return img, errs.Wrap(errs.InternalError, phase, "read image "+digest, err)
	}
	if err := json.Unmarshal(p, &img); err != nil {
		return img, errs.Wrap(errs.ImageCorrupt, phase, "the description of image "+digest+" is damaged; import it again", err)
	}
	if got := digestOf(img); got != digest || img.Digest != digest {
		return img, errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("the description of image %s is damaged: it has the digest %s; import it again", digest, got))
	}
	return img, nil
}

// digestOf is over what makes an image what it is: not when it was made, nor
// what its source held that could not be kept.
func digestOf(img image.Image) string {
	img.Digest, img.CreatedUnixMS, img.Notes = "", 0, nil
	p, err := json.Marshal(img) // maps are marshalled sorted
	if err != nil {
		panic(err) // plain strings and numbers
	}
	sum := sha256.Sum256(p)
	return digestPfx + hex.EncodeToString(sum[:])
}

// used returns the blobs that are pinned or that images other than except need. s.mu is
// held, or no one else has s yet.
func (s *Store) used(except string) map[string]bool {
	used := map[string]bool{}
	for digest := range s.pinned {
		used[digest] = true
	}
	for digest, img := range s.images {
		if digest == except {
			continue
		}
		for _, l := range img.Layers {
			used[l.MetaDigest] = true
			if l.DataDigest != "" {
				used[l.DataDigest] = true
			}
		}
	}
	return used
}

// Get returns an image's description. Errors: image_not_found, image_corrupt.
func (s *Store) Get(digest string) (image.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if img, ok := s.images[digest]; ok {
		return img, nil
	}
	if err := s.broken[digest]; err != nil {
		return image.Image{}, err
	}
	return image.Image{}, errs.New(errs.ImageNotFound, phase, fmt.Sprintf("no image %.100s on this node", digest))
}

// List returns all readable images, oldest first.
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

// Delete removes an image and the blobs that no other image shares. What is
// mounted stays readable through its mounts. Errors: image_not_found.
func (s *Store) Delete(digest string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	img, ok := s.images[digest]
	if !ok && s.broken[digest] == nil {
		return errs.New(errs.ImageNotFound, phase, fmt.Sprintf("no image %.100s on this node", digest))
	}
	if err := os.Remove(s.description(strings.TrimPrefix(digest, digestPfx))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap(errs.InternalError, phase, "remove image", err)
	}
	used := s.used(digest)
	delete(s.images, digest)
	delete(s.broken, digest)
	if err := syncDir(s.imageDir()); err != nil {
		return err
	}
	for _, l := range img.Layers {
		if err := s.drop(l, used); err != nil {
			return err
		}
	}
	return nil
}

// drop removes a layer's blobs that are not used. s.mu is held.
func (s *Store) drop(l image.Layer, used map[string]bool) error {
	if len(s.broken) > 0 { // who knows what those need
		return nil
	}
	for _, d := range []string{l.MetaDigest, l.DataDigest} {
		if d == "" || used[d] {
			continue
		}
		if err := os.Remove(s.blob(d)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errs.Wrap(errs.InternalError, phase, "remove blob", err)
		}
	}
	return nil
}

// LayerFiles returns where a layer's blobs are.
func (s *Store) LayerFiles(l image.Layer) image.LayerFiles {
	f := image.LayerFiles{Meta: s.blob(l.MetaDigest)}
	if l.DataDigest != "" {
		f.Data = s.blob(l.DataDigest)
	}
	return f
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "open directory to sync it", err)
	}
	defer d.Close()
	return layer.DiskError("sync directory", d.Sync())
}
