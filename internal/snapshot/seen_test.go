package snapshot_test

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/snapshot"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// packSince packs what changed since, or all on whole if that cannot be done; it returns the
// stack with the layer, and what was seen.
func (o *overlay) packSince(whole, last *stack, since *snapshot.Seen, opts snapshot.Options) (s *stack, next *snapshot.Seen, man snapshot.Manifest, alone bool) {
	o.w.tb.Helper()
	next = &snapshot.Seen{}
	// What was written is old enough for its time to be relied upon.
	time.Sleep(15 * time.Millisecond)
	opts.Next, opts.Since = next, since
	opts.Still.Since = time.Now().Add(50 * time.Millisecond)
	if since != nil {
		var fd int
		var l image.Layer
		var err error
		if fd, l, man, err = o.tryPack(opts); err == nil {
			return last.push(fd, l), next, man, true
		}
		if !errors.Is(err, snapshot.ErrWhole) {
			o.w.tb.Fatal(err)
		}
		opts.Since = nil
	}
	fd, l, man := o.pack(opts)
	return whole.push(fd, l), next, man, false
}

func (o *overlay) tryPack(opts snapshot.Options) (fd int, l image.Layer, man snapshot.Manifest, err error) {
	o.w.tb.Helper()
	dir := o.w.path("diff")
	o.w.must(os.Mkdir(dir, 0o700))
	opts.Upper, opts.Blob, opts.Meta, opts.IDs = o.upper, &memBlob{}, io.Discard, o.w.ids()
	since := opts.Since
	if _, _, err = snapshot.Pack(o.w.tb.Context(), opts); err != nil {
		return -1, l, man, err
	}
	fd, l = o.w.mountLayer(dir, func(data layer.Blob, meta io.Writer) (res layer.Result, err error) {
		opts.Blob, opts.Meta, opts.Since = data, meta, since
		res, man, err = snapshot.Pack(o.w.tb.Context(), opts)
		return res, err
	})
	return fd, l, man, nil
}

// comparable is what a view on several layers and an overlay's own must have in common: an
// overlay counts no subdirectories of what it merges.
func comparable(lines []string) []string {
	out := withoutInodes(lines)
	for i, l := range out {
		if _, mode, _ := strings.Cut(l, " mode="); strings.HasPrefix(mode, "4") && len(strings.Fields(mode)[0]) == 5 {
			out[i] = withoutLinks([]string{l})[0]
		}
	}
	return out
}

// Whatever a sandbox does between its snapshots, each shows what the sandbox showed, though it
// has only what changed since the one before.
func TestPacksOnTopOfEachOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	alone, all := 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		base := w.randomBase(rt)
		defer base.close()
		o := base.overlay()
		defer o.close()
		last := base
		var since *snapshot.Seen
		for step := range 4 {
			ops := drawOps(rt, []int{40, 10, 4, 1}[step])
			results := o.do(ops...)
			want := describe(rt, o.root)
			s, next, man, ok := o.packSince(base, last, since, snapshot.Options{})
			if all++; ok {
				alone++
			}
			v := s.view()
			d := imagetest.Diff(comparable(want), comparable(describe(rt, v)))
			unix.Close(v)
			if d != "" {
				for i, o := range ops {
					rt.Logf("%d %s %d %d %q: %s", i, o.Do, o.A, o.B, o.Name, results[i])
				}
				rt.Fatalf("step %d, alone %v: %s\n%+v", step, ok, d, man)
			}
			last, since = s, next
		}
	})
	if t.Failed() {
		return
	}
	if all -= all / 4; alone < all/2 { // the first of each cannot be
		t.Errorf("only %d of %d packs had only what changed", alone, all)
	}
}

// A pack reads again what changed and nothing else.
func TestAPackHasOnlyWhatChanged(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	fd, l := w.build(func(b *layer.Builder) error { return b.Dir("base", layer.Attr{Perm: 0o755}) })
	base := w.stack().push(fd, l)
	o := base.overlay()
	defer o.close()
	big := op{Do: "create", Path: []byte("big"), N: 8 << 20, Mode: 0o644}
	o.mustDo(big, mkdir("d"), put("d/a"), put("d/b"), put("gone"), put("key"))
	opts := snapshot.Options{LeaveOut: []string{"/key"}}
	s, seen, man, _ := o.packSince(base, base, nil, opts)
	if man.Bytes < 8<<20 || seen.Entries() != 5 {
		t.Fatalf("%+v, %d entries seen", man, seen.Entries())
	}
	o.mustDo(put("d/new"), rm("gone"), op{Do: "create", Path: []byte("d/a"), N: 5, Mode: 0o600})
	s2, seen, man, ok := o.packSince(base, s, seen, opts)
	if !ok || man.Bytes > 1000 || man.Regular != 2 || man.Whiteouts != 1 || man.Dirs != 1 {
		t.Errorf("alone %v: %+v", ok, man)
	}
	if _, _, man, ok = o.packSince(base, s2, seen, opts); !ok || man.Entries != 0 {
		t.Errorf("of nothing, alone %v: %+v", ok, man)
	}

	// What programs have mapped to write to is read again, and so is what changed just before.
	opts.Still.Mapped = map[string]bool{"/big": true}
	_, seen, _, _ = o.packSince(base, s, seen, opts)
	opts.Still.Mapped = nil
	if _, _, man, ok = o.packSince(base, s2, seen, opts); !ok || man.Regular != 1 || man.Bytes != 8<<20 {
		t.Errorf("after a mapping, alone %v: %+v", ok, man)
	}
	next := &snapshot.Seen{}
	o.mustDo(put("fresh"))
	o.pack(snapshot.Options{LeaveOut: opts.LeaveOut, Next: next, Still: snapshot.Still{Since: time.Now()}})
	if _, _, man, ok = o.packSince(base, s2, next, opts); !ok || man.Regular == 0 {
		t.Errorf("what was written just before, alone %v: %+v", ok, man)
	}
	// Another choice of what to leave out makes another layer.
	if _, _, _, ok = o.packSince(base, s2, next, snapshot.Options{}); ok {
		t.Error("with other patterns, and yet on top")
	}
	// One name of a file that is the same under its other, in a directory that moved.
	o.mustDo(mkdir("e"), op{Do: "link", Path: []byte("d/b"), To: []byte("e/b")})
	s3, next, _, _ := o.packSince(base, s2, nil, opts)
	o.mustDo(mv("e", "f"))
	if s, _, man, ok := o.packSince(base, s3, next, opts); ok || man.HardLinks != 1 {
		t.Errorf("after a move of one of two names, alone %v: %+v", ok, man)
	} else if s3 = s; len(s.mounts) != 2 {
		t.Errorf("%d layers", len(s.mounts))
	}
	_, next, _, _ = o.packSince(base, s3, nil, opts)
	// A directory of a layer that moved.
	o.mustDo(mv("base", "moved"))
	if _, _, man, ok = o.packSince(base, s2, next, opts); ok || man.Redirects != 1 {
		t.Errorf("after a rename, alone %v: %+v", ok, man)
	}
}
