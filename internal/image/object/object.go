package object

import (
	"context"
	"fmt"
	"io"
	"time"

	"dsec/api/v1/errs"
)

const (
	phase = "image.object"

	maxKey = 240 // what a file name can hold
)

// Info describes one object.
type Info struct {
	Key  string
	Size int64
	// Modified is when the object was last put, by the store's clock: compare it
	// only with times of the same store.
	Modified time.Time
}

// Store is a flat space of immutable objects. All methods may be called
// concurrently, and by several machines.
type Store interface {
	// Put stores exactly size bytes of r under key. The object is there whole or not
	// at all, also after a crash; when Put returns nil it is durable and every later
	// Get, Stat and List sees it. Putting a key again is fine: whoever reads
	// meanwhile gets one of the two, whole. A reader with fewer or more bytes than
	// size is bad_request, and nothing is stored.
	Put(ctx context.Context, key string, size int64, r io.Reader) error

	// Get reads n bytes from off; n < 0 means to the end. A range that reaches beyond
	// the end is cut there, and may so be empty. The body ends with io.EOF only if all
	// of the range was read; anything else is a typed error. An absent object is
	// object_not_found, from Get itself.
	Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error)

	// Stat describes an object, or is object_not_found.
	Stat(ctx context.Context, key string) (Info, error)

	// Delete removes an object; an absent one is fine.
	Delete(ctx context.Context, key string) error

	// List calls each for every object whose key starts with prefix, in no given
	// order, and ends early with the error of each. Objects put or deleted meanwhile
	// may or may not be seen; the others are seen once.
	List(ctx context.Context, prefix string, each func(Info) error) error
}

// CheckKey says whether key can name an object: segments of a-z, 0-9, '.', '-' and
// '_' separated by '/', each starting with a letter or digit, 240 bytes in all. All
// stores refuse other keys with bad_request.
func CheckKey(key string) error {
	if len(key) == 0 || len(key) > maxKey {
		return badKey(key, "has a length that no key has")
	}
	return checkChars(key, true)
}

// CheckPrefix is CheckKey for what List takes: any start of a key, or nothing.
func CheckPrefix(prefix string) error {
	if len(prefix) > maxKey {
		return badKey(prefix, "is longer than any key")
	}
	return checkChars(prefix, false)
}

func checkChars(key string, whole bool) error {
	start := 0 // of the segment
	for i := range len(key) {
		c := key[i]
		alnum := 'a' <= c && c <= 'z' || '0' <= c && c <= '9'
		switch {
		case c == '/' && i > start:
			start = i + 1
			continue
		case !alnum && (i == start || c != '.' && c != '-' && c != '_'):
			return badKey(key, fmt.Sprintf("has a character that a key cannot have at byte %d", i))
		}
	}
	if whole && start == len(key) {
		return badKey(key, "ends with a slash")
	}
	return nil
}

func badKey(key, why string) error {
	return errs.New(errs.BadRequest, phase, fmt.Sprintf("object key %.80q %s", key, why))
}

func checkRange(key string, off int64) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if off < 0 {
		return errs.New(errs.BadRequest, phase, fmt.Sprintf("object %s: negative offset %d", key, off))
	}
	return nil
}

func checkPut(key string, size int64) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if size < 0 {
		return errs.New(errs.BadRequest, phase, fmt.Sprintf("object %s: negative size %d", key, size))
	}
	return nil
}

func notFound(key string, cause error) error {
	return errs.New(errs.ObjectNotFound, phase, "object "+key+" is not in the store").Because(cause)
}

func wrongSize(key string, size int64, more bool) error {
	what := "fewer"
	if more {
		what = "more"
	}
	return errs.New(errs.BadRequest, phase, fmt.Sprintf("object %s: the reader has %s than the %d bytes said", key, what, size))
}

// ReadAll reads the range of an object into memory; n < 0 means to the end. It
// refuses to read more than limit bytes with store_corrupt.
func ReadAll(ctx context.Context, s Store, key string, off, n, limit int64) ([]byte, error) {
	rc, err := s.Get(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	defer rc.Close()
	buf := make([]byte, 0, min(max(n, 4<<10), limit)+1)
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		k, err := rc.Read(buf[len(buf):min(int64(cap(buf)), limit+1)])
		buf = buf[:len(buf)+k]
		switch {
		case err == io.EOF:
			return buf, nil
		case err != nil:
			return nil, err
		case int64(len(buf)) > limit:
			return nil, errs.New(errs.StoreCorrupt, phase, fmt.Sprintf("object %s has more than %d bytes", key, limit))
		}
	}
}
