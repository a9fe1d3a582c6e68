package snapshot_test

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/snapshot"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// Any neighbours of a chain of random snapshots flattened show what the chain showed, below
// and above others and at the bottom.
func TestFlattenedChainsShowTheSame(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rapid.Check(t, func(rt *rapid.T) {
		s := w.randomBase(rt)
		all := s
		defer func() { all.close() }()
		for range rapid.IntRange(1, 5).Draw(rt, "snapshots") {
			o := s.overlay()
			o.do(drawOps(rt, 25)...)
			fd, l, _ := o.pack(snapshot.Options{})
			o.close()
			s = s.push(fd, l)
			all = s
		}
		plain := s.view()
		want := describe(rt, plain)
		unix.Close(plain)
		n := len(s.mounts)
		from := rapid.IntRange(0, n-1).Draw(rt, "from")
		to := rapid.IntRange(from+1, n).Draw(rt, "to")
		flat := s.flatten(from, to)
		defer w.unmount(flat.mounts[from])
		v := flat.view()
		defer unix.Close(v)
		if d := imagetest.Diff(withoutLinks(want), withoutLinks(describe(rt, v))); d != "" {
			rt.Fatalf("layers %d to %d of %d: %s", from, to, n, d)
		}
		// A sandbox on it works: a change, a pack and the same view again.
		o := flat.overlay()
		defer o.close()
		o.do(drawOps(rt, 10)...)
		fd, l, _ := o.pack(snapshot.Options{})
		top := flat.push(fd, l)
		defer w.unmount(fd)
		tv := top.view()
		defer unix.Close(tv)
		if d := imagetest.Diff(withoutInodes(describe(rt, o.root)), withoutInodes(describe(rt, tv))); d != "" {
			rt.Fatalf("a pack on it: %s", d)
		}
	})
}

// chain makes layers, lowest first, each of what its function does in a sandbox on those below.
func (w *world) chain(steps ...[]op) *stack {
	s := w.stack()
	fd, l := w.build(func(b *layer.Builder) error {
		var all []error
		for _, d := range []string{"a", "a/b", "a/b/c", "x", "x/y"} {
			all = append(all, b.Dir(d, layer.Attr{Perm: 0o755}),
				b.File(w.tb.Context(), d+"/base", layer.Attr{Perm: 0o644}, int64(len(d)), strings.NewReader(d)))
		}
		return errors.Join(all...)
	})
	s = s.push(fd, l)
	for _, ops := range steps {
		o := s.overlay()
		o.mustDo(ops...)
		fd, l, _ := o.pack(snapshot.Options{})
		o.close()
		s = s.push(fd, l)
	}
	return s
}

func mv(from, to string) op { return op{Do: "rename", Path: []byte(from), To: []byte(to)} }
func put(path string) op {
	return op{Do: "create", Path: []byte(path), N: 10, Off: int64(len(path)), Mode: 0o644}
}
func mkdir(path string) op { return op{Do: "mkdir", Path: []byte(path), Mode: 0o755} }
func rm(path string) op    { return op{Do: "remove", Path: []byte(path)} }

// Renames over renames, by name, path and parents, for every range of layers.
func TestFlattenFollowsRedirects(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.chain(
		[]op{mv("a", "a1"), put("a1/one")},
		[]op{mv("a1/b", "x/b"), put("x/b/two")},
		[]op{mv("x", "z"), put("z/b/c/three"), mkdir("x"), put("x/new")},
		[]op{mv("z/b/c", "a1/c"), rm("z/base"), put("a1/c/four")},
		[]op{mv("a1", "a"), mkdir("a1"), put("a1/five")},
		[]op{rm("a/c/base"), mv("a/c", "c"), put("c/six"), mkdir("a/c"), put("a/c/seven")},
		[]op{rm("z"), mkdir("z"), put("z/eight"), mv("c", "z/c")},
	)
	v := s.view()
	want := describe(t, v)
	unix.Close(v)
	if n := len(want); n < 15 {
		t.Fatalf("only %d entries", n)
	}
	for from := range s.mounts {
		for to := from + 1; to <= len(s.mounts); to++ {
			v := s.flatten(from, to).view()
			if d := imagetest.Diff(withoutLinks(want), withoutLinks(describe(t, v))); d != "" {
				t.Errorf("layers %d to %d: %s", from, to, d)
			}
			unix.Close(v)
		}
	}
	// Nothing is hidden where nothing is below.
	whole := s.flatten(0, len(s.mounts))
	if all := strings.Join(describe(t, whole.mounts[0]), "\n"); strings.Contains(all, "trusted.overlay") || strings.Contains(all, "rdev=0:0") && strings.Contains(all, "mode=20000") {
		t.Errorf("marks are left:\n%s", all)
	}
}

// 128 layers, each with a file of its own, a change of a common one and a rename of a common
// directory, mount and read right, and so do they flattened by halves.
func TestOneHundredAndTwentyEightLayers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const layers = 128
	s := w.stack()
	fd, l := w.build(func(b *layer.Builder) error {
		return errors.Join(b.Dir("d0", layer.Attr{Perm: 0o755}), b.File(t.Context(), "d0/f", layer.Attr{Perm: 0o644}, 1, strings.NewReader("x")))
	})
	s = s.push(fd, l)
	var checks []op
	for i := 1; i < layers; i++ {
		o := s.overlay()
		own := fmt.Sprintf("d%d/own%d", i, i)
		o.mustDo(mv(fmt.Sprintf("d%d", i-1), fmt.Sprintf("d%d", i)),
			op{Do: "create", Path: []byte(own), N: int64(i), Off: int64(i), Mode: 0o644},
			op{Do: "create", Path: []byte("common"), N: 5000, Off: int64(i), Mode: 0o644})
		fd, l, _ := o.pack(snapshot.Options{})
		o.close()
		s = s.push(fd, l)
		checks = append(checks, op{Do: "read", Path: fmt.Appendf(nil, "d%d/own%d", layers-1, i), Value: pattern(int64(i), byte(i))},
			op{Do: "absent", Path: fmt.Appendf(nil, "d%d", i-1)})
	}
	checks = append(checks, op{Do: "read", Path: []byte("common"), Value: pattern(5000, layers-1)},
		op{Do: "read", Path: fmt.Appendf(nil, "d%d/f", layers-1), Value: []byte("x")})
	if len(s.mounts) != layers {
		t.Fatalf("%d layers", len(s.mounts))
	}
	check := func(s *stack) {
		t.Helper()
		o := s.overlay() // as the backend mounts them
		defer o.close()
		o.mustDo(checks...)
		o.mustDo(put("more"))
	}
	check(s)
	v := s.view()
	want := describe(t, v)
	unix.Close(v)
	for _, r := range []snapshot.Range{{From: 0, To: 64}, {From: 64, To: 128}, {From: 1, To: 127}, {From: 0, To: 128}} {
		flat := s.flatten(r.From, r.To)
		check(flat)
		v := flat.view()
		if d := imagetest.Diff(withoutLinks(want), withoutLinks(describe(t, v))); d != "" {
			t.Errorf("%v: %s", r, d)
		}
		unix.Close(v)
	}
}

func TestComposeBounds(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 501} {
		if _, err := snapshot.Compose(t.Context(), make([]int, n)); !errors.Is(err, errs.BadRequest) {
			t.Errorf("%d layers: %v", n, err)
		}
	}
	if _, err := snapshot.Compose(t.Context(), []int{-1, -1}); !errors.Is(err, errs.InternalError) {
		t.Errorf("bad descriptors: %v", err)
	}
}

// What an overlay with other options made is refused, not misread.
func TestFlattenRefusesForeignMarks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, c := range []struct {
		name string
		x    layer.Xattr
		dir  bool
		code errs.Code
	}{
		{"metacopy", layer.Xattr{Name: "trusted.overlay.metacopy"}, false, errs.ImageUnsupported},
		{"xattr whiteouts", layer.Xattr{Name: "trusted.overlay.opaque", Value: []byte("x")}, true, errs.ImageUnsupported},
		{"redirect out", layer.Xattr{Name: "trusted.overlay.redirect", Value: []byte("/a/../..")}, true, errs.ImageCorrupt},
		{"redirect to nothing", layer.Xattr{Name: "trusted.overlay.redirect", Value: nil}, true, ""},
		{"relative path", layer.Xattr{Name: "trusted.overlay.redirect", Value: []byte("a/b")}, true, errs.ImageCorrupt},
	} {
		s := w.stack()
		fd, l := w.build(func(b *layer.Builder) error {
			a := layer.Attr{Perm: 0o755, Xattrs: []layer.Xattr{c.x}}
			if c.dir {
				return b.Dir("e", a)
			}
			return b.File(t.Context(), "e", a, 0, strings.NewReader(""))
		})
		s = s.push(fd, l)
		_, _, err := snapshot.Flatten(t.Context(), snapshot.FlattenOptions{Layers: s.mounts, Blob: &discard{}, Meta: io.Discard})
		if c.code == "" && err != nil || c.code != "" && !errors.Is(err, c.code) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if _, _, err := snapshot.Flatten(t.Context(), snapshot.FlattenOptions{}); !errors.Is(err, errs.BadRequest) {
		t.Errorf("no layers: %v", err)
	}
}

// discard is a blob that keeps nothing.
type discard struct{ n int64 }

func (d *discard) Write(p []byte) (int, error)            { d.n += int64(len(p)); return len(p), nil }
func (d *discard) ReadAt(p []byte, _ int64) (int, error)  { clear(p); return len(p), nil }
func (d *discard) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
func (d *discard) Truncate(int64) error                   { return nil }

// A directory whose removed names have nothing below them any more does not list them: the
// kernel looks for whiteouts in a directory of a single layer only if it is marked.
func TestWhiteoutsOverNothingStayHidden(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.chain([]op{rm("a/base"), rm("x/y/base"), put("a/new")})
	alone := w.stack().push(s.mounts[1], s.layers[1]) // on a base without these directories
	for _, s := range []*stack{alone, alone.flatten(0, 1), (&stack{w, s.mounts, s.layers}).flatten(1, 2)} {
		v := s.view()
		if got := strings.Join(describe(t, v), "\n"); strings.Contains(got, `a/base`) || !strings.Contains(got, "a/new") || strings.Contains(got, "x/y/base") {
			t.Errorf("got\n%s", got)
		}
		unix.Close(v)
	}
}
