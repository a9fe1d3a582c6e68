package source

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"

	"errors"

	erofs "github.com/erofs/go-erofs"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// These tests need root: they make devices and owners, and mount.

func fromDir(t *testing.T, dir string, opts layer.Options) (image.LayerFiles, layer.Result) {
	t.Helper()
	return imagetest.MustBuild(t, opts, func(b *layer.Builder) error {
		_, err := Path(t.Context(), dir, b, Options{Format: Dir})
		return err
	})
}

func sameAsMounted(t *testing.T, dir string, l image.LayerFiles) {
	t.Helper()
	want, err := imagetest.Describe(dir)
	if err != nil {
		t.Fatal(err)
	}
	if d := imagetest.Diff(want, imagetest.Mounted(t, l)); d != "" {
		t.Error(d)
	}
}

// fsck asks the format's own tool, where it is installed, for a second opinion.
func fsck(t *testing.T, l image.LayerFiles) {
	t.Helper()
	if _, err := exec.LookPath("fsck.erofs"); err != nil {
		t.Log("fsck.erofs is not installed: the kernel's opinion alone")
		return
	}
	args := []string{l.Meta}
	if l.Data != "" {
		args = []string{"--device=" + l.Data, l.Meta}
	}
	if out, err := exec.Command("fsck.erofs", args...).CombinedOutput(); err != nil {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
}

func TestRandomTreesMountBackTheSame(t *testing.T) {
	t.Parallel()
	for _, inline := range []int{0, -1} {
		t.Run(fmt.Sprintf("inline=%d", inline), func(t *testing.T) {
			t.Parallel()
			n := 0
			base := t.TempDir()
			rapid.Check(t, func(rt *rapid.T) {
				n++
				dir := filepath.Join(base, fmt.Sprint(n))
				if err := os.Mkdir(dir, 0o755); err != nil {
					rt.Fatal(err)
				}
				defer os.RemoveAll(dir)
				imagetest.RandomTree(rt, dir)
				l, _ := fromDir(t, dir, layer.Options{InlineMax: inline})
				sameAsMounted(t, dir, l)
				fsck(t, l)
				if t.Failed() {
					rt.Fatal("tree and mount differ")
				}
			})
		})
	}
}

func TestExtremesMountBackTheSame(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// A file over 4 GiB with data at its ends and in its middle.
	f, err := os.Create(filepath.Join(dir, "sparse"))
	must(err)
	for _, off := range []int64{0, 3<<30 + 5, 4<<30 + 12345} {
		_, err = f.WriteAt([]byte("here"), off)
		must(err)
	}
	must(f.Close())
	must(os.Truncate(filepath.Join(dir, "sparse"), 4<<30+20000))
	must(os.WriteFile(filepath.Join(dir, "hole"), nil, 0o600))
	must(os.Truncate(filepath.Join(dir, "hole"), 64<<20))
	// Directories of 10^4 short and of many long names.
	for _, d := range []struct {
		name string
		n, l int
	}{{"many", 10_000, 5}, {"long", 300, 255}} {
		must(os.Mkdir(filepath.Join(dir, d.name), 0o755))
		for i := range d.n {
			must(os.Symlink("x", filepath.Join(dir, d.name, fmt.Sprintf("%0*d", d.l, i))))
		}
	}
	// A path of 20 × 255 bytes.
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	must(err)
	for i := range 20 {
		name := strings.Repeat(string(rune('a'+i)), 255)
		must(unix.Mkdirat(fd, name, 0o755))
		next, err := unix.Openat(fd, name, unix.O_PATH|unix.O_CLOEXEC, 0)
		must(err)
		unix.Close(fd)
		fd = next
	}
	must(unix.Mknodat(fd, "deep", unix.S_IFIFO|0o600, 0))
	unix.Close(fd)
	// xattrs larger than a block.
	big := filepath.Join(dir, "xattrs")
	must(os.WriteFile(big, []byte("content"), 0o4755))
	for i := range 3 {
		// ext4 holds one block of them; where the test runs may hold more.
		if err := unix.Lsetxattr(big, fmt.Sprintf("user.%d", i), make([]byte, 1100), 0); err != nil {
			t.Fatal(err)
		}
	}
	l, res := fromDir(t, dir, layer.Options{})
	sameAsMounted(t, dir, l)
	fsck(t, l)
	if res.DataSize > 1<<20 {
		t.Errorf("holes take space: the data blob has %d bytes", res.DataSize)
	}
	_, res2 := fromDir(t, dir, layer.Options{})
	if res != res2 {
		t.Errorf("the same tree gave %+v and then %+v", res, res2)
	}
}

func TestAnotherReaderAgreesWithTheKernel(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i := range 500 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), []byte(strings.Repeat("x", i*i)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l, _ := fromDir(t, dir, layer.Options{})
	meta, err := os.Open(l.Meta)
	if err != nil {
		t.Fatal(err)
	}
	defer meta.Close()
	data, err := os.Open(l.Data)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	fsys, err := erofs.Open(meta, erofs.WithExtraDevices(data))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 500 {
		f, err := fsys.Open(fmt.Sprint(i))
		if err != nil {
			t.Fatal(err)
		}
		st, err := f.Stat()
		if err != nil || st.Size() != int64(i*i) {
			t.Fatalf("file %d: size %d, %v", i, st.Size(), err)
		}
		f.Close()
	}
}

func TestMountPointsBelowAreLeftOut(t *testing.T) {
	t.Parallel()
	var got *layer.Builder
	l, _ := imagetest.MustBuild(t, layer.Options{MaxEntries: 100_000}, func(b *layer.Builder) error {
		got = b
		// /dev has file systems mounted in it, such as /dev/pts.
		_, err := Path(t.Context(), "/dev", b, Options{})
		return err
	})
	if got.Skipped()["content of a mount point"] == 0 {
		t.Skip("nothing is mounted below /dev here")
	}
	for _, line := range imagetest.Mounted(t, l) {
		if strings.HasPrefix(line, `"./pts/`) {
			t.Errorf("crossed into another file system: %s", line)
		}
	}
}

func TestMissingPathIsNotFound(t *testing.T) {
	t.Parallel()
	_, _, err := imagetest.Build(t, layer.Options{}, func(b *layer.Builder) error {
		_, err := Path(t.Context(), "/no/such/thing", b, Options{})
		return err
	})
	if !errors.Is(err, errs.PathNotFound) {
		t.Errorf("got %v", err)
	}
}

// A file of one chunk as the last inode, ending close to the end of a block, once moved
// the blocks behind the inodes to a place that they were not planned for.
func TestBlocksBehindALastSmallInodeAreWherePlanned(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Symlink(strings.Repeat("0", 4095), filepath.Join(dir, "a")); err != nil { // needs a block
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "z"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for n := range 130 { // inodes that end at each slot of a block
		if err := os.WriteFile(filepath.Join(dir, strings.Repeat("b", n+1)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		l, res := fromDir(t, dir, layer.Options{InlineMax: -1})
		st, err := os.Stat(l.Meta)
		if err != nil {
			t.Fatal(err)
		}
		if st.Size() != res.MetaSize {
			t.Errorf("with %d files: %d bytes written, %d planned", n+2, st.Size(), res.MetaSize)
		}
	}
	l, _ := fromDir(t, dir, layer.Options{InlineMax: -1})
	sameAsMounted(t, dir, l)
}
