package snapshot_test

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/source"
	"dsec/internal/snapshot"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// randomBase is a layer of a random tree, without what only an overlay may write and with
// the ids that sandboxes have.
func (w *world) randomBase(rt *rapid.T) *stack {
	dir := w.path("base")
	w.must(os.Mkdir(dir, 0o755))
	imagetest.RandomTree(rt, dir)
	clean(rt, dir)
	fd, l := w.build(func(b *layer.Builder) error {
		_, err := source.Path(w.tb.Context(), dir, b, source.Options{Format: source.Dir})
		return err
	})
	w.must(os.RemoveAll(dir))
	return w.stack().push(fd, l)
}

func clean(t tb, dir string) {
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
			return os.Remove(p)
		}
		for _, x := range []string{"trusted.overlay.opaque", "trusted.overlay.redirect"} {
			_ = unix.Lremovexattr(p, x) // most have none
		}
		if st.Uid < rangeSize && st.Gid < rangeSize {
			return nil
		}
		return os.Lchown(p, int(st.Uid%rangeSize), int(st.Gid%rangeSize)) // others are nobody in a sandbox, whose file no one can open
	})
	if err != nil {
		t.Fatalf("clean: %v", err)
	}
}

var kinds = []string{
	"create", "create", "create", "mkdir", "mkdir", "mkdir", "write", "write", "truncate", "punch", "symlink", "link", "link", "rename", "rename", "rename", "rename",
	"exchange", "remove", "remove", "remove", "unlink", "rmdir", "chmod", "chown", "setxattr", "delxattr", "cap", "acl", "defacl", "times", "mkfifo", "mksock", "mknod",
}

// drawOps draws what a sandbox does.
func drawOps(rt *rapid.T, most int) []op {
	names := []string{"a", "b", "c", "d", "x\xff\xfe", "é", ".wh.a", ".wh..wh..opq", longName, " \n\\"}
	id := rapid.SampledFrom([]int{0, 1, 1000, 65534, 65535})
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) op {
		o := op{
			Do: rapid.SampledFrom(kinds).Draw(t, "do"),
			A:  rapid.IntRange(0, 60).Draw(t, "a"), B: rapid.IntRange(0, 60).Draw(t, "b"),
			Name: []byte(rapid.SampledFrom(names).Draw(t, "name")),
			Mode: rapid.Uint32Range(0, 0o7777).Draw(t, "mode"),
		}
		switch o.Do {
		case "create", "write", "truncate", "punch":
			o.N = rapid.SampledFrom([]int64{0, 1, 1000, 1025, 4096, 5000, 70_000, 200_000}).Draw(t, "size")
			o.Off = rapid.SampledFrom([]int64{0, 1, 4096, 65536, 1 << 20, 9 << 20}).Draw(t, "offset")
		case "rename", "exchange":
			o.N = rapid.Int64Range(0, 1).Draw(t, "over")
		case "mknod":
			o.N = rapid.SampledFrom([]int64{0, 0x103}).Draw(t, "device") // both are refused
		case "chown", "acl", "defacl":
			o.UID, o.GID = id.Draw(t, "uid"), id.Draw(t, "gid")
		case "symlink":
			o.Value = []byte(rapid.SampledFrom([]string{"/", "..", "a/b", "/etc/passwd", longName}).Draw(t, "target"))
		case "setxattr", "delxattr":
			o.Key = rapid.SampledFrom([]string{"user.a", "user.comment", "trusted.a", "trusted.overlay.opaque"}).Draw(t, "key")
			o.Value = []byte(rapid.SampledFrom([]string{"", "y", longName}).Draw(t, "value"))
		case "times":
			o.Sec = rapid.SampledFrom([]int64{-1, 0, 1_700_000_000, 5_000_000_000}).Draw(t, "sec")
			o.Nsec = rapid.Int64Range(0, 999_999_999).Draw(t, "nsec")
		}
		return o
	}), 0, most).Draw(rt, "ops")
}

// The view of a sandbox and that of its pack on the same layers are the same, in what stat, xattrs
// and contents tell, and to tar.
func TestAPackedChangeShowsTheSame(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rapid.Check(t, func(rt *rapid.T) {
		base := w.randomBase(rt)
		defer base.close()
		o := base.overlay()
		defer o.close()
		ops := drawOps(rt, 60)
		results := o.do(ops...)
		want, wantTar := describe(rt, o.root), tarOf(rt, o.root)
		fd, l, man := o.pack(snapshot.Options{})
		s := base.push(fd, l)
		v := s.view()
		defer unix.Close(v)
		d := imagetest.Diff(withoutInodes(want), withoutInodes(describe(rt, v)))
		if d == "" {
			d = imagetest.Diff(links(describe(rt, o.upper)), links(describe(rt, fd)))
		}
		if d != "" {
			for i, o := range ops {
				rt.Logf("%d %s %d %d %q: %s", i, o.Do, o.A, o.B, o.Name, results[i])
			}
			rt.Fatalf("%s\n%+v", d, man)
		}
		if d := imagetest.Diff(wantTar, tarOf(rt, v)); d != "" {
			rt.Fatalf("tar: %s", d)
		}
		w.unmount(fd)
	})
}

// Fifty snapshots on top of each other, each of random changes on the last: every one shows what
// its sandbox showed, also at the end.
func TestAChainOfFifty(t *testing.T) {
	t.Parallel()
	steps := 50
	if testing.Short() {
		steps = 10
	}
	w := newWorld(t)
	r := rapid.Custom(func(rt *rapid.T) []op { return drawOps(rt, 25) })
	s := w.stack()
	fd, l := w.build(func(b *layer.Builder) error { return b.Dir("a", layer.Attr{Perm: 0o755}) })
	s = s.push(fd, l)
	chain := snapshot.Chain{}.On(l)
	stacks, wants := []*stack{}, [][]string{}
	for i := range steps {
		o := s.overlay()
		o.do(r.Example(i)...)
		o.mustDo(op{Do: "create", Path: []byte("step"), N: int64(1000 + i), Off: int64(i), Mode: 0o644},
			op{Do: "create", Path: []byte("step" + strconv.Itoa(i)), N: 100_000, Off: int64(i), Mode: 0o600})
		wants = append(wants, describe(t, o.root))
		fd, l, _ := o.pack(snapshot.Options{})
		o.close()
		s, chain = s.push(fd, l), chain.On(l)
		stacks = append(stacks, s)
	}
	if err := chain.Check(); err != nil {
		t.Error(err)
	}
	for i, s := range stacks {
		v := s.view()
		if d := imagetest.Diff(withoutInodes(wants[i]), withoutInodes(describe(t, v))); d != "" {
			t.Errorf("snapshot %d: %s", i, d)
		}
		unix.Close(v)
	}
}
