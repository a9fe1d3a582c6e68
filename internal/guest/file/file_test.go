package file

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/guest/user"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// The tests need root: they act as other users.
func newFS(t testing.TB) *FS {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	return &FS{Users: user.NewDatabase("")}
}

// dir returns a directory that everybody may enter and write.
func dir(t testing.TB) string {
	t.Helper()
	d := t.TempDir()
	for p := d; p != os.TempDir() && p != "/"; p = filepath.Dir(p) {
		os.Chmod(p, 0o777)
	}
	return d
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantCode(t testing.TB, err error, code errs.Code) {
	t.Helper()
	if !errors.Is(err, code) {
		t.Errorf("error %v, want %s", err, code)
	}
}

func TestAbsolute(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"": "/work", "~": "/home/u", "~/x": "/home/u/x", "x/y": "/home/u/x/y", "/a//b/./c/": "/a/b/c", "/": "/", "//": "/",
		"/a/../b": "/a/../b", ".": "/home/u",
	} {
		if got, err := Absolute(in, "/home/u", "/work"); err != nil || got != want {
			t.Errorf("%q: %q %v, want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"a\x00b", "~other", "~other/x", "/" + strings.Repeat("x", 256), strings.Repeat("/abcdefg", 600)} {
		_, err := Absolute(in, "/home/u", "")
		wantCode(t, err, errs.BadPath)
	}
}

func FuzzAbsolute(f *testing.F) {
	f.Add("~/x", "/root", "/work")
	f.Add("a/../../b", "", "")
	f.Fuzz(func(t *testing.T, path, home, cwd string) {
		if strings.IndexByte(home, 0) >= 0 || strings.IndexByte(cwd, 0) >= 0 {
			return
		}
		got, err := Absolute(path, home, cwd)
		if err != nil {
			if !errors.Is(err, errs.BadPath) {
				t.Fatal(err)
			}
			return
		}
		if got[0] != '/' || len(got) > 4095 || strings.Contains(got, "//") || strings.IndexByte(got, 0) >= 0 {
			t.Fatalf("%q", got)
		}
		if again, err := Absolute(got, home, cwd); err != nil || again != got {
			t.Fatalf("%q then %q (%v)", got, again, err)
		}
	})
}

func TestReadWrite(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	p := d + "/a/b/c.txt"
	_, _, err := fs.Put(p, "", WriteOptions{}, []byte("x"))
	wantCode(t, err, errs.PathNotFound)
	e, n, err := fs.Put(p, "nobody", WriteOptions{Parents: true, Mode: 0o600, Metadata: map[string]string{"Key": "v"}}, []byte("hello world"))
	must(t, err)
	if n != 11 || e.Size != 11 || e.Owner != "nobody" || e.Permissions != "-rw-------" || e.Metadata["key"] != "v" || e.Type != TypeFile || e.Path != p {
		t.Fatalf("%+v", e)
	}
	if e, err = fs.Stat(d+"/a", "", false); err != nil || e.Owner != "nobody" || e.Permissions != "drwxr-xr-x" {
		t.Fatalf("%+v %v", e, err)
	}
	_, _, err = fs.Put(p, "", WriteOptions{Offset: 6, Keep: true}, []byte("W"))
	must(t, err)
	_, _, err = fs.Put(p, "", WriteOptions{Append: true}, []byte("!"))
	must(t, err)
	e, b, eof, err := fs.Get(p, "nobody", 0, 0)
	if err != nil || string(b) != "hello World!" || !eof || e.Metadata["key"] != "v" {
		t.Fatalf("%q %v %v %+v", b, eof, err, e)
	}
	if _, b, eof, err = fs.Get(p, "", 3, 4); err != nil || string(b) != "lo W" || eof {
		t.Fatalf("%q %v %v", b, eof, err)
	}
	if _, b, eof, err = fs.Get(p, "", 100, 4); err != nil || len(b) != 0 || !eof {
		t.Fatalf("%q %v %v", b, eof, err)
	}
	// A whole write replaces content and metadata, and keeps owner and mode.
	e, _, err = fs.Put(p, "", WriteOptions{Mode: 0o777}, []byte("n"))
	if err != nil || e.Size != 1 || e.Metadata != nil || e.Permissions != "-rw-------" || e.Owner != "nobody" {
		t.Fatalf("%+v %v", e, err)
	}
	// Holes stay holes.
	e, _, err = fs.Put(d+"/sparse", "", WriteOptions{Offset: 1 << 30}, []byte("end"))
	must(t, err)
	var st unix.Stat_t
	if unix.Stat(d+"/sparse", &st); e.Size != 1<<30+3 || st.Blocks > 64 {
		t.Fatalf("size %d, %d blocks", e.Size, st.Blocks)
	}
	_, _, _, err = fs.Get(d+"/sparse", "", 0, 0)
	wantCode(t, err, errs.BodyTooLarge)
	_, _, err = fs.Put(d+"/big", "", WriteOptions{}, make([]byte, MaxBody+1))
	wantCode(t, err, errs.BodyTooLarge)
	if _, _, err = fs.Put(d+"/big", "", WriteOptions{}, make([]byte, MaxBody)); err != nil {
		t.Fatal(err)
	}
	if _, b, eof, err := fs.Get(d+"/big", "", 0, 0); err != nil || len(b) != MaxBody || !eof {
		t.Fatal(len(b), eof, err)
	}
	if _, b, _, err = fs.Get("/proc/version", "", 0, 0); err != nil || len(b) == 0 {
		t.Fatal("a file without a size:", err)
	}
}

func TestAtomicWrite(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	must(t, os.WriteFile(d+"/f", []byte("old"), 0o640))
	must(t, os.Symlink("f", d+"/link"))
	w, err := fs.OpenWrite(d+"/link", "", WriteOptions{Atomic: true})
	must(t, err)
	w.Write([]byte("new"))
	if b, _ := os.ReadFile(d + "/f"); string(b) != "old" {
		t.Fatalf("%q before the commit", b)
	}
	_, _, err = w.Commit()
	must(t, err)
	if b, _ := os.ReadFile(d + "/f"); string(b) != "new" {
		t.Fatalf("%q", b)
	}
	if st, _ := os.Lstat(d + "/link"); st.Mode()&os.ModeSymlink == 0 {
		t.Error("the link was replaced")
	}
	if st, _ := os.Stat(d + "/f"); st.Mode().Perm() != 0o640 {
		t.Error(st.Mode())
	}
	w, err = fs.OpenWrite(d+"/f", "", WriteOptions{Atomic: true})
	must(t, err)
	w.Write([]byte("lost"))
	w.Abort()
	left, _ := os.ReadDir(d)
	if b, _ := os.ReadFile(d + "/f"); string(b) != "new" || len(left) != 2 {
		t.Fatalf("%q, %v", b, left)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	must(t, os.WriteFile(d+"/file", []byte("x"), 0o600))
	must(t, os.Mkdir(d+"/sub", 0o755))
	must(t, os.WriteFile(d+"/sub/x", nil, 0o644))
	must(t, os.Symlink("loop", d+"/loop"))
	must(t, unix.Mkfifo(d+"/fifo", 0o666))
	get := func(p, u string) error { _, _, _, err := fs.Get(p, u, 0, 0); return err }
	put := func(p string, o WriteOptions) error { _, _, err := fs.Put(p, "", o, []byte("x")); return err }
	for _, c := range []struct {
		name string
		err  error
		want errs.Code
	}{
		{"missing", get(d+"/none", ""), errs.PathNotFound},
		{"a directory", get(d+"/sub", ""), errs.IsDirectory},
		{"below a file", get(d+"/file/x", ""), errs.NotDirectory},
		{"loop", get(d+"/loop", ""), errs.BadPath},
		{"fifo", get(d+"/fifo", ""), errs.BadPath},
		{"device", get("/dev/zero", ""), errs.BadPath},
		{"another's file", get(d+"/file", "nobody"), errs.PermissionDenied},
		{"shadow", get("/etc/shadow", "nobody"), errs.PermissionDenied},
		{"no such user", get(d+"/file", "nosuchuser"), errs.UserNotFound},
		{"NUL", get("a\x00", ""), errs.BadPath},
		{"write to fifo", put(d+"/fifo", WriteOptions{}), errs.BadPath},
		{"write to directory", put(d+"/sub", WriteOptions{}), errs.IsDirectory},
		{"full", put("/dev/full", WriteOptions{}), errs.BadPath},
		{"append at offset", put(d+"/x", WriteOptions{Append: true, Offset: 1}), errs.BadRequest},
		{"mode", put(d+"/x", WriteOptions{Mode: 1 << 20}), errs.BadRequest},
		{"metadata", put(d+"/x", WriteOptions{Metadata: map[string]string{"a": "\n"}}), errs.BadRequest},
		{"much metadata", put(d+"/x", WriteOptions{Metadata: map[string]string{"a": strings.Repeat("v", 4096)}}), errs.BodyTooLarge},
		{"mkdir over", second(fs.Mkdir(d+"/sub", "", 0, false)), errs.PathExists},
		{"mkdir over file", second(fs.Mkdir(d+"/file", "", 0, true)), errs.NotDirectory},
		{"mkdir root", second(fs.Mkdir("/", "", 0, false)), errs.PathExists},
		{"remove full", second(fs.Remove(d+"/sub", "", false, false)), errs.PathExists},
		{"remove missing", second(fs.Remove(d+"/none", "", true, false)), errs.PathNotFound},
		{"remove root", second(fs.Remove("/", "", false, false)), errs.BadPath},
		{"move missing", second(fs.Move(d+"/none", d+"/y", "", false)), errs.PathNotFound},
		{"move over", second(fs.Move(d+"/file", d+"/fifo", "", true)), errs.PathExists},
		{"chown", second(fs.Chown(d+"/file", "nobody", "root", false)), errs.PermissionDenied},
		{"chown to", second(fs.Chown(d+"/file", "", "nosuchuser", false)), errs.UserNotFound},
		{"chmod", second(fs.Chmod(d+"/file", "nobody", 0o777, false)), errs.PermissionDenied},
		{"list a file", third(fs.List(d+"/file", "", 1, 0)), errs.NotDirectory},
		{"watch a file", second(fs.Watch(d+"/file", "", false)), errs.NotDirectory},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%s: %v, want %s", c.name, c.err, c.want)
		}
	}
	if _, err := fs.Remove(d+"/none", "", false, true); err != nil {
		t.Error(err)
	}
}

func second[T any](_ T, err error) error        { return err }
func third[T, U any](_ T, _ U, err error) error { return err }

func TestDiskFull(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	must(t, unix.Mount("tmpfs", d, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { unix.Unmount(d, unix.MNT_DETACH) })
	_, _, err := fs.Put(d+"/x", "", WriteOptions{Atomic: true}, make([]byte, 1<<20))
	wantCode(t, err, errs.DiskFull)
	if left, _ := os.ReadDir(d); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// Nothing of the guest itself can be had by a path, not by links either.
func TestOwnProcFilesAreRefused(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	self := strconv.Itoa(os.Getpid())
	secret, err := os.Open("/etc/hostname")
	must(t, err)
	defer secret.Close()
	for i, target := range []string{
		"/proc/self/environ", "/proc/self/mem", "/proc/self/maps", "/proc/" + self + "/environ", "/proc/thread-self/environ",
		"/proc/1/environ", "/proc/self/fd/" + strconv.Itoa(int(secret.Fd())), "/proc/self/task/" + self + "/environ",
		"/proc/self/exe", "/proc/self/root/etc/passwd", "/proc/self/cwd/x", "/proc/" + strconv.Itoa(unix.Gettid()) + "/environ",
	} {
		link := d + "/l" + strconv.Itoa(i)
		must(t, os.Symlink(target, link))
		for _, p := range []string{target, link} {
			if _, _, _, err := fs.Get(p, "", 0, 16); err == nil {
				t.Errorf("%s can be read", p)
			}
			if _, err := fs.OpenWrite(p, "", WriteOptions{Keep: true}); err == nil {
				t.Errorf("%s can be opened for writing", p)
			}
		}
	}
	if _, err := fs.Mkdir("/proc/self/cwd/made", "", 0, true); err == nil {
		t.Error("a directory was made through /proc/self/cwd")
	}
	if _, _, err := fs.List("/proc/self/fd", "", 1, 0); err == nil {
		t.Error("own descriptors can be listed")
	}
	other := exec.Command("sleep", "100")
	must(t, other.Start())
	defer func() { other.Process.Kill(); other.Wait() }()
	if _, _, _, err := fs.Get("/proc/"+strconv.Itoa(other.Process.Pid)+"/cmdline", "", 0, 0); err != nil {
		t.Errorf("another process's: %v", err)
	}
}

// snapshot renders a tree for comparison.
// evil makes an archive of entries.
// Whatever the tar holds, nothing outside the destination changes.
// Random writes against a model in memory.
func TestRandomWritesMatchAModel(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	i := 0
	rapid.Check(t, func(t *rapid.T) {
		i++
		p := d + "/model" + strconv.Itoa(i)
		var model []byte
		exists := false
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			data := rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "data")
			var o WriteOptions
			switch rapid.IntRange(0, 3).Draw(t, "kind") {
			case 0:
				model = append([]byte(nil), data...)
			case 1:
				o.Append = true
				model = append(model, data...)
			case 2:
				o.Keep, o.Offset = true, uint64(rapid.IntRange(0, 600).Draw(t, "offset"))
				if end := int(o.Offset) + len(data); len(data) > 0 && end > len(model) {
					model = append(model, make([]byte, end-len(model))...)
				}
				copy(model[min(int(o.Offset), len(model)):], data)
			case 3:
				o.Atomic = true
				model = append([]byte(nil), data...)
			}
			if _, _, err := fs.Put(p, "", o, data); err != nil {
				t.Fatal(err)
			}
			exists = true
			off, n := rapid.IntRange(0, 700).Draw(t, "from"), rapid.IntRange(1, 700).Draw(t, "length")
			_, got, eof, err := fs.Get(p, "", uint64(off), uint64(n))
			if err != nil {
				t.Fatal(err)
			}
			lo, hi := min(off, len(model)), min(off+n, len(model))
			if !bytes.Equal(got, model[lo:hi]) || eof != (off+n >= len(model)) {
				t.Fatalf("%d+%d: %q eof %v, want %q", off, n, got, eof, model[lo:hi])
			}
		}
		if exists {
			os.Remove(p)
		}
	})
}
