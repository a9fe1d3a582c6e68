package store

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/lazy"
	"dsec/internal/image/object"
	"dsec/internal/image/object/objecttest"

	"golang.org/x/sys/unix"
)

// These tests need root: they mount what they import.

// open opens a node's store in dir, over an object store beside it.
func open(t *testing.T, dir string) *Store {
	t.Helper()
	objects, err := object.OpenDir(t.Context(), dir+".objects")
	if err != nil {
		t.Fatal(err)
	}
	return openOver(t, dir, objects)
}

func openOver(t *testing.T, dir string, objects object.Store) *Store {
	t.Helper()
	s, err := Open(t.Context(), dir, Options{Objects: objects, Now: func() time.Time { return time.UnixMilli(42) }, Lazy: lazy.Options{Deadline: 3 * time.Second}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// tree makes a directory with files of the given contents.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(p, time.Unix(5, 0), time.Unix(5, 0)); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(filepath.Dir(p), time.Unix(5, 0), time.Unix(5, 0)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func big(c string) string { return strings.Repeat(c, 10_000) }

// contents lists the files of a store's directory but for notes of layers and data.
func contents(t *testing.T, dir string) string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name() != "lock" {
			rel, _ := filepath.Rel(dir, p)
			out = append(out, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(out, "\n")
}

func mountedLayer(t *testing.T, s *Store, l image.Layer) []string {
	t.Helper()
	f, release, err := s.Use(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	return imagetest.Mounted(t, f)
}

func TestImportGetMountDelete(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	s := open(t, dir)
	src := tree(t, map[string]string{"a": "small", "d/b": big("b")})
	var phases []string
	img, err := s.ImportPath(t.Context(), src, ImportOptions{
		Config: &image.Config{Cmd: []string{"/a"}},
		Progress: func(p Progress) {
			if len(phases) == 0 || phases[len(phases)-1] != p.Phase {
				phases = append(phases, p.Phase)
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(phases); got != "[read encode store done]" {
		t.Errorf("phases %s", got)
	}
	if img.CreatedUnixMS != 42 || img.Files != 3 || len(img.Layers) != 1 || img.Layers[0].Kind != image.KindBase || img.Config.Cmd[0] != "/a" || img.SizeBytes != img.Layers[0].MetaSize+img.Layers[0].DataSize {
		t.Errorf("%+v", img)
	}
	if got := mountedLayer(t, s, img.Layers[0]); len(got) != 4 {
		t.Errorf("mounted %v", got)
	}
	again, err := s.ImportPath(t.Context(), src, ImportOptions{Config: &image.Config{Cmd: []string{"/a"}}})
	if err != nil || again.Digest != img.Digest || again.Layers[0] != img.Layers[0] {
		t.Errorf("the second import gave %+v (%v), the first %+v", again, err, img)
	}
	// Other configuration, same layers.
	other, err := s.ImportPath(t.Context(), src, ImportOptions{})
	if err != nil || other.Digest == img.Digest || fmt.Sprint(other.Layers) != fmt.Sprint(img.Layers) {
		t.Errorf("%+v, %v", other, err)
	}
	if n := len(s.List()); n != 2 {
		t.Errorf("%d images", n)
	}
	if roots, err := s.Roots(); err != nil || len(roots) != 3 {
		t.Errorf("roots %v, %v", roots, err)
	}
	s.Close()
	s = open(t, dir)
	if got, err := s.Get(img.Digest); err != nil || fmt.Sprint(got) != fmt.Sprint(img) {
		t.Errorf("after opening again: %+v, %v", got, err)
	}
	if roots, err := s.Roots(); err != nil || len(roots) != 3 {
		t.Errorf("roots after opening again %v, %v", roots, err)
	}
	if err := s.Delete(other.Digest); err != nil {
		t.Error(err)
	}
	if roots, err := s.Roots(); err != nil || len(roots) != 3 {
		t.Errorf("roots although it may have been made again %v, %v", roots, err)
	}
	s.Used(other)
	s.now = func() time.Time { return time.UnixMilli(42).Add(2 * putTime) }
	if err := s.Delete(other.Digest); err != nil {
		t.Error(err)
	}
	if roots, err := s.Roots(); err != nil || len(roots) != 2 {
		t.Errorf("roots after the removal %v, %v", roots, err)
	}
	s.now = func() time.Time { return time.UnixMilli(42).Add(2 * ownTime) }
	if roots, err := s.Roots(); err != nil || len(roots) != 0 {
		t.Errorf("roots long after %v, %v", roots, err)
	}
	if err := s.Verify(t.Context(), img.Layers, nil); err != nil {
		t.Errorf("deleting an image took another's layers: %v", err)
	}
	if err := s.Delete(img.Digest); err != nil {
		t.Error(err)
	}
	if left := contents(t, dir); left != "" {
		t.Errorf("left:\n%s", left)
	}
	for _, err := range []error{s.Delete(img.Digest), second(s.Get(img.Digest))} {
		if !errors.Is(err, errs.ImageNotFound) {
			t.Errorf("got %v", err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// What one node imports another mounts, which has nothing but the description.
func TestAnotherNodeReadsFromTheObjectStore(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	objects, err := object.OpenDir(t.Context(), dir+"/objects")
	if err != nil {
		t.Fatal(err)
	}
	random := make([]byte, 3<<20)
	rand.NewChaCha8([32]byte{7}).Read(random)
	files := map[string]string{"a": "small", "zeros": strings.Repeat("\x00", 1<<20), "hole/after": string(random), "b": big("b")}
	src := tree(t, files)
	img, err := openOver(t, dir+"/one", objects).ImportPath(t.Context(), src, ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	dead := errors.New("dead")
	var broken atomic.Bool
	counted := objecttest.Counting(objecttest.Faulty(objects, func(objecttest.Op, string) *objecttest.Fault {
		if broken.Load() {
			return &objecttest.Fault{Err: errs.New(errs.StoreUnavailable, "test", "the store is gone").Because(dead)}
		}
		return nil
	}))
	two := openOver(t, dir+"/two", counted)
	m := NewMounts(two, time.Hour)
	defer m.Close()
	fd, release, err := m.Acquire(t.Context(), img.Layers[0])
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if n := counted.Of(objecttest.Get, "pack").Calls; n != 0 {
		t.Errorf("%d reads of packs before anything was read", n)
	}
	broken.Store(true)
	name := fmt.Sprintf("/proc/self/fd/%d/hole/after", fd)
	if _, err := os.ReadFile(name); !errors.Is(err, unix.EIO) {
		t.Errorf("read from a dead store: %v", err)
	}
	broken.Store(false)
	for name, want := range files {
		got, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/%s", fd, name))
		if err != nil || string(got) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := two.Verify(t.Context(), img.Layers, nil); err != nil {
		t.Error(err)
	}
	broken.Store(true) // all is here now
	if err := two.Verify(t.Context(), img.Layers, nil); err != nil {
		t.Error(err)
	}
}

// What the first start on any node reads is fetched in advance by the starts on others.
func TestStartsLearnFromEachOther(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	objects, err := object.OpenDir(t.Context(), dir+"/objects")
	if err != nil {
		t.Fatal(err)
	}
	random := make([]byte, 4<<20)
	rand.NewChaCha8([32]byte{8}).Read(random)
	files := map[string]string{"a": string(random[:300<<10]), "b": string(random[1<<20 : 2<<20]), "c": string(random[2<<20:])}
	img, err := openOver(t, dir+"/one", objects).ImportPath(t.Context(), tree(t, files), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	start := func(name string) (s *Store, m *Mounts, release func(), root string) {
		t.Helper()
		s, err := Open(t.Context(), dir+"/"+name, Options{Objects: objects, TraceTime: 200 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		m = NewMounts(s, time.Hour)
		t.Cleanup(m.Close)
		fd, release, err := m.Acquire(t.Context(), img.Layers[0])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(release)
		s.Started(img.Digest, img.Layers)
		return s, m, release, fmt.Sprintf("/proc/self/fd/%d/", fd)
	}
	cached := func(s *Store) int64 { return s.Cached(img.Layers)[0].Cached }
	until := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal(what)
			}
		}
	}
	two, _, _, root := start("two")
	if _, err := os.ReadFile(root + "a"); err != nil {
		t.Fatal(err)
	}
	until("no trace of the first start is in the store", func() bool {
		tr, err := two.LoadTrace(t.Context(), img.Digest)
		return err == nil && len(tr[img.Layers[0].DataDigest]) > 0
	})
	three, m, release, root := start("three")
	until("nothing was fetched in advance", func() bool { return cached(three) >= 300<<10 })
	if got, err := os.ReadFile(root + "a"); err != nil || string(got) != files["a"] {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if n := cached(three); n > 1<<20 {
		t.Errorf("%d bytes are here, but only a was read", n)
	}
	// It may be dropped though it is being fetched, and is fetched again then.
	release()
	m.Forget(img.Layers[0])
	if err := three.Drop(img.Layers[0]); err != nil {
		t.Fatal(err)
	}
	if n := cached(three); n != 0 {
		t.Errorf("%d bytes are here after the layer was dropped", n)
	}
	_, release, err = m.Acquire(t.Context(), img.Layers[0])
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	three.Started(img.Digest, img.Layers)
	until("nothing was fetched again", func() bool { return cached(three) >= 300<<10 })
}

func TestALayerOfNoObjectStoreIsRefused(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "node"))
	img, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a")}), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	other, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("b")}), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	nowhere, mixed := img.Layers[0], img.Layers[0]
	nowhere.MetaObject, nowhere.MapObject = "", ""
	mixed.MetaObject = other.Layers[0].MetaObject
	for _, l := range []image.Layer{nowhere, mixed} {
		if _, _, err := s.Use(t.Context(), l); !errors.Is(err, errs.ImageNotFound) {
			t.Errorf("use of %+v: %v", l, err)
		}
		if _, err := s.AddImage(t.Context(), image.Image{Layers: []image.Layer{l}}); !errors.Is(err, errs.ImageNotFound) {
			t.Errorf("an image of %+v: %v", l, err)
		}
	}
}

func TestConcurrentImportsAndDeletes(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "node"))
	src := tree(t, map[string]string{"a": big("a")})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 5 {
				img, err := s.ImportPath(t.Context(), src, ImportOptions{Config: &image.Config{User: fmt.Sprint(i)}})
				if err != nil {
					t.Error(err)
					return
				}
				if err := s.Verify(t.Context(), img.Layers, nil); err != nil {
					t.Error(err)
				}
				if err := s.Delete(img.Digest); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := len(s.List()); n != 0 {
		t.Errorf("%d images", n)
	}
}

// An image of layers that were added one by one, as snapshots are.
func TestLayersAreKeptUntilReleased(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	s := open(t, dir)
	add := func(c string) image.Layer {
		l, err := s.AddLayer(t.Context(), image.KindWorkspace, func(data layer.Blob, meta io.Writer) (layer.Result, error) {
			b := layer.NewBuilder(data, layer.Options{})
			if err := b.File(t.Context(), c, layer.Attr{Perm: 0o644}, 10_000, strings.NewReader(big(c))); err != nil {
				return layer.Result{}, err
			}
			return b.Finish(meta)
		})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	leases := func() int {
		n := 0
		if err := s.objects.List(t.Context(), "lease/", func(object.Info) error { n++; return nil }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	a, b, unused := add("a"), add("b"), add("c")
	if n := leases(); n != 3 {
		t.Errorf("%d leases of 3 layers", n)
	}
	img, err := s.AddImage(t.Context(), image.Image{Layers: []image.Layer{a, b}, Config: image.Config{Cmd: []string{"x"}}})
	if err != nil || img.SizeBytes != a.MetaSize+a.DataSize+b.MetaSize+b.DataSize || img.CreatedUnixMS != 42 {
		t.Fatalf("%+v, %v", img, err)
	}
	if n := leases(); n != 1 {
		t.Errorf("%d leases when one layer has no image", n)
	}
	for _, l := range []image.Layer{a, b, unused} {
		s.Release(l)
	}
	if n := leases(); n != 0 {
		t.Errorf("%d leases when all are released", n)
	}
	if err := s.Verify(t.Context(), img.Layers, nil); err != nil {
		t.Error(err)
	}
}

// A collector that took the writer for dead: the image is not recorded.
func TestALostLeaseUndoesTheRecord(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	s := open(t, dir)
	l, err := s.AddLayer(t.Context(), image.KindBase, func(data layer.Blob, meta io.Writer) (layer.Result, error) {
		return layer.NewBuilder(data, layer.Options{}).Finish(meta)
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release(l)
	err = s.objects.List(t.Context(), "lease/", func(i object.Info) error { return s.objects.Delete(t.Context(), i.Key) })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.AddImage(t.Context(), image.Image{Layers: []image.Layer{l}}); !errors.Is(err, errs.LeaseLost) {
		t.Errorf("got %v", err)
	}
	if roots, err := s.Roots(); err != nil || len(roots) != 0 || len(s.List()) != 0 {
		t.Errorf("roots %v, images %v, %v", roots, s.List(), err)
	}
}

// A real full disk: a tmpfs of 8 MiB, reached through its detached mount alone.
func TestAFullDiskLeavesNothing(t *testing.T) {
	t.Parallel()
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fs)
	if err := errors.Join(unix.FsconfigSetString(fs, "size", "8m"), unix.FsconfigCreate(fs)); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	dir := fmt.Sprintf("/proc/self/fd/%d/store", fd)
	s := open(t, dir)
	small, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a")}), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	before := contents(t, dir)
	random := make([]byte, 6<<20)
	rand.NewChaCha8([32]byte{8}).Read(random)
	_, err = s.ImportPath(t.Context(), tree(t, map[string]string{"a": string(random)}), ImportOptions{})
	if !errors.Is(err, errs.DiskFull) {
		t.Errorf("got %v", err)
	}
	if after := contents(t, dir); after != before {
		t.Errorf("left:\n%s", after)
	}
	if err := s.Verify(t.Context(), small.Layers, nil); err != nil {
		t.Error(err)
	}
	s.Close()
}

func TestOpenRemovesWhatACrashLeft(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	s := open(t, dir)
	img, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a")}), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	before := contents(t, dir)
	s.Close()
	// Killed while importing, and notes that the machine's crash tore.
	for _, p := range []string{"tmp/import-1/data", "tmp/spool-2", "layers/0.json", "images/" + strings.Repeat("0", 64) + ".json", "own/x.json"} {
		p = filepath.Join(dir, p)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s = open(t, dir)
	if after := contents(t, dir); after != before {
		t.Errorf("holds:\n%s\nnot\n%s", after, before)
	}
	if err := s.Verify(t.Context(), img.Layers, nil); err != nil {
		t.Error(err)
	}
}

// What is damaged here is found, and fetched again once it was dropped.
func TestLocalDamageIsFoundAndMended(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "node"))
	img, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a")}), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l := img.Layers[0]
	if err := flip(s.path("data", "blobs", l.DataDigest, "data"), 5000); err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(t.Context(), img.Layers, nil); !errors.Is(err, errs.ImageCorrupt) || !strings.Contains(err.Error(), "data") {
		t.Errorf("got %v", err)
	}
	if err := s.Drop(l); err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(t.Context(), img.Layers, nil); err != nil {
		t.Errorf("fetched again: %v", err)
	}
}

// Metadata is not used as it is damaged: it is fetched again, or the use fails.
func TestDamagedMetadataIsFetchedAgain(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	s := open(t, dir)
	img, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a"), "b": "b"}), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l := img.Layers[0]
	path := s.path("meta", l.MetaDigest)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	used := func() {
		t.Helper()
		_, release, err := s.Use(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		release()
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, good) {
			t.Errorf("the metadata was not fetched again (%v)", err)
		}
	}
	for at := int64(0); at < l.MetaSize; at += max(l.MetaSize/7, 1) {
		if err := flip(path, at); err != nil {
			t.Fatal(err)
		}
		used()
	}
	// By a later process, which has not seen the file before.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := flip(path, 1030); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	used()
	// And if it cannot be had.
	if err := s.objects.Delete(t.Context(), l.MetaObject); err != nil {
		t.Fatal(err)
	}
	used()
	if err := flip(path, 1030); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Use(t.Context(), l); !errors.Is(err, errs.ObjectNotFound) {
		t.Errorf("got %v", err)
	}
}

// What the object store has damaged is stored again by another import.
func TestAnImportMendsTheObjectStore(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "node"))
	src := tree(t, map[string]string{"a": big("a"), "b": big("b")})
	img, err := s.ImportPath(t.Context(), src, ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, class := range []string{"pack", "map", "meta"} {
		l := img.Layers[0]
		damaged := 0
		err := filepath.WalkDir(s.dir+".objects/"+class, func(p string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				damaged++
				err = flip(p, 30)
			}
			return err
		})
		if err != nil || damaged == 0 {
			t.Fatal(damaged, err)
		}
		if err := s.Drop(l); err != nil {
			t.Fatal(err)
		}
		if err := s.Verify(t.Context(), img.Layers, nil); err == nil {
			t.Fatalf("the damaged %s was not noticed", class)
		}
		if img, err = s.ImportPath(t.Context(), src, ImportOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := s.Drop(img.Layers[0]); err != nil {
			t.Fatal(err)
		}
		if err := s.Verify(t.Context(), img.Layers, nil); err != nil {
			t.Errorf("after a damaged %s and another import: %v", class, err)
		}
	}
}

func TestADamagedMapIsReadAgain(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "node"))
	img, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a")}), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	err = filepath.WalkDir(s.path("maps"), func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			found++
			err = flip(p, 30)
		}
		return err
	})
	if err != nil || found != 1 {
		t.Fatal(found, err)
	}
	if err := s.Verify(t.Context(), img.Layers, nil); err != nil {
		t.Error(err)
	}
}

func TestOneProcessAtATime(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	s := open(t, dir)
	if _, err := Open(t.Context(), dir, Options{Objects: s.objects}); !errors.Is(err, errs.StateConflict) {
		t.Errorf("got %v", err)
	}
}

func TestFailedImportsLeaveNothing(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "node")
	s := open(t, dir)
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := w.WriteHeader(&tar.Header{Name: "a", Size: 10_000}); err != nil {
		t.Fatal(err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	for _, c := range []struct {
		name string
		ctx  context.Context
		r    io.Reader
		code errs.Code
	}{
		{"cut off", t.Context(), bytes.NewReader(buf.Bytes()), errs.ImageCorrupt},
		{"not a tar", t.Context(), strings.NewReader("hello"), errs.ImageUnsupported},
		{"cancelled meanwhile", cancelled, io.MultiReader(bytes.NewReader(buf.Bytes()), readerFunc(func(p []byte) (int, error) {
			cancel()
			return len(p), nil
		})), errs.RequestCanceled},
		{"a source that fails", t.Context(), io.MultiReader(bytes.NewReader(buf.Bytes()), readerFunc(func([]byte) (int, error) {
			return 0, errs.New(errs.ConnectionLost, "test", "client went away")
		})), errs.ConnectionLost},
	} {
		if _, err := s.ImportStream(c.ctx, c.r, ImportOptions{}); !errors.Is(err, c.code) {
			t.Errorf("%s: got %v, want %s", c.name, err, c.code)
		}
		if left := contents(t, dir); left != "" {
			t.Errorf("%s left:\n%s", c.name, left)
		}
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func flip(path string, at int64) error {
	p, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	p[at] ^= 0x41
	return os.WriteFile(path, p, 0o600)
}

func TestSkippedThingsAreNotedWithoutChangingTheDigest(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "node"))
	pack := func(records map[string]string) io.Reader {
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		if err := errors.Join(w.WriteHeader(&tar.Header{Name: "a", Typeflag: tar.TypeReg, Format: tar.FormatPAX, PAXRecords: records}), w.Close()); err != nil {
			t.Fatal(err)
		}
		return &buf
	}
	plain, err := s.ImportStream(t.Context(), pack(nil), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(plain.Digest); err != nil {
		t.Fatal(err)
	}
	noted, err := s.ImportStream(t.Context(), pack(map[string]string{"SCHILY.xattr.com.vendor.tag": "x"}), ImportOptions{})
	if err != nil || noted.Digest != plain.Digest || fmt.Sprint(noted.Notes) != "[left out 1 × xattr com.*]" {
		t.Errorf("%+v, %v", noted, err)
	}
}

func TestLimitsHold(t *testing.T) {
	t.Parallel()
	s := open(t, filepath.Join(t.TempDir(), "node"))
	_, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a")}), ImportOptions{Layer: layer.Options{MaxBytes: 100}})
	if !errors.Is(err, errs.BodyTooLarge) {
		t.Errorf("got %v", err)
	}
}

// Layers merged since are not what an image's digest is over, and what they replaced is told to the
// collector for a while.
func TestTheDigestIsOverWhatAnImageWasMadeOf(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(42)
	objects, err := object.OpenDir(t.Context(), filepath.Join(t.TempDir(), "objects"))
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "node"), Options{Objects: objects, Now: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	layer := func(c string, size int64) image.Layer {
		d := strings.Repeat(c, 64)
		return image.Layer{Kind: image.KindDiff, MetaDigest: d, MetaSize: size, MetaObject: "meta/" + d + ".1"}
	}
	old, err := s.AddImage(t.Context(), image.Image{Layers: []image.Layer{layer("a", 10), layer("b", 20)}})
	if err != nil {
		t.Fatal(err)
	}
	now = now.Add(2 * time.Hour) // the catalogue has it long since
	merged := old
	merged.Made, merged.Layers = old.Layers, []image.Layer{layer("c", 25)}
	if err := s.Retain(old); err != nil {
		t.Fatal(err)
	}
	got, err := s.AddImage(t.Context(), merged)
	if err != nil || got.Digest != old.Digest || got.SizeBytes != 25 {
		t.Errorf("%+v, %v; it was %+v", got, err, old)
	}
	if has, err := s.Get(old.Digest); err != nil || len(has.Layers) != 1 {
		t.Errorf("the node has %+v, %v", has, err)
	}
	merged.Made = merged.Made[1:]
	if _, err := s.AddImage(t.Context(), merged); !errors.Is(err, errs.ImageCorrupt) {
		t.Errorf("of another digest than it says: %v", err)
	}
	if has, err := s.Get(old.Digest); err != nil || len(has.Layers) != 1 {
		t.Errorf("after a refused one the node has %+v, %v", has, err)
	}
	merged.Digest = ""
	if other, err := s.AddImage(t.Context(), merged); err != nil || other.Digest == old.Digest {
		t.Errorf("made of something else: %+v, %v", other, err)
	}
	for _, want := range []bool{true, false} {
		roots, err := s.Roots()
		if err != nil || slices.ContainsFunc(roots, func(l image.Layer) bool { return l.MetaDigest[0] == 'a' }) != want {
			t.Errorf("%+v, %v; retained: %v", roots, err, want)
		}
		now = now.Add(time.Hour)
	}
}
