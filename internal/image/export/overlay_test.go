package export_test

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"dsec/internal/image"
	"dsec/internal/image/export"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/source"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// change does a few random things to the tree at root, through overlayfs.
func change(t *rapid.T, root string, round string) {
	var names []string
	err := filepath.WalkDir(root, func(p string, d os.DirEntry, err error) error {
		if err == nil && p != root {
			names = append(names, p)
		}
		return err
	})
	must := func(err error) {
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
			t.Fatalf("change: %v", err)
		}
	}
	must(err)
	for i := range rapid.IntRange(0, 12).Draw(t, "changes") {
		fresh := filepath.Join(root, round+string(rune('a'+i)))
		if len(names) == 0 {
			must(os.WriteFile(fresh, []byte("new"), 0o644))
			continue
		}
		p := rapid.SampledFrom(names).Draw(t, "name")
		st, err := os.Lstat(p)
		if err != nil {
			continue
		}
		switch rapid.SampledFrom([]string{"remove", "replace by dir", "recreate", "append", "chmod", "new", "link", "rename", "xattr"}).Draw(t, "what") {
		case "remove":
			must(os.RemoveAll(p))
		case "recreate": // a directory anew is opaque
			must(os.RemoveAll(p))
			if st.IsDir() {
				must(os.Mkdir(p, 0o751))
				must(os.WriteFile(filepath.Join(p, "in"), []byte(fresh), 0o600))
			} else {
				must(os.WriteFile(p, []byte(fresh), 0o600))
			}
		case "replace by dir":
			must(os.RemoveAll(p))
			must(os.MkdirAll(filepath.Join(p, "deep"), 0o755))
		case "append":
			if st.Mode().IsRegular() {
				f, err := os.OpenFile(p, os.O_APPEND|os.O_WRONLY, 0)
				must(err)
				_, err = f.WriteString("more")
				must(err)
				must(f.Close())
			}
		case "chmod":
			if st.Mode()&os.ModeSymlink == 0 {
				must(unix.Chmod(p, 0o511))
			}
		case "new":
			must(os.WriteFile(fresh, make([]byte, 9000), 0o644))
		case "link":
			if st.Mode().IsRegular() {
				must(os.Link(p, fresh))
			}
		case "rename":
			if !st.IsDir() {
				must(os.Rename(p, fresh))
			}
		case "xattr":
			if st.Mode().IsRegular() || st.IsDir() {
				must(unix.Setxattr(p, "user.changed", []byte(round), 0))
			}
		}
	}
}

func overlay(t *rapid.T, at, upper, work string, lowers ...string) func() {
	opts := "lowerdir=" + strings.Join(lowers, ":")
	if upper != "" {
		opts += ",upperdir=" + upper + ",workdir=" + work
	}
	if err := unix.Mount("overlay", at, "overlay", 0, opts+",redirect_dir=off,metacopy=off,index=off"); err != nil {
		t.Fatalf("mount overlay %s: %v", opts, err)
	}
	return func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
	}
}

// Overlayfs counts the links of directories and copied-up files in its own way,
// and shows no inode numbers that would tell hard links of one layer.
var ownWay = regexp.MustCompile(`nlink=\d+( same="([^"\\]|\\.)*")?`)

func asOverlayHas(lines []string) []string {
	var out []string
	for _, l := range withoutSockets(lines) {
		out = append(out, ownWay.ReplaceAllString(l, ""))
	}
	return out
}

// A base and two layers of changes made through the kernel's overlayfs: written as
// three OCI layers and as one merged, both read back as the tree that overlayfs shows.
func TestStacksReadBackAsOverlayfsShowsThem(t *testing.T) {
	t.Parallel()
	in := numbered(t)
	rapid.Check(t, func(rt *rapid.T) {
		in(rt, func(dir string) {
			d := func(name string) string {
				p := filepath.Join(dir, name)
				if err := os.MkdirAll(p, 0o755); err != nil {
					rt.Fatal(err)
				}
				return p
			}
			base, up1, up2, at := d("base"), d("up1"), d("up2"), d("at")
			imagetest.RandomTree(rt, base)
			clearMarks(rt, base)
			umount := overlay(rt, at, up1, d("work1"), base)
			change(rt, at, "one")
			umount()
			umount = overlay(rt, at, up2, d("work2"), up1, base)
			change(rt, at, "two")
			want, err := imagetest.Describe(at)
			umount()
			if err != nil {
				rt.Fatal(err)
			}
			layers := func() []*layer.Reader {
				return []*layer.Reader{reader(t, fromDir(t, base)), reader(t, fromDir(t, up1)), reader(t, fromDir(t, up2))}
			}
			for name, list := range map[string][]export.Layer{
				"stacked": export.Stacked(export.TarOptions{}, layers()...),
				"merged":  {export.Merged(export.TarOptions{}, layers()...)},
			} {
				got := imagetest.Mounted(t, roundTrip(t, export.Image{Layers: list}))
				if diff := imagetest.Diff(asOverlayHas(want), asOverlayHas(got)); diff != "" {
					rt.Fatalf("%s: %s", name, diff)
				}
			}
		})
	})
}

// roundTrip writes the image as an archive and imports that.
func roundTrip(t testing.TB, img export.Image) image.LayerFiles {
	t.Helper()
	p := filepath.Join(t.TempDir(), "image.tar")
	f, err := os.Create(p)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := export.Archive(t.Context(), f, img, "test/image:tag", export.Options{Compression: export.None, SpoolDir: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		_, err := source.Path(t.Context(), p, b, source.Options{})
		return err
	})
	return l
}

// clearMarks takes away what would mean something to overlayfs.
func clearMarks(t *rapid.T, root string) {
	err := filepath.WalkDir(root, func(p string, _ os.DirEntry, err error) error {
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
		for _, x := range []string{"opaque", "redirect"} {
			if err := unix.Lremovexattr(p, "trusted.overlay."+x); err != nil && !errors.Is(err, unix.ENODATA) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EPERM) {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
