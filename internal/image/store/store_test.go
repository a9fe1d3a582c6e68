package store

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// These tests need root: they mount what they import.

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir, Options{Now: func() time.Time { return time.UnixMilli(42) }})
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

// contents lists what a store's directory holds.
func contents(t *testing.T, dir string) string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && d.Name() != "lock" || strings.HasPrefix(d.Name(), "import-") {
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

func TestImportGetMountDelete(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
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
	if got := fmt.Sprint(phases); got != "[read encode sync done]" {
		t.Errorf("phases %s", got)
	}
	if img.CreatedUnixMS != 42 || img.Files != 3 || len(img.Layers) != 1 || img.Layers[0].Kind != image.KindBase || img.Config.Cmd[0] != "/a" || img.SizeBytes != img.Layers[0].MetaSize+img.Layers[0].DataSize {
		t.Errorf("%+v", img)
	}
	if got := imagetest.Mounted(t, s.LayerFiles(img.Layers[0])); len(got) != 4 {
		t.Errorf("mounted %v", got)
	}
	if err := s.Verify(t.Context(), img.Digest, nil); err != nil {
		t.Error(err)
	}
	again, err := s.ImportPath(t.Context(), src, ImportOptions{Config: &image.Config{Cmd: []string{"/a"}}})
	if err != nil || again.Digest != img.Digest {
		t.Errorf("the second import gave %s (%v), the first %s", again.Digest, err, img.Digest)
	}
	// Other configuration, same blobs.
	other, err := s.ImportPath(t.Context(), src, ImportOptions{})
	if err != nil || other.Digest == img.Digest || fmt.Sprint(other.Layers) != fmt.Sprint(img.Layers) {
		t.Errorf("%+v, %v", other, err)
	}
	if n := len(s.List()); n != 2 {
		t.Errorf("%d images", n)
	}
	s.Close()
	s = open(t, dir)
	if got, err := s.Get(img.Digest); err != nil || fmt.Sprint(got) != fmt.Sprint(img) {
		t.Errorf("after opening again: %+v, %v", got, err)
	}
	if err := s.Delete(other.Digest); err != nil {
		t.Error(err)
	}
	if err := s.Verify(t.Context(), img.Digest, nil); err != nil {
		t.Errorf("deleting an image took another's blobs: %v", err)
	}
	if err := s.Delete(img.Digest); err != nil {
		t.Error(err)
	}
	if left := contents(t, dir); left != "" {
		t.Errorf("left:\n%s", left)
	}
	for _, err := range []error{s.Delete(img.Digest), s.Verify(t.Context(), img.Digest, nil), second(s.Get(img.Digest))} {
		if !errors.Is(err, errs.ImageNotFound) {
			t.Errorf("got %v", err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestConcurrentImportsOfTheSame(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	src := tree(t, map[string]string{"a": big("a"), "b": "b"})
	var wg sync.WaitGroup
	digests := make([]string, 8)
	for i := range digests {
		wg.Go(func() {
			img, err := s.ImportPath(t.Context(), src, ImportOptions{})
			if err != nil {
				t.Error(err)
			}
			digests[i] = img.Digest
		})
	}
	wg.Wait()
	for _, d := range digests {
		if d != digests[0] {
			t.Errorf("digests %v", digests)
		}
	}
	if got := strings.Count(contents(t, dir), "\n") + 1; got != 3 {
		t.Errorf("holds\n%s", contents(t, dir))
	}
}

func TestImportsAndDeletesSharingBlobs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	src := tree(t, map[string]string{"a": big("a")})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 20 {
				img, err := s.ImportPath(t.Context(), src, ImportOptions{Config: &image.Config{User: fmt.Sprint(i)}})
				if err != nil {
					t.Error(err)
					return
				}
				if err := s.Verify(t.Context(), img.Digest, nil); err != nil {
					t.Error(err)
				}
				if err := s.Delete(img.Digest); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if left := contents(t, dir); left != "" {
		t.Errorf("left:\n%s", left)
	}
}

func TestFailedImportsLeaveNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
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
	_, err = s.ImportPath(t.Context(), tree(t, map[string]string{"a": strings.Repeat("x", 20<<20)}), ImportOptions{})
	if !errors.Is(err, errs.DiskFull) {
		t.Errorf("got %v", err)
	}
	if after := contents(t, dir); after != before {
		t.Errorf("left:\n%s", after)
	}
	if err := s.Verify(t.Context(), small.Digest, nil); err != nil {
		t.Error(err)
	}
	s.Close()
}

func TestOpenRemovesWhatACrashLeft(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	img, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a")}), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	before := contents(t, dir)
	s.Close()
	// Killed while importing, and between placing blobs and description.
	for _, p := range []string{"tmp/import-1/data", "tmp/spool-2", "blobs/sha256/" + strings.Repeat("0", 64)} {
		p = filepath.Join(dir, p)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s = open(t, dir)
	if after := contents(t, dir); after != before {
		t.Errorf("holds:\n%s", after)
	}
	if err := s.Verify(t.Context(), img.Digest, nil); err != nil {
		t.Error(err)
	}
}

func TestDamageIsFoundAndNamed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, want string
		damage     func(s *Store, img image.Image) error
	}{
		{"a data byte", "data of layer 1", func(s *Store, img image.Image) error { return flip(s.blob(img.Layers[0].DataDigest), 5000) }},
		{"a metadata byte", "metadata of layer 1", func(s *Store, img image.Image) error { return flip(s.blob(img.Layers[0].MetaDigest), 5000) }},
		{"a shorter blob", "bytes instead of", func(s *Store, img image.Image) error { return os.Truncate(s.blob(img.Layers[0].DataDigest), 4096) }},
		{"a missing blob", "missing", func(s *Store, img image.Image) error { return os.Remove(s.blob(img.Layers[0].DataDigest)) }},
		{"the description", "description", func(s *Store, img image.Image) error {
			return flip(s.description(strings.TrimPrefix(img.Digest, digestPfx)), 40)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			s := open(t, dir)
			img, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a")}), ImportOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := c.damage(s, img); err != nil {
				t.Fatal(err)
			}
			err = s.Verify(t.Context(), img.Digest, nil)
			if !errors.Is(err, errs.ImageCorrupt) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q in it", err, c.want)
			}
			s.Close()
			s = open(t, dir)
			again, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a")}), ImportOptions{})
			if err != nil || again.Digest != img.Digest {
				t.Fatalf("import it again: %v, %v", again.Digest, err)
			}
			if err := s.Verify(t.Context(), img.Digest, nil); err != nil {
				t.Errorf("imported again: %v", err)
			}
			if err := c.damage(s, img); err != nil {
				t.Fatal(err)
			}
			s.Close()
			s = open(t, dir) // damage in one image does not keep the store shut
			if _, err := s.Get(img.Digest); c.name == "the description" && !errors.Is(err, errs.ImageCorrupt) {
				t.Errorf("got %v", err)
			}
			if err := s.Delete(img.Digest); err != nil {
				t.Error(err)
			}
		})
	}
}

func flip(path string, at int64) error {
	p, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	p[at] ^= 0x41
	return os.WriteFile(path, p, 0o600)
}

func TestOneProcessAtATime(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open(t, dir)
	if _, err := Open(dir, Options{}); !errors.Is(err, errs.StateConflict) {
		t.Errorf("got %v", err)
	}
}

func TestSkippedThingsAreNotedWithoutChangingTheDigest(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
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
	s := open(t, t.TempDir())
	_, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": big("a")}), ImportOptions{Layer: layer.Options{MaxBytes: 100}})
	if !errors.Is(err, errs.BodyTooLarge) {
		t.Errorf("got %v", err)
	}
}

// The mount of a damaged blob stays for who has it; the next one is of the new blob.
func TestAReplacedBlobIsMountedAnew(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	src := tree(t, map[string]string{"a": big("a")})
	img, err := s.ImportPath(t.Context(), src, ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l := img.Layers[0]
	m := NewMounts(s, time.Hour)
	defer m.Close()
	old, release, err := m.Acquire(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	if err := flip(s.blob(l.DataDigest), 5000); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ImportPath(t.Context(), src, ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	fresh, again, err := m.Acquire(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	if old == fresh {
		t.Error("the mount of the damaged blob is shared")
	}
	fd, err := unix.Openat(fresh, "a", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "a")
	got, err := io.ReadAll(f)
	f.Close()
	if err != nil || string(got) != big("a") {
		t.Errorf("damaged still: %v", err)
	}
	release()
	again()
}

// An image of layers that were added one by one, as snapshots are.
func TestLayersAreKeptUntilReleased(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
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
	a, b, unused := add("a"), add("b"), add("c")
	img, err := s.AddImage(t.Context(), image.Image{Layers: []image.Layer{a, b}, Config: image.Config{Cmd: []string{"x"}}})
	if err != nil || img.SizeBytes != a.MetaSize+a.DataSize+b.MetaSize+b.DataSize || img.CreatedUnixMS != 42 {
		t.Fatalf("%+v, %v", img, err)
	}
	for _, l := range []image.Layer{a, b, unused} {
		s.Release(l)
	}
	if err := s.Verify(t.Context(), img.Digest, nil); err != nil {
		t.Error(err)
	}
	if n := strings.Count(contents(t, dir), "blobs/"); n != 4 {
		t.Errorf("holds\n%s", contents(t, dir))
	}
	if _, err := s.AddImage(t.Context(), image.Image{Layers: []image.Layer{unused}}); !errors.Is(err, errs.ImageNotFound) {
		t.Errorf("an image of a released layer: %v", err)
	}
	if err := s.Delete(img.Digest); err != nil {
		t.Error(err)
	}
	if left := contents(t, dir); left != "" {
		t.Errorf("left:\n%s", left)
	}
}
