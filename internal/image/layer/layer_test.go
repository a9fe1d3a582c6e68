package layer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// These tests need root: the kernel is what says whether a layer is right.

type step func(ctx context.Context, b *layer.Builder) error

func file(path, content string) step {
	return func(ctx context.Context, b *layer.Builder) error {
		return b.File(ctx, path, layer.Attr{Perm: 0o644}, int64(len(content)), strings.NewReader(content))
	}
}

func dir(path string, perm uint32) step {
	return func(_ context.Context, b *layer.Builder) error { return b.Dir(path, layer.Attr{Perm: perm}) }
}

func symlink(path, target string) step {
	return func(_ context.Context, b *layer.Builder) error { return b.Symlink(path, target, layer.Attr{}) }
}

func link(path, target string) step {
	return func(_ context.Context, b *layer.Builder) error { return b.Link(path, target) }
}

func next() step {
	return func(_ context.Context, b *layer.Builder) error { b.NextLayer(); return nil }
}

func whiteout(path string) step {
	return func(_ context.Context, b *layer.Builder) error {
		if done, err := b.Whiteout(path); !done || err != nil {
			return fmt.Errorf("whiteout %s: %v, %v", path, done, err)
		}
		return nil
	}
}

func run(t *testing.T, steps []step) func(*layer.Builder) error {
	return func(b *layer.Builder) error {
		for _, s := range steps {
			if err := s(t.Context(), b); err != nil {
				return err
			}
		}
		return nil
	}
}

// paths reduces a description to names and what tells versions apart.
func paths(lines []string) string {
	var out []string
	for _, l := range lines[1:] {
		f := strings.Fields(l)
		s := strings.TrimPrefix(strings.Trim(f[0], `"`), "./") + " " + strings.TrimPrefix(f[1], "mode=")
		for _, x := range f {
			if strings.HasPrefix(x, "size=") || strings.HasPrefix(x, "same=") || strings.HasPrefix(x, "to=") {
				s += " " + x
			}
		}
		out = append(out, s)
	}
	return strings.Join(out, "\n")
}

func TestEntriesOverEachOther(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("x", 5000)
	for _, c := range []struct {
		name  string
		steps []step
		want  []string
	}{
		{"empty layer", nil, nil},
		{"missing parents are made", []step{file("a/b/c", "x")},
			[]string{"a 40755", "a/b 40755", "a/b/c 100644 size=1"}},
		{"leading slash and dots", []step{file("/a", "x"), file("./b", "xy"), file("c//./d", "")},
			[]string{"a 100644 size=1", "b 100644 size=2", "c 40755", "c/d 100644 size=0"}},
		{"the later file wins", []step{file("a", "x"), file("a", big)}, []string{"a 100644 size=5000"}},
		{"a directory keeps its children", []step{file("d/a", "x"), dir("d", 0o700)},
			[]string{"d 40700", "d/a 100644 size=1"}},
		{"a file over a directory", []step{file("d/a", "x"), next(), file("d", "xy")}, []string{"d 100644 size=2"}},
		{"a directory over a file", []step{file("d", "xy"), next(), dir("d", 0o700), file("d/a", "")},
			[]string{"d 40700", "d/a 100644 size=0"}},
		{"a symlinked parent is followed inside", []step{dir("usr/lib", 0o755), symlink("lib", "usr/lib"), file("lib/x", "x")},
			[]string{`lib 120777 size=7 to="usr/lib"`, "usr 40755", "usr/lib 40755", "usr/lib/x 100644 size=1"}},
		{"an absolute symlink starts at the layer's root", []step{symlink("lib", "/usr/lib"), file("lib/x", "x")},
			[]string{`lib 120777 size=8 to="/usr/lib"`, "usr 40755", "usr/lib 40755", "usr/lib/x 100644 size=1"}},
		{"a symlink cannot leave the root", []step{symlink("l", "../../../etc"), file("l/x", "x")},
			[]string{"etc 40755", "etc/x 100644 size=1", `l 120777 size=12 to="../../../etc"`}},
		{"hard links share the inode", []step{file("a", big), link("b", "a"), link("d/c", "/a")},
			[]string{"a 100644 size=5000", `b 100644 same="./a" size=5000`, "d 40755", `d/c 100644 same="./a" size=5000`}},
		{"hard link to itself", []step{file("a", "x"), link("a", "a")}, []string{"a 100644 size=1"}},
		{"hard link to a symlink", []step{symlink("a", "nowhere"), link("b", "a")},
			[]string{`a 120777 size=7 to="nowhere"`, `b 120777 same="./a" size=7 to="nowhere"`}},
		{"hard link over layers outlives its first name", []step{file("a", big), next(), link("b", "a"), whiteout(".wh.a")},
			[]string{"b 100644 size=5000"}},
		{"whiteout of a file", []step{file("d/a", "x"), file("d/b", ""), next(), whiteout("d/.wh.a")},
			[]string{"d 40755", "d/b 100644 size=0"}},
		{"whiteout of a tree", []step{file("d/e/a", "x"), next(), whiteout(".wh.d")}, nil},
		{"whiteout of nothing", []step{file("a", ""), next(), whiteout(".wh.b"), whiteout("no/.wh.b")}, []string{"a 100644 size=0"}},
		{"whiteout leaves its own layer's entry", []step{file("a", "x"), next(), file("a", "xy"), whiteout(".wh.a")},
			[]string{"a 100644 size=2"}},
		{"whiteout of a directory set anew", []step{file("d/old", "x"), next(), dir("d", 0o700), file("d/new", ""), whiteout(".wh.d")},
			[]string{"d 40700", "d/new 100644 size=0"}},
		{"whiteout of a directory with new entries only", []step{dir("d", 0o711), file("d/old", "x"), next(), file("d/new", ""), whiteout(".wh.d")},
			[]string{"d 40755", "d/new 100644 size=0"}},
		{"opaque directory", []step{file("d/a", "x"), file("d/s/b", "x"), next(), file("d/c", ""), whiteout("d/.wh..wh..opq")},
			[]string{"d 40755", "d/c 100644 size=0"}},
		{"opaque marker before the entries", []step{file("d/a", "x"), next(), whiteout("d/.wh..wh..opq"), file("d/c", "")},
			[]string{"d 40755", "d/c 100644 size=0"}},
		{"bookkeeping of the format is no content", []step{file("a", ""), next(), whiteout(".wh..wh.plnk"), whiteout(".wh..wh.aufs")},
			[]string{"a 100644 size=0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l, res := imagetest.MustBuild(t, layer.Options{}, run(t, c.steps))
			lines := imagetest.Mounted(t, l)
			if got, want := paths(lines), strings.Join(c.want, "\n"); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if res.Files != int64(len(c.want)) {
				t.Errorf("counted %d files", res.Files)
			}
		})
	}
}

func TestHostileEntriesAreRefused(t *testing.T) {
	t.Parallel()
	loop := []step{symlink("a", "b"), symlink("b", "a"), file("a/x", "")}
	for _, c := range []struct {
		name  string
		steps []step
		code  errs.Code
	}{
		{"dot-dot", []step{file("../x", "")}, errs.ImageCorrupt},
		{"dot-dot inside", []step{file("a/../b", "")}, errs.ImageCorrupt},
		{"dot-dot as a directory", []step{dir("..", 0o755)}, errs.ImageCorrupt},
		{"NUL", []step{file("a\x00b", "")}, errs.ImageCorrupt},
		{"256 bytes", []step{file(strings.Repeat("a", 256), "")}, errs.ImageCorrupt},
		{"256 bytes by a symlink", []step{symlink("a", strings.Repeat("a", 256)), file("a/x", "")}, errs.ImageCorrupt},
		{"file in a file", []step{file("a", ""), file("a/b", "")}, errs.ImageCorrupt},
		{"the root as a file", []step{file("/", "")}, errs.ImageCorrupt},
		{"the root as a symlink", []step{symlink(".", "x")}, errs.ImageCorrupt},
		{"symlink loop", loop, errs.ImageCorrupt},
		{"empty symlink", []step{symlink("a", "")}, errs.ImageCorrupt},
		{"symlink of 4096", []step{symlink("a", strings.Repeat("x", 4096))}, errs.ImageCorrupt},
		{"symlink with NUL", []step{symlink("a", "b\x00c")}, errs.ImageCorrupt},
		{"hard link outside", []step{link("a", "../../etc/shadow")}, errs.ImageCorrupt},
		{"hard link to nothing", []step{link("a", "b")}, errs.ImageCorrupt},
		{"hard link to a directory", []step{dir("d", 0o755), link("a", "d")}, errs.ImageCorrupt},
		{"hard link to the root", []step{link("a", "/")}, errs.ImageCorrupt},
		{"whiteout of no name", []step{func(_ context.Context, b *layer.Builder) error { _, err := b.Whiteout("d/.wh."); return err }, file("d", ""), func(_ context.Context, b *layer.Builder) error {
			b.NextLayer()
			_, err := b.Whiteout(".wh...")
			return err
		}}, errs.ImageCorrupt},
		{"size beyond the content", []step{func(ctx context.Context, b *layer.Builder) error {
			return b.File(ctx, "a", layer.Attr{}, 1<<20, strings.NewReader("short"))
		}}, errs.ImageCorrupt},
		{"negative size", []step{func(ctx context.Context, b *layer.Builder) error {
			return b.File(ctx, "a", layer.Attr{}, -1, strings.NewReader(""))
		}}, errs.ImageCorrupt},
		{"device number", []step{func(_ context.Context, b *layer.Builder) error {
			return b.Special("a", unix.S_IFCHR, 1<<12, 0, layer.Attr{})
		}}, errs.ImageCorrupt},
		{"unknown type", []step{func(_ context.Context, b *layer.Builder) error {
			return b.Special("a", 0o30000, 0, 0, layer.Attr{})
		}}, errs.ImageUnsupported},
		{"xattr too large", []step{func(_ context.Context, b *layer.Builder) error {
			return b.Dir("a", layer.Attr{Xattrs: []layer.Xattr{{Name: "user.a", Value: make([]byte, 1<<16)}}})
		}}, errs.ImageUnsupported},
		{"an xattr twice", []step{func(_ context.Context, b *layer.Builder) error {
			return b.Dir("a", layer.Attr{Xattrs: []layer.Xattr{{Name: "user.a"}, {Name: "user.a"}}})
		}}, errs.ImageCorrupt},
		{"more bytes than allowed", []step{func(ctx context.Context, b *layer.Builder) error {
			return b.File(ctx, "a", layer.Attr{}, 2<<20, endless{})
		}}, errs.BodyTooLarge},
		{"more entries than allowed", []step{file("a/b/c/d/e/f/g/h/i/j/k", "")}, errs.BodyTooLarge},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, _, err := imagetest.Build(t, layer.Options{MaxBytes: 1 << 20, MaxEntries: 10}, run(t, c.steps))
			if !errors.Is(err, c.code) {
				t.Errorf("got %v, want %s", err, c.code)
			}
		})
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func TestReplacedContentLeavesNoGap(t *testing.T) {
	t.Parallel()
	content := func(c string, n int) string { return strings.Repeat(c, n) }
	holes := "h" + content("\x00", 200_000) + "h"
	kept := []step{file("b", content("b", 70_000)), file("d", holes), file("e", content("e", 4097))}
	direct, want := imagetest.MustBuild(t, layer.Options{}, run(t, kept))
	churn := append([]step{file("a", content("a", 100_000)), file("b", content("x", 9000))}, kept...)
	churn = append(churn, file("c", content("c", 5000)), next(), whiteout(".wh.a"), whiteout(".wh.c"))
	l, got := imagetest.MustBuild(t, layer.Options{}, run(t, churn))
	if got.DataDigest != want.DataDigest || got.MetaDigest != want.MetaDigest {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if st, err := os.Stat(l.Data); err != nil || st.Size() != want.DataSize {
		t.Errorf("data blob on disk: %v, %v", st, err)
	}
	if d := imagetest.Diff(imagetest.Mounted(t, direct), imagetest.Mounted(t, l)); d != "" {
		t.Error(d)
	}
}

func TestInlineBudgetBoundsMemory(t *testing.T) {
	t.Parallel()
	var steps []step
	for i := range 100 {
		steps = append(steps, file(fmt.Sprint(i), strings.Repeat("x", 1000)))
	}
	_, all := imagetest.MustBuild(t, layer.Options{}, run(t, steps))
	l, some := imagetest.MustBuild(t, layer.Options{InlineBudget: 50_000}, run(t, steps))
	if all.DataSize != 0 || some.DataSize != 50*4096 {
		t.Errorf("data blobs of %d and %d bytes", all.DataSize, some.DataSize)
	}
	if n := len(imagetest.Mounted(t, l)); n != 101 {
		t.Errorf("%d entries", n)
	}
}

func TestUnknownXattrsAreSkippedAndCounted(t *testing.T) {
	t.Parallel()
	var got *layer.Builder
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		got = b
		return b.Dir("a", layer.Attr{Xattrs: []layer.Xattr{
			{Name: "com.apple.quarantine", Value: []byte("x")}, {Name: "user.kept", Value: []byte("v")}, {Name: "user."},
		}})
	})
	if fmt.Sprint(got.Skipped()) != "map[xattr com.*:1 xattr user.*:1]" {
		t.Errorf("skipped %v", got.Skipped())
	}
	if lines := imagetest.Mounted(t, l); !strings.Contains(lines[1], "user.kept=76") {
		t.Errorf("mounted %s", lines[1])
	}
}

func TestACancelledContextStopsALargeFile(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	_, _, err := imagetest.Build(t, layer.Options{}, func(b *layer.Builder) error {
		return b.File(ctx, "a", layer.Attr{}, 1<<40, io.MultiReader(bytes.NewReader(make([]byte, 1<<20)), cancelReader{cancel}))
	})
	if !errors.Is(errs.Wrap(errs.InternalError, "", "", err), errs.RequestCanceled) {
		t.Errorf("got %v", err)
	}
}

type cancelReader struct{ cancel func() }

func (c cancelReader) Read(p []byte) (int, error) { c.cancel(); return len(p), nil }

// badBlob is a disk that is full after some bytes.
type badBlob struct {
	left int
	err  error
}

func (b *badBlob) Write(p []byte) (int, error) {
	if b.left -= len(p); b.left < 0 {
		return 0, b.err
	}
	return len(p), nil
}
func (b *badBlob) ReadAt([]byte, int64) (int, error)  { return 0, io.EOF }
func (b *badBlob) WriteAt([]byte, int64) (int, error) { return 0, b.err }
func (b *badBlob) Truncate(int64) error               { return nil }

func TestAFullDiskIsDiskFull(t *testing.T) {
	t.Parallel()
	for _, e := range []error{unix.ENOSPC, unix.EDQUOT, &os.PathError{Op: "write", Err: unix.ENOSPC}} {
		b := layer.NewBuilder(&badBlob{left: 2 << 20, err: e}, layer.Options{})
		err := b.File(t.Context(), "a", layer.Attr{}, 10<<20, endless1{})
		if !errors.Is(err, errs.DiskFull) {
			t.Errorf("got %v", err)
		}
	}
	b := layer.NewBuilder(&badBlob{}, layer.Options{})
	if _, err := b.Finish(&badBlob{err: unix.ENOSPC}); !errors.Is(err, errs.DiskFull) {
		t.Errorf("metadata: got %v", err)
	}
}

type endless1 struct{}

func (endless1) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 1
	}
	return len(p), nil
}

func TestCorruptMetadataIsRefusedByTheMount(t *testing.T) {
	t.Parallel()
	l, _ := imagetest.MustBuild(t, layer.Options{}, run(t, []step{file("a", strings.Repeat("x", 9000))}))
	for _, off := range []int64{1024, 1024 + 30} { // the magic; under the checksum
		p, err := os.ReadFile(l.Meta)
		if err != nil {
			t.Fatal(err)
		}
		p[off] ^= 0xff
		bad := l.Meta + fmt.Sprint(off)
		if err := os.WriteFile(bad, p, 0o600); err != nil {
			t.Fatal(err)
		}
		fd, err := image.Mount(t.Context(), image.LayerFiles{Meta: bad, Data: l.Data})
		if !errors.Is(err, errs.ImageCorrupt) {
			t.Errorf("byte %d: got %v", off, err)
		}
		if err == nil {
			unix.Close(fd)
		}
	}
}

func BenchmarkFile(b *testing.B) {
	const size = 64 << 20
	b.SetBytes(size)
	f, err := os.Create(b.TempDir() + "/data")
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	lb := layer.NewBuilder(f, layer.Options{})
	for i := range b.N {
		if _, err := f.Seek(0, 0); err != nil {
			b.Fatal(err)
		}
		if err := lb.File(b.Context(), fmt.Sprint(i), layer.Attr{}, size, endless1{}); err != nil {
			b.Fatal(err)
		}
	}
}
