package export_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/export"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/source"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// These tests need root: trees have owners and devices, and the kernel is what
// says what a layer holds.

// reader opens a layer's files for reading back.
func reader(t testing.TB, l image.LayerFiles) *layer.Reader {
	t.Helper()
	r, err := open(t, l)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func open(t testing.TB, l image.LayerFiles) (*layer.Reader, error) {
	t.Helper()
	size := func(p string) (*os.File, int64) {
		if p == "" {
			return nil, 0
		}
		f, err := os.Open(p)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		st, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		return f, st.Size()
	}
	meta, msize := size(l.Meta)
	data, dsize := size(l.Data)
	return layer.NewReader(meta, msize, data, dsize)
}

func fromDir(t testing.TB, dir string) image.LayerFiles {
	t.Helper()
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		_, err := source.Path(t.Context(), dir, b, source.Options{})
		return err
	})
	return l
}

func fromTar(t testing.TB, p []byte) image.LayerFiles {
	t.Helper()
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		_, err := source.Stream(t.Context(), bytes.NewReader(p), b, source.Options{Format: source.Tar, SpoolDir: t.TempDir()})
		return err
	})
	return l
}

func mustTar(t testing.TB, opts export.TarOptions, layers ...*layer.Reader) []byte {
	t.Helper()
	var buf bytes.Buffer
	if _, err := export.Tar(t.Context(), &buf, opts, layers...); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

var socket = regexp.MustCompile(`^"([^"\\]|\\.)*" mode=14\d{4} `)

// withoutSockets leaves out what a tar cannot hold.
func withoutSockets(lines []string) []string {
	var out []string
	for _, l := range lines {
		if !socket.MatchString(l) {
			out = append(out, l)
		}
	}
	return out
}

// numbered gives each of a property's trees a directory that is gone afterwards.
func numbered(t *testing.T) func(rt *rapid.T, f func(dir string)) {
	base, n := t.TempDir(), 0
	return func(rt *rapid.T, f func(dir string)) {
		n++
		dir := filepath.Join(base, fmt.Sprint(n))
		if err := os.Mkdir(dir, 0o755); err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(dir)
		f(dir)
	}
}

func TestTarOfALayerGivesTheLayerAgain(t *testing.T) {
	t.Parallel()
	in := numbered(t)
	rapid.Check(t, func(rt *rapid.T) {
		in(rt, func(dir string) {
			imagetest.RandomTree(rt, dir)
			opts := export.TarOptions{SparseMin: rapid.SampledFrom([]int64{0, 1, -1}).Draw(rt, "sparse")}
			l := fromDir(t, dir)
			p := mustTar(t, opts, reader(t, l))
			back := fromTar(t, p)
			if d := imagetest.Diff(withoutSockets(imagetest.Mounted(t, l)), imagetest.Mounted(t, back)); d != "" {
				rt.Fatal(d)
			}
			if again := mustTar(t, opts, reader(t, back)); !bytes.Equal(p, again) {
				rt.Fatal("the tar of what the tar gave is another")
			}
		})
	})
}

// GNU tar, which shares no code with ours, unpacks the same tree.
func TestGNUTarReadsIt(t *testing.T) {
	t.Parallel()
	in := numbered(t)
	rapid.Check(t, func(rt *rapid.T) {
		in(rt, func(dir string) {
			tree, out := filepath.Join(dir, "tree"), filepath.Join(dir, "out")
			for _, d := range []string{tree, out} {
				if err := os.Mkdir(d, 0o755); err != nil {
					rt.Fatal(err)
				}
			}
			imagetest.RandomTree(rt, tree)
			l := fromDir(t, tree)
			p := mustTar(t, export.TarOptions{SparseMin: rapid.SampledFrom([]int64{1, -1}).Draw(rt, "sparse")}, reader(t, l))
			cmd := exec.Command("tar", "-C", out, "--xattrs", "--xattrs-include=*", "--numeric-owner", "--delay-directory-restore", "-xpf", "-")
			cmd.Stdin = bytes.NewReader(p)
			if msg, err := cmd.CombinedOutput(); err != nil {
				rt.Fatalf("tar: %v\n%s", err, msg)
			}
			want, err := imagetest.Describe(tree)
			if err != nil {
				rt.Fatal(err)
			}
			got, err := imagetest.Describe(out)
			if err != nil {
				rt.Fatal(err)
			}
			if d := imagetest.Diff(withoutSockets(want), got); d != "" {
				rt.Fatal(d)
			}
		})
	})
}

func TestNamesAndNumbersAtEveryBoundary(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("n", 255)
	deep := strings.Repeat(long+"/", 20)
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		for _, e := range []struct {
			name string
			attr layer.Attr
		}{
			{strings.Repeat("a", 99), layer.Attr{}}, {strings.Repeat("b", 100), layer.Attr{}}, {strings.Repeat("c", 101), layer.Attr{}},
			{deep + long, layer.Attr{}}, {"caf\xe9", layer.Attr{}}, {"日本", layer.Attr{}}, {"new\nline =\\", layer.Attr{}},
			{"ids", layer.Attr{UID: 1<<21 - 1, GID: 1 << 21}}, {"big-ids", layer.Attr{UID: 1<<32 - 2, GID: 1<<32 - 2}},
			{"t0", layer.Attr{Sec: -1, Nsec: 1}}, {"t1", layer.Attr{Sec: -1}}, {"t2", layer.Attr{Sec: 1<<33 - 1}}, {"t3", layer.Attr{Sec: 1 << 33, Nsec: 999_999_999}},
			{"t4", layer.Attr{Sec: -5, Nsec: 100}}, {"t5", layer.Attr{Nsec: 500_000_000}},
			{"x", layer.Attr{Xattrs: []layer.Xattr{{Name: "user.bin", Value: []byte("\x00\n=\xff")}, {Name: "user.empty", Value: []byte{}}, {Name: "user." + strings.Repeat("x", 80), Value: bytes.Repeat([]byte("v"), 5000)}}}},
		} {
			if err := b.File(t.Context(), e.name, e.attr, 1, strings.NewReader("x")); err != nil {
				return err
			}
		}
		return b.Symlink("link", strings.Repeat("t/", 2000), layer.Attr{})
	})
	back := fromTar(t, mustTar(t, export.TarOptions{}, reader(t, l)))
	if d := imagetest.Diff(imagetest.Mounted(t, l), imagetest.Mounted(t, back)); d != "" {
		t.Error(d)
	}
}

func TestHugeHolesCostNothing(t *testing.T) {
	t.Parallel()
	p := filepath.Join(t.TempDir(), "tree")
	if err := os.Mkdir(p, 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(p, "sparse"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, off := range []int64{0, 1 << 30, 200 << 30} {
		if _, err := f.WriteAt([]byte("data"), off); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(300 << 30); err != nil {
		t.Fatal(err)
	}
	out := mustTar(t, export.TarOptions{}, reader(t, fromDir(t, p)))
	if len(out) > 64<<20 {
		t.Errorf("a tar of %d bytes", len(out))
	}
	tr := tar.NewReader(bytes.NewReader(out))
	for {
		h, err := tr.Next()
		if err != nil {
			t.Fatal(err)
		}
		if h.Name == "sparse" {
			if h.Size != 300<<30 {
				t.Errorf("%d bytes", h.Size)
			}
			return
		}
	}
}

func TestNamesThatLayersReserveAreRefused(t *testing.T) {
	t.Parallel()
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		return b.File(t.Context(), "d/.wh.x", layer.Attr{}, 0, strings.NewReader(""))
	})
	_, err := export.Tar(t.Context(), io.Discard, export.TarOptions{}, reader(t, l))
	if !errors.Is(err, errs.ImageUnsupported) || !strings.Contains(err.Error(), "d/.wh.x") {
		t.Error(err)
	}
	for _, x := range []string{"redirect", "metacopy"} {
		l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
			return b.Dir("d", layer.Attr{Xattrs: []layer.Xattr{{Name: "trusted.overlay." + x, Value: []byte("/old")}}})
		})
		_, err := export.Tar(t.Context(), io.Discard, export.TarOptions{Diff: true}, reader(t, l))
		if !errors.Is(err, errs.ImageUnsupported) || !strings.Contains(err.Error(), "d/") {
			t.Errorf("%s: %v", x, err)
		}
	}
}

// The marks that overlayfs leaves in an upper directory become those of OCI layers.
func TestMarksOfADiff(t *testing.T) {
	t.Parallel()
	ov := func(k, v string) layer.Attr {
		return layer.Attr{Xattrs: []layer.Xattr{{Name: "trusted.overlay." + k, Value: []byte(v)}}}
	}
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		return errors.Join(
			b.Special("gone", unix.S_IFCHR, 0, 0, layer.Attr{}),
			b.Dir("opaque", ov("opaque", "y")), b.File(t.Context(), "opaque/new", layer.Attr{}, 0, nil),
			b.Dir("second", ov("opaque", "x")), b.File(t.Context(), "second/gone", ov("whiteout", ""), 0, nil), b.File(t.Context(), "second/kept", layer.Attr{}, 0, nil),
			b.Dir("impure", ov("impure", "y")), b.Dir("nested", ov("overlay.opaque", "y")),
			b.File(t.Context(), "origin", ov("origin", "handle"), 0, nil),
		)
	})
	var got []string
	tr := tar.NewReader(bytes.NewReader(mustTar(t, export.TarOptions{Diff: true}, reader(t, l))))
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		s := h.Name
		for k, v := range h.PAXRecords {
			s += " " + k + "=" + v
		}
		got = append(got, s)
	}
	want := []string{
		"./", ".wh.gone", "impure/", "nested/ SCHILY.xattr.trusted.overlay.opaque=y", "opaque/", "opaque/.wh..wh..opq", "opaque/new",
		"origin", "second/", "second/.wh.gone", "second/kept",
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
