package lazy

import (
	"context"
	"fmt"
	"os"

	"dsec/api/v1/errs"
)

// Add makes a blob of the file at path, which holds all of it and which nobody has open.
// The file is moved into the cache, or removed if the blob is there already, however much
// of it is filled. Nothing is synced: after a crash of the machine the blob is fetched
// again. On error the file may be left where it was. Errors: as [Cache.Blob].
func (c *Cache) Add(ctx context.Context, digest string, size int64, f Filler, path string) error {
	if !digestRE.MatchString(digest) {
		return errs.New(errs.ImageCorrupt, phase, "not a SHA-256: "+digest)
	}
	t, err := newTable(f, size)
	if err != nil {
		return err
	}
	fi, err := os.Stat(path)
	if err != nil {
		return diskError("add blob", err)
	}
	if fi.Size() != size {
		return errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("blob %s has %d bytes instead of %d", digest, fi.Size(), size))
	}
	for {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, phase, "add blob", err)
		}
		h, err := c.handle(digest)
		if err != nil {
			return err
		}
		again, err := h.b.add(t, f, path)
		h.Close()
		if err != nil || !again {
			return err
		}
	}
}

func (b *blob) add(t *table, f Filler, path string) (again bool, err error) {
	b.op.Lock()
	defer b.op.Unlock()
	if b.gone {
		return true, nil
	}
	if b.st != nil {
		return false, diskError("remove a blob that is there", os.Remove(path))
	}
	if err := os.MkdirAll(b.dir, 0o700); err != nil {
		return false, diskError("add blob", err)
	}
	if err := os.Rename(path, b.file()); err != nil {
		return false, diskError("add blob", err)
	}
	all := newBitmap(t.n())
	for k := range t.n() {
		all.set(k)
	}
	st, err := createState(b.dir, b.c.opts.BootID, t, all)
	if err != nil {
		return false, diskError("add blob", err)
	}
	b.setUp(st, t, all)
	b.setFiller(f)
	b.c.grow(0)
	return false, nil
}

// Remove removes a blob with all that is filled of it. Errors: state_conflict (it is in use).
func (c *Cache) Remove(digest string) error {
	c.mu.Lock()
	b := c.blobs[digest]
	c.mu.Unlock()
	if b == nil || c.remove(b) {
		return nil
	}
	b.op.Lock()
	defer b.op.Unlock()
	if b.gone || b.st == nil {
		return nil
	}
	return errs.New(errs.StateConflict, phase, "blob "+digest+" is in use")
}
