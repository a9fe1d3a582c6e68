package apiserver

import (
	"context"
	"slices"
	"strings"
	"sync"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/store"
)

// catalog is the image catalogue, kept current by the store's watch: no create reads the
// store.
type catalog struct {
	store store.Images
	ready chan struct{}

	mu     sync.RWMutex
	byName map[string]v1.Image
	filled bool
}

func newCatalog(s store.Images) *catalog {
	return &catalog{store: s, ready: make(chan struct{}), byName: map[string]v1.Image{}}
}

func (c *catalog) run(ctx context.Context) error {
	return c.store.FollowImages(ctx, func(ch store.Change[v1.Image]) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if ch.Reset {
			clear(c.byName)
		}
		for name, img := range ch.Put {
			c.byName[name] = img
		}
		for _, name := range ch.Delete {
			delete(c.byName, name)
		}
		if !c.filled {
			c.filled = true
			close(c.ready)
		}
		return nil
	})
}

// put records an image; it can be used when put returns.
func (c *catalog) put(ctx context.Context, img v1.Image) error {
	if _, err := c.store.PutImage(ctx, img); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.byName[img.Name] = img
	return nil
}

// swap records next in the place of old, if that is still what the catalogue has.
func (c *catalog) swap(ctx context.Context, old, next v1.Image) error {
	if err := c.store.SwapImage(ctx, old, next); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if now, ok := c.byName[next.Name]; ok && store.SameLayers(now, old) { // else the watch was faster
		c.byName[next.Name] = next
	}
	return nil
}

func (c *catalog) delete(ctx context.Context, name string) error {
	if _, err := c.store.DeleteImage(ctx, name); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.byName, name)
	return nil
}

// resolve finds an image by name or digest.
func (c *catalog) resolve(ref string) (v1.Image, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if img, ok := c.byName[ref]; ok {
		return img, nil
	}
	if strings.HasPrefix(ref, "sha256:") {
		for _, img := range c.byName {
			if img.Digest == ref {
				return img, nil
			}
		}
	}
	err := errs.New(errs.ImageNotFound, "image.resolve", "no image "+quoted(ref)).With("image", ref)
	if snap := v1.SnapshotPrefix + ref; c.byName[snap].Name != "" {
		err = err.Advise("there is a snapshot of that name: " + snap)
	} else if strings.HasPrefix(ref, v1.SnapshotPrefix) {
		err = err.Advise("list snapshots with 'dsec snapshot ls'")
	}
	return v1.Image{}, err
}

// madeOn names the snapshots that were made on an image.
func (c *catalog) madeOn(digest string) (names []string) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for name, img := range c.byName {
		if img.Snapshot != nil && img.Digest != digest && slices.Contains(img.Snapshot.Parents, digest) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// list returns the catalogue by name; digest limits it to one.
func (c *catalog) list(digest string) []v1.Image {
	c.mu.RLock()
	defer c.mu.RUnlock()
	out := make([]v1.Image, 0, len(c.byName))
	for _, img := range c.byName {
		if digest == "" || img.Digest == digest {
			out = append(out, img)
		}
	}
	slices.SortFunc(out, func(a, b v1.Image) int { return strings.Compare(a.Name, b.Name) })
	return out
}
