package robustness

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"dsec/test/bed"
)

// mixed makes a directory with every part that metadata has: inodes of all shapes, a directory of
// several blocks, attributes, links, contents in the metadata and in chunks.
func mixed(t *testing.T, b *bed.Bed) string {
	t.Helper()
	root := content(t, 1)
	noise := bed.Random(t)
	var all error
	put := func(name string, n int) {
		p := make([]byte, n)
		for i := range p {
			p[i] = byte(noise.Uint32())
		}
		all = errors.Join(all, os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755), os.WriteFile(filepath.Join(root, name), p, 0o640))
	}
	for i := range 300 {
		put(fmt.Sprintf("many/a-file-with-a-name-%04d", i), i%7)
	}
	for i := range 4 {
		put(fmt.Sprintf("large/%d", i), 700_000)
	}
	put("tail", 4096*3+100)
	all = errors.Join(all, os.Symlink("../large/1", filepath.Join(root, "many", "link")), os.Link(filepath.Join(root, "tail"), filepath.Join(root, "twin")),
		unix.Setxattr(filepath.Join(root, "tail"), "user.note", []byte(strings.Repeat("noted ", 40)), 0), os.Chmod(filepath.Join(root, "bin/busybox"), 0o4755))
	if all != nil {
		t.Fatal(all)
	}
	return root
}

// seen is all that an image shows: what a sandbox sees, and what an export has.
func seen(t *testing.T, b *bed.Bed, image string) (string, bed.Result) {
	t.Helper()
	const look = "cd /; for d in bin data large many tail twin; do busybox find $d; done | while read f; do busybox stat -c '%n %F %a %u %g %s %h %Y' $f; busybox readlink $f || :; done; busybox find bin data large many tail twin -type f -exec busybox sha256sum {} +"
	r := b.CLI(t, "run", image, "--", "sh", "-euc", look)
	if r.Code != 0 {
		return "", r
	}
	out := filepath.Join(t.TempDir(), "tar")
	x := b.CLI(t, "image", "export", image, out)
	if x.Code != 0 {
		return "", x
	}
	p, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%s%x", r.Stdout, sha256.Sum256(p)), r
}

// filesBelow are the files below dir, but for locks.
func filesBelow(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && d.Name() != "lock" {
			all = append(all, p)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// damage changes one byte of a file, at a part of its length.
func damage(t *testing.T, path string, part float64, with byte) (mend func()) {
	t.Helper()
	p, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	good := append([]byte(nil), p...)
	p[min(len(p)-1, int(part*float64(len(p))))] ^= with
	write := func(p []byte) {
		if err := os.WriteFile(path, p, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(p)
	return func() { write(good) }
}

// One byte is wrong anywhere in what a node has of an image, but for the bytes of files themselves, which are
// checked when they come and are the disk's from then on: everything is shown as before, and the node fetches
// again what it needs.
func TestDamageOnTheNodeIsMendedFromTheStore(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true})
	b.Must(t, "image", "import", "mixed", mixed(t, b))
	want, r := seen(t, b, "mixed")
	if want == "" {
		t.Fatal(r)
	}
	images := filepath.Join(b.Data, "images")
	restart := func(between func()) {
		t.Helper()
		b.Must(t, "down", "--keep", "--data", b.Data)
		between()
		if err := b.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	check := func(what string) {
		t.Helper()
		if got, r := seen(t, b, "mixed"); got != want {
			t.Errorf("%s: another image, or %d, %s", what, r.Code, r.Stderr)
		}
	}
	for part := 0.01; part < 1; part += 0.11 { // superblock, inodes, attributes, names
		restart(func() { damage(t, filesBelow(t, filepath.Join(images, "meta"))[0], part, 1) })
		check(fmt.Sprintf("metadata at %.2f", part))
	}
	for _, kind := range []string{"maps", "layers", "images", "own"} {
		restart(func() {
			for _, f := range filesBelow(t, filepath.Join(images, kind)) {
				damage(t, f, 0.4, 2)
			}
		})
		check(kind)
	}
	// Little of it is here, and its state says that all is.
	for _, name := range []string{"live", "safe", "chunks"} {
		for _, part := range []float64{0.1, 0.5, 0.99} {
			b.Must(t, "image", "evict", "mixed")
			b.Must(t, "run", "mixed", "--", "sh", "-c", "true")
			restart(func() {
				found := false
				for _, f := range filesBelow(t, filepath.Join(images, "data", "blobs")) {
					if filepath.Base(f) == name {
						found = true
						damage(t, f, part, 0xff)
					}
				}
				if !found && name != "safe" {
					t.Fatalf("there is no %s", name)
				}
			})
			check(fmt.Sprintf("%s at %.2f", name, part))
		}
	}
}

// One byte is wrong in the object store: whatever depends on it fails with store_corrupt, what is shown is
// right, and to make the image again mends it.
func TestDamageInTheStoreIsNeverShownAndCanBeMended(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true})
	dir := mixed(t, b)
	b.Must(t, "image", "import", "mixed", dir)
	want, r := seen(t, b, "mixed")
	if want == "" {
		t.Fatal(r)
	}
	store := filepath.Join(b.Data, "store")
	for _, class := range []string{"pack", "map", "meta"} {
		parts := []float64{0, 0.4, 0.999}
		if class == "pack" {
			parts = append(parts, 0.003, 0.99)
		}
		for _, part := range parts {
			what := fmt.Sprintf("%s at %.3f", class, part)
			files := filesBelow(t, filepath.Join(store, class))
			for _, f := range files {
				damage(t, f, part, 1)
			}
			b.Must(t, "image", "evict", "mixed")
			got, r := seen(t, b, "mixed")
			switch {
			case got == want: // an index of a pack, which readers do not need
			case got != "":
				t.Errorf("%s: another image is shown", what)
			case class != "pack" && (r.Code != 125 || !strings.Contains(r.Stderr, "error: store_corrupt")):
				t.Errorf("%s: exit code %d: %s", what, r.Code, r.Stderr)
			case class == "pack" && r.Code == 0:
				t.Errorf("%s: %+v", what, r)
			}
			if out := b.CLI(t, "image", "export", "mixed", filepath.Join(t.TempDir(), "tar")); got == "" && out.Code == 0 { // an answer that has begun can only break off
				t.Errorf("%s: export ends with %d: %s", what, out.Code, out.Stderr)
			}
			b.Must(t, "image", "import", "mixed", dir)
			b.Must(t, "image", "evict", "mixed")
			if got, r := seen(t, b, "mixed"); got != want {
				t.Errorf("%s: made again it is not as before: %d, %s", what, r.Code, r.Stderr)
			}
		}
	}
}

// The node loses what it knows of an image, or finds it damaged, while a sandbox reads it: the sandbox goes on
// with what the store has, and where nothing can be had its reads fail rather than hang.
func TestLostStateOfAnImageInUse(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true, Flags: []string{"--image-read-ahead", "0"}})
	b.Must(t, "image", "import", "mixed", mixed(t, b))
	images := filepath.Join(b.Data, "images")
	const sums = "cd /large; busybox sha256sum *"
	want := b.Must(t, "run", "mixed", "--", "sh", "-c", sums)
	for _, c := range []struct {
		what   string
		lose   func()
		refuse bool
	}{
		{"state", func() {
			for _, f := range filesBelow(t, filepath.Join(images, "data", "blobs")) {
				if filepath.Base(f) != "data" {
					damage(t, f, 0.1, 1)
				}
			}
		}, false},
		{"state and map", func() {
			for _, f := range append(filesBelow(t, filepath.Join(images, "data", "blobs")), filesBelow(t, filepath.Join(images, "maps"))...) {
				if filepath.Base(f) != "data" {
					damage(t, f, 0.1, 1)
				}
			}
		}, false},
		{"everything but the bytes", func() {
			for _, f := range append(filesBelow(t, filepath.Join(images, "data", "blobs")), filesBelow(t, filepath.Join(images, "layers"))...) {
				if filepath.Base(f) == "data" {
					continue
				}
				if err := os.Remove(f); err != nil {
					t.Fatal(err)
				}
			}
		}, true},
	} {
		b.Must(t, "image", "evict", "mixed")
		id := b.Must(t, "create", "mixed")
		b.Must(t, "exec", id, "--", "sh", "-c", "busybox head -c 10 /large/0 >/dev/null")
		b.Must(t, "down", "--keep", "--data", b.Data)
		c.lose()
		if err := b.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		r := b.CLI(t, "exec", id, "--timeout", "20s", "--", "sh", "-c", sums)
		switch {
		case !c.refuse && (r.Code != 0 || strings.TrimSpace(r.Stdout) != want):
			t.Errorf("lost %s: exit code %d\n%s%s\nwant\n%s", c.what, r.Code, r.Stdout, r.Stderr, want)
		case c.refuse && (r.Code == 0 || r.Code >= 124 && r.Code <= 125): // EIO, or SIGBUS where it is of a program
			t.Errorf("lost %s: exit code %d\n%s%s", c.what, r.Code, r.Stdout, r.Stderr)
		}
		for line := range strings.Lines(r.Stdout) {
			if !strings.Contains(want, strings.TrimSpace(line)) {
				t.Errorf("lost %s: wrong content: %s", c.what, line)
			}
		}
		b.Must(t, "rm", id)
		bed.Eventually(t, "the image can be used again", func() error {
			if r := b.CLI(t, "run", "mixed", "--", "sh", "-c", sums); r.Code != 0 || strings.TrimSpace(r.Stdout) != want {
				return fmt.Errorf("%d %s%s", r.Code, r.Stdout, r.Stderr)
			}
			return nil
		})
	}
}
