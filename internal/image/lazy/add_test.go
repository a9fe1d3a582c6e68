package lazy_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image/lazy"
)

func TestAddedBlobsAreCompleteAndCanGo(t *testing.T) {
	t.Parallel()
	needRoot(t)
	l := buildLayer(t, 3<<20, 77)
	dir := t.TempDir()
	src := newSource(l.data, 3)
	src.setFail(func(int, int) error { return errors.New("fetched") })
	write := func() string {
		path := filepath.Join(dir, "full")
		if err := os.WriteFile(path, l.data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	c := openCache(t, dir+"/cache", lazy.Options{})
	if err := c.Add(t.Context(), l.digest, int64(len(l.data)), src, write()); err != nil {
		t.Fatal(err)
	}
	if err := c.Add(t.Context(), l.digest, int64(len(l.data)), src, write()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir + "/full"); !os.IsNotExist(err) {
		t.Errorf("the second file is still there: %v", err)
	}
	if err := c.Add(t.Context(), l.digest, int64(len(l.data))+1, src, write()); !errors.Is(err, errs.ImageCorrupt) {
		t.Errorf("a file of another size: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	c = openCache(t, dir+"/cache", lazy.Options{}) // what a process added the next one has
	defer c.Close()
	h, err := c.Blob(t.Context(), l.digest, int64(len(l.data)), src)
	if err != nil {
		t.Fatal(err)
	}
	if p := h.Progress(); p.Left != 0 || p.Filled != p.Total {
		t.Errorf("%+v", p)
	}
	m := mountBlob(t, l, h.Path())
	r := openBig(t, l, m)
	if err := r.check(0, int64(len(l.content))); err != nil {
		t.Error(err)
	}
	if err := c.Remove(l.digest); !errors.Is(err, errs.StateConflict) {
		t.Errorf("removed while it is mounted: %v", err)
	}
	r.f.Close()
	os.NewFile(uintptr(m), "mount").Close()
	h.Close()
	if err := c.Remove(l.digest); err != nil || c.Used() != 0 {
		t.Errorf("%v, %d bytes used", err, c.Used())
	}
}
