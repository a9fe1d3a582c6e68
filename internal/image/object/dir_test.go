package object_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
	"dsec/internal/image/object/objecttest"
)

func openDir(t *testing.T, root string) *object.Dir {
	t.Helper()
	d, err := object.OpenDir(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDir(t *testing.T) {
	t.Parallel()
	objecttest.Run(t, func(t *testing.T) object.Store { return openDir(t, t.TempDir()) })
}

func TestDirThrottled(t *testing.T) {
	t.Parallel()
	objecttest.Run(t, func(t *testing.T) object.Store {
		return object.Throttle(openDir(t, t.TempDir()), 1<<30, time.Microsecond)
	})
	throttled(t, openDir(t, t.TempDir()))
}

func throttled(t *testing.T, s object.Store) {
	b := make([]byte, 400_000)
	if err := s.Put(t.Context(), "t/object", int64(len(b)), bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	slow := object.Throttle(objecttest.Counting(s), 1_000_000, 50*time.Millisecond)
	if got, err := object.ReadAll(t.Context(), slow, "t/object", 0, -1, 1<<20); err != nil || len(got) != len(b) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	if d := time.Since(start); d < 400*time.Millisecond {
		t.Errorf("400 kB at 1 MB/s and 50 ms took %v", d)
	}
}

// A directory holds no more than a few thousand of 10^5 objects.
func TestDirectoriesStaySmall(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	d := openDir(t, root)
	for i := range 3000 {
		if err := d.Put(t.Context(), fmt.Sprintf("pack/%08d", i), 0, strings.NewReader("")); err != nil {
			t.Fatal(err)
		}
	}
	most := 0
	err := filepath.WalkDir(root, func(path string, e os.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			var entries []os.DirEntry
			entries, err = os.ReadDir(path)
			most = max(most, len(entries))
		}
		return err
	})
	if err != nil || most > 256 {
		t.Errorf("a directory has %d entries, %v", most, err)
	}
}

func TestOldLeftoversAreRemoved(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	openDir(t, root)
	old, young := filepath.Join(root, "_tmp", "old"), filepath.Join(root, "_tmp", "young")
	for _, p := range []string{old, young} {
		if err := os.WriteFile(p, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(old, time.Time{}, time.Now().Add(-25*time.Hour)); err != nil {
		t.Fatal(err)
	}
	openDir(t, root)
	left, err := os.ReadDir(filepath.Join(root, "_tmp"))
	if err != nil || len(left) != 1 || left[0].Name() != "young" {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Files that are no objects are neither listed nor served.
func TestForeignFiles(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	d := openDir(t, root)
	if err := d.Put(t.Context(), "pack/one", 1, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"pack/00/.nfs0001", "pack/00/foreign", "lost+found/00/x", "README/00/y"} {
		path := filepath.Join(root, p)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	if err := d.List(t.Context(), "", func(i object.Info) error { n++; return nil }); err != nil || n != 1 {
		t.Errorf("%d objects are listed, %v", n, err)
	}
}

func TestFullAndUnwritableDirectory(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Fatal("needs root: it mounts a small tmpfs")
	}
	root := t.TempDir()
	if err := syscall.Mount("tmpfs", root, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(root, syscall.MNT_DETACH)
	d := openDir(t, root)
	err := d.Put(t.Context(), "pack/big", 4<<20, bytes.NewReader(make([]byte, 4<<20)))
	if !errors.Is(err, errs.DiskFull) || !errs.Of(err).Retryable {
		t.Errorf("a full disk: %v", err)
	}
	if left, _ := os.ReadDir(filepath.Join(root, "_tmp")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if err := d.Put(t.Context(), "pack/small", 1, strings.NewReader("x")); err != nil {
		t.Error(err)
	}
	if err := syscall.Mount("", root, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	err = d.Put(t.Context(), "pack/other", 1, strings.NewReader("x"))
	if !errors.Is(err, errs.StoreDenied) || errs.Of(err).Retryable {
		t.Errorf("a read-only directory: %v", err)
	}
}

// A process killed in the middle of Puts leaves whole objects only.
func TestKilledPuts(t *testing.T) {
	if root := os.Getenv("OBJECT_TEST_PUT"); root != "" {
		putForEver(t, root)
	}
	t.Parallel()
	root := t.TempDir()
	for round := range 6 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilledPuts$")
		cmd.Env = append(os.Environ(), "OBJECT_TEST_PUT="+root)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(100+73*round) * time.Millisecond)
		cmd.Process.Kill()
		cmd.Wait()
		d := openDir(t, root)
		n := 0
		err := d.List(t.Context(), "", func(i object.Info) error {
			n++
			b, err := object.ReadAll(t.Context(), d, i.Key, 0, -1, 1<<24)
			if err != nil {
				return err
			}
			if want := killedContent(i.Key); !bytes.Equal(b, want) {
				t.Errorf("%s is not whole: %d of %d bytes", i.Key, len(b), len(want))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if round == 5 && n == 0 {
			t.Error("nothing was ever put")
		}
	}
}

func killedContent(key string) []byte { return []byte(strings.Repeat(key+" ", 20_000)) }

func putForEver(t *testing.T, root string) {
	d := openDir(t, root)
	for i := range 100_000 {
		key := fmt.Sprintf("k/%d-%d", os.Getpid(), i)
		b := killedContent(key)
		if err := d.Put(t.Context(), key, int64(len(b)), struct{ io.Reader }{bytes.NewReader(b)}); err != nil {
			t.Fatal(err)
		}
	}
}

func FuzzCheckKey(f *testing.F) {
	for _, k := range []string{"a", "pack/00", "..", "a/../b", "a/", "\x00"} {
		f.Add(k)
	}
	f.Fuzz(func(t *testing.T, key string) {
		if object.CheckKey(key) != nil {
			return
		}
		if p := filepath.Join("/root", key); p != "/root/"+key || strings.ContainsAny(key, "%\\\x00 ") || len(key) > 240 {
			t.Errorf("%q is no safe key", key)
		}
		if err := object.CheckPrefix(key); err != nil {
			t.Error(err)
		}
	})
}

// Large objects are written past the page cache, but for what is not whole blocks.
func TestLargeObjectsAreWhole(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{t.TempDir(), memoryDir(t)} {
		s, err := object.OpenDir(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, size := range []int64{1<<20 - 1, 1 << 20, 1<<20 + 1, 4 << 20, 4<<20 + 4096, 4<<20 + 4097, 9<<20 - 5, 12 << 20} {
			want := make([]byte, size)
			rand.NewChaCha8([32]byte{byte(size)}).Read(want)
			key := fmt.Sprintf("pack/%d", size)
			// In pieces that are no blocks, as from a network.
			if err := s.Put(t.Context(), key, size, iotest.HalfReader(bytes.NewReader(want))); err != nil {
				t.Fatal(err)
			}
			got, err := object.ReadAll(t.Context(), s, key, 0, -1, size)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes in %s: %d, %v", size, dir, len(got), err)
			}
			for _, wrong := range []int64{size - 1, size + 1} {
				if err := s.Put(t.Context(), key+"x", wrong, bytes.NewReader(want)); err == nil {
					t.Errorf("%d bytes were taken for %d", size, wrong)
				}
			}
		}
		if err := s.List(t.Context(), "", func(i object.Info) error {
			if strings.HasSuffix(i.Key, "x") {
				t.Errorf("%s is there", i.Key)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
}

func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "dsec-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// A directory that is not there any more, since it is not mounted, is a store that does not
// answer: not one without objects, and nothing is put where it was.
func TestADirectoryThatIsGone(t *testing.T) {
	t.Parallel()
	at := filepath.Join(t.TempDir(), "store")
	d, err := object.OpenDir(t.Context(), at)
	if err != nil {
		t.Fatal(err)
	}
	put := func(key string) error { return d.Put(t.Context(), key, 4, strings.NewReader("data")) }
	for _, key := range []string{"mark", "pack/a"} {
		if err := put(key); err != nil {
			t.Fatal(err)
		}
	}
	fails := func(what string) {
		t.Helper()
		_, get := d.Get(t.Context(), "pack/a", 0, -1)
		_, stat := d.Stat(t.Context(), "pack/a")
		for op, err := range map[string]error{
			"get": get, "stat": stat, "put": put("pack/b"), "delete": d.Delete(t.Context(), "pack/a"),
			"list": d.List(t.Context(), "pack/", func(object.Info) error { return nil }),
		} {
			if !errors.Is(err, errs.StoreUnavailable) {
				t.Errorf("%s, %s: got %v", what, op, err)
			}
		}
	}
	if err := os.Rename(at, at+".away"); err != nil {
		t.Fatal(err)
	}
	fails("gone")
	if _, err := os.Stat(at); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("something was made where the store was: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(at, "_tmp"), 0o755); err != nil { // what an earlier start left there
		t.Fatal(err)
	}
	fails("empty")
	if err := os.RemoveAll(at); err != nil {
		t.Fatal(err)
	}
	// Back, as a copy: its directories have other numbers.
	if err := os.CopyFS(at, os.DirFS(at+".away")); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Stat(t.Context(), "pack/a"); err != nil {
		t.Error(err)
	}
	if err := put("pack/b"); err != nil {
		t.Error(err)
	}
	if _, err := d.Stat(t.Context(), "pack/c"); !errors.Is(err, errs.ObjectNotFound) {
		t.Errorf("got %v", err)
	}
}
