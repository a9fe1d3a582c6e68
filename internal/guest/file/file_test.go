package file

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/guest/tarball"
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

func TestListMoveRemoveChange(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	for _, p := range []string{"a/b/c/d", "a/x"} {
		_, _, err := fs.Put(d+"/"+p, "", WriteOptions{Parents: true}, []byte(p))
		must(t, err)
	}
	must(t, os.Symlink("/etc", d+"/a/etc"))
	must(t, os.Symlink(d, d+"/a/b/up"))
	names := func(depth uint32, limit uint64) (out []string, cut bool) {
		l, cut, err := fs.List(d+"/a", "", depth, limit)
		must(t, err)
		for _, e := range l {
			out = append(out, strings.TrimPrefix(e.Path, d+"/a/"))
		}
		return out, cut
	}
	if got, _ := names(0, 0); !slices.Equal(got, []string{"b", "etc", "x"}) {
		t.Error(got)
	}
	if got, _ := names(9, 0); !slices.Equal(got, []string{"b", "b/c", "b/c/d", "b/up", "etc", "x"}) {
		t.Error(got)
	}
	if got, cut := names(9, 2); len(got) != 2 || !cut {
		t.Error(got, cut)
	}
	e, err := fs.Stat(d+"/a/etc", "", true)
	if err != nil || e.Type != TypeSymlink || e.Target != "/etc" {
		t.Errorf("%+v %v", e, err)
	}
	if e, err = fs.Stat(d+"/a/etc", "", false); err != nil || e.Type != TypeDirectory || e.Target != "/etc" {
		t.Errorf("%+v %v", e, err)
	}
	if _, err = fs.Chown(d+"/a", "", "nobody:daemon", true); err != nil {
		t.Fatal(err)
	}
	if e, _ = fs.Stat(d+"/a/b/c/d", "", false); e.Owner != "nobody" || e.Group != "daemon" {
		t.Errorf("%+v", e)
	}
	if e, _ = fs.Stat("/etc", "", false); e.Owner != "root" {
		t.Fatal("a link was followed")
	}
	if _, err = fs.Chmod(d+"/a", "nobody", 0o700, true); err != nil {
		t.Fatal(err)
	}
	if e, _ = fs.Stat(d+"/a/b/c/d", "", false); e.Permissions != "-rwx------" {
		t.Errorf("%+v", e)
	}
	if e, err = fs.Move(d+"/a/b", d+"/moved", "", true); err != nil || e.Path != d+"/moved" {
		t.Fatal(e, err)
	}
	// moved, c, d, up; the link's target stays.
	if n, err := fs.Remove(d+"/moved", "", true, false); err != nil || n != 4 {
		t.Fatal(n, err)
	}
	if _, err := os.Stat(d + "/a/x"); err != nil {
		t.Fatal(err)
	}
}

func TestWatch(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	must(t, os.Mkdir(d+"/old", 0o777))
	w, err := fs.Watch(d, "nobody", true)
	must(t, err)
	defer w.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	expect := func(want ...Event) {
		t.Helper()
		for _, x := range want {
			for {
				e, err := w.Next(ctx)
				if err != nil {
					t.Fatalf("waiting for %+v: %v", x, err)
				}
				if e == x {
					break
				}
			}
		}
	}
	must(t, os.WriteFile(d+"/f", []byte("x"), 0o644))
	expect(Event{Name: "f", Type: EventCreate}, Event{Name: "f", Type: EventWrite})
	must(t, os.Chmod(d+"/f", 0o600))
	expect(Event{Name: "f", Type: EventChmod})
	must(t, os.Rename(d+"/f", d+"/g"))
	expect(Event{Name: "f", Type: EventRename}, Event{Name: "g", Type: EventCreate})
	must(t, os.MkdirAll(d+"/n1/n2/n3", 0o777))
	must(t, os.WriteFile(d+"/n1/n2/n3/x", nil, 0o644))
	expect(Event{Name: "n1", Type: EventCreate}, Event{Name: "n1/n2", Type: EventCreate}, Event{Name: "n1/n2/n3", Type: EventCreate}, Event{Name: "n1/n2/n3/x", Type: EventCreate})
	must(t, os.WriteFile(d+"/old/y", nil, 0o644))
	expect(Event{Name: "old/y", Type: EventCreate})
	must(t, os.Rename(d+"/n1", d+"/old/n1"))
	expect(Event{Name: "n1", Type: EventRename}, Event{Name: "old/n1", Type: EventCreate})
	must(t, os.WriteFile(d+"/old/n1/n2/z", nil, 0o644))
	expect(Event{Name: "old/n1/n2/z", Type: EventCreate})
	must(t, os.Remove(d+"/g"))
	expect(Event{Name: "g", Type: EventRemove})
	if e := w.Entry(Event{Name: "old"}); e == nil || e.Type != TypeDirectory {
		t.Errorf("%+v", e)
	}
	must(t, os.RemoveAll(d))
	expect(Event{Name: ".", Type: EventRemove})
	_, err = w.Next(ctx)
	wantCode(t, err, errs.PathNotFound)
}

func TestWatchOverflowIsReported(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	w, err := fs.Watch(d, "", false)
	must(t, err)
	defer w.Close()
	for range 20000 { // the kernel's queue holds 16384; two files, since equal neighbours are merged
		must(t, os.WriteFile(d+"/a", nil, 0o644))
		must(t, os.Remove(d+"/a"))
	}
	for {
		e, err := w.Next(t.Context())
		must(t, err)
		if e.Overflow {
			break
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for {
		if _, err := w.Next(ctx); err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			return
		}
	}
}

// snapshot renders a tree for comparison.
func snapshot(t testing.TB, root string) map[string]string {
	t.Helper()
	m := map[string]string{}
	inodes := map[uint64]string{}
	filepath.Walk(root, func(p string, info os.FileInfo, err error) error {
		must(t, err)
		rel, _ := filepath.Rel(root, p)
		var st unix.Stat_t
		must(t, unix.Lstat(p, &st))
		s := info.Mode().String() + " " + strconv.Itoa(int(st.Uid)) + " " + strconv.FormatInt(st.Mtim.Nano(), 10)
		if info.IsDir() && rel == "." {
			return nil
		}
		switch {
		case info.Mode().IsRegular():
			b, err := os.ReadFile(p)
			must(t, err)
			if len(b) > 100 {
				b = b[:100]
			}
			s += " " + strconv.FormatInt(st.Size, 10) + " " + string(b)
			if first, ok := inodes[st.Ino]; ok {
				s += " same as " + first
			}
			inodes[st.Ino] = rel
		case info.Mode()&os.ModeSymlink != 0:
			l, _ := os.Readlink(p)
			s += " -> " + l
		}
		var v [64]byte
		if n, err := unix.Lgetxattr(p, "user.test", v[:]); err == nil {
			s += " xattr " + string(v[:n])
		}
		m[rel] = s
		return nil
	})
	return m
}

func TestPackUnpack(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	src := d + "/src"
	must(t, os.MkdirAll(src+"/dir/"+strings.Repeat("n", 200)+"/deep", 0o755))
	must(t, os.WriteFile(src+"/dir/file", []byte("content"), 0o4751))
	must(t, os.Chmod(src+"/dir/file", 0o751|os.ModeSetuid))
	must(t, os.Link(src+"/dir/file", src+"/dir/hard"))
	must(t, os.Symlink("../nowhere", src+"/dir/sym"))
	must(t, os.WriteFile(src+"/empty", nil, 0o600))
	must(t, os.WriteFile(src+"/big", bytes.Repeat([]byte("0123456789"), 100000), 0o644))
	must(t, os.WriteFile(src+"/ünïcode \n", []byte("x"), 0o644))
	must(t, os.Chown(src+"/big", 1234, 5678))
	must(t, unix.Setxattr(src+"/dir/file", "user.test", []byte("value"), 0))
	must(t, unix.Mkfifo(src+"/fifo", 0o640))
	must(t, unix.Mknod(src+"/dev", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(t, os.Chtimes(src+"/empty", time.Unix(1, 0), time.Unix(1234567890, 987654321)))
	must(t, os.Chmod(src+"/dir", 0o511))
	must(t, os.Chtimes(src+"/dir", time.Unix(1, 0), time.Unix(1000000000, 5)))
	want := snapshot(t, src)
	delete(want, "dev") // devices are left out

	var buf bytes.Buffer
	n, size, err := fs.Pack(&buf, src, "", true)
	must(t, err)
	if n != uint64(len(want)) || size != 7+1000000+1 {
		t.Errorf("%d entries of %d, %d bytes", n, len(want), size)
	}
	m, size2, err := fs.Unpack(bytes.NewReader(buf.Bytes()), d+"/dst/sub", "", UnpackOptions{Parents: true, KeepOwner: true})
	must(t, err)
	if m != n || size2 != size {
		t.Errorf("unpacked %d entries and %d bytes of %d and %d", m, size2, n, size)
	}
	got := snapshot(t, d+"/dst/sub")
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s:\n got %s\nwant %s", k, got[k], v)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d entries, want %d", len(got), len(want))
	}
	// Again over it, and by the system's tar.
	_, _, err = fs.Unpack(bytes.NewReader(buf.Bytes()), d+"/dst/sub", "", UnpackOptions{KeepOwner: true})
	must(t, err)
	if again := snapshot(t, d+"/dst/sub"); again["dir/file"] != want["dir/file"] || len(again) != len(want) {
		t.Error("unpacking over itself changed the tree")
	}
	must(t, os.Mkdir(d+"/systar", 0o755))
	cmd := exec.Command("tar", "-xpf", "-", "-C", d+"/systar", "--xattrs", "--numeric-owner")
	cmd.Stdin = bytes.NewReader(buf.Bytes())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("tar: %v %s", err, out)
	}
	got = snapshot(t, d+"/systar")
	for k, v := range want {
		if k != "dir" && got[k] != v { // tar may differ in times of directories it enters again
			t.Errorf("by tar: %s:\n got %s\nwant %s", k, got[k], v)
		}
	}
	// As another user, what comes out is that user's.
	_, _, err = fs.Unpack(bytes.NewReader(buf.Bytes()), d+"/other", "nobody", UnpackOptions{Parents: true})
	must(t, err)
	if e, err := fs.Stat(d+"/other/big", "", true); err != nil || e.Owner != "nobody" {
		t.Errorf("%+v %v", e, err)
	}
	// A file alone, and a tree under its name.
	buf.Reset()
	_, _, err = fs.Pack(&buf, src+"/empty", "", false)
	must(t, err)
	if h, err := tar.NewReader(&buf).Next(); err != nil || h.Name != "empty" {
		t.Error(h, err)
	}
	buf.Reset()
	_, _, err = fs.Pack(&buf, src, "", false)
	must(t, err)
	if h, err := tar.NewReader(&buf).Next(); err != nil || h.Name != "src/" {
		t.Error(h, err)
	}
	_, _, err = fs.Pack(io.Discard, src, "nobody", true)
	wantCode(t, err, errs.PermissionDenied)
}

// evil makes an archive of entries.
func evil(hs ...*tarball.Header) []byte {
	var buf bytes.Buffer
	w := tarball.NewWriter(&buf)
	for _, h := range hs {
		if h.Kind == tarball.Regular {
			h.Size = 4
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		w.WriteHeader(h)
		if h.Kind == tarball.Regular {
			w.Write([]byte("evil"))
		}
	}
	w.Close()
	return buf.Bytes()
}

// Whatever the tar holds, nothing outside the destination changes.
func TestUnpackStaysInside(t *testing.T) {
	t.Parallel()
	type H = tarball.Header
	fs := newFS(t)
	for name, c := range map[string]struct {
		tar  []byte
		code errs.Code
	}{
		"dotdot":              {evil(&H{Name: "../out/f", Kind: tarball.Regular}), errs.BadPath},
		"dotdot inside":       {evil(&H{Name: "a/../../out/f", Kind: tarball.Regular}), errs.BadPath},
		"absolute":            {evil(&H{Name: "/out/f", Kind: tarball.Regular}), ""},
		"link then file":      {evil(&H{Name: "l", Link: "../out", Kind: tarball.Symlink}, &H{Name: "l/f", Kind: tarball.Regular}), errs.BadPath},
		"absolute link":       {evil(&H{Name: "oo/f", Kind: tarball.Regular}), errs.BadPath},
		"link to file":        {evil(&H{Name: "l", Link: "../out/secret", Kind: tarball.Symlink}, &H{Name: "l", Kind: tarball.Regular}), ""},
		"hard link":           {evil(&H{Name: "h", Link: "../out/secret", Kind: tarball.HardLink}), errs.BadPath},
		"hard link over link": {evil(&H{Name: "l", Link: "../out", Kind: tarball.Symlink}, &H{Name: "h", Link: "l/secret", Kind: tarball.HardLink}), errs.BadPath},
		"directory over link": {evil(&H{Name: "l", Link: "../out", Kind: tarball.Symlink}, &H{Name: "l/", Kind: tarball.Directory, Mode: 0o777}), ""},
		"directory below":     {evil(&H{Name: "l", Link: "../out", Kind: tarball.Symlink}, &H{Name: "l/new/", Kind: tarball.Directory}), errs.BadPath},
		"symlink below":       {evil(&H{Name: "l", Link: "../out", Kind: tarball.Symlink}, &H{Name: "l/s", Link: "x", Kind: tarball.Symlink}), errs.BadPath},
		"fifo below":          {evil(&H{Name: "l", Link: "../out", Kind: tarball.Symlink}, &H{Name: "l/s", Kind: tarball.FIFO}), errs.BadPath},
		"dir becomes a link":  {evil(&H{Name: "d/", Kind: tarball.Directory, Mode: 0o777}, &H{Name: "d", Link: "../out", Kind: tarball.Symlink}, &H{Name: "x", Kind: tarball.Regular}), ""},
		"proc":                {evil(&H{Name: "l", Link: "/proc/self/cwd", Kind: tarball.Symlink}, &H{Name: "l/f", Kind: tarball.Regular}), errs.BadPath},
		"no name":             {evil(&H{Name: "", Kind: tarball.Regular}), errs.BadPath},
		"itself":              {evil(&H{Name: "./", Kind: tarball.Directory, Mode: 0o777}), ""},
		"device":              {evil(&H{Name: "null", Kind: tarball.Char, Major: 1, Minor: 3}), ""},
		"cut":                 {evil(&H{Name: "f", Kind: tarball.Regular})[:700], errs.BadRequest},
		"garbage":             {[]byte(strings.Repeat("garbage ", 200)), errs.BadRequest},
		"empty":               {nil, errs.BadRequest},
		"owner":               {evil(&H{Name: "f", Kind: tarball.Regular, UID: -5}), errs.BadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := dir(t)
			must(t, os.Mkdir(d+"/out", 0o755))
			must(t, os.WriteFile(d+"/out/secret", []byte("secret"), 0o600))
			must(t, os.Mkdir(d+"/dst", 0o755))
			before := snapshot(t, d+"/out")
			outMode, _ := os.Stat(d + "/out")
			must(t, os.Symlink(d+"/out", d+"/dst/oo"))
			_, _, err := fs.Unpack(bytes.NewReader(c.tar), d+"/dst", "", UnpackOptions{KeepOwner: true})
			if c.code == "" && err != nil || c.code != "" && !errors.Is(err, c.code) {
				t.Errorf("%v, want %q", err, c.code)
			}
			after := snapshot(t, d+"/out")
			now, _ := os.Stat(d + "/out")
			if len(after) != 1 || after["secret"] != before["secret"] || now.Mode() != outMode.Mode() {
				t.Errorf("outside changed: %v, mode %v", after, now.Mode())
			}
		})
	}
}

func FuzzUnpack(f *testing.F) {
	type H = tarball.Header
	f.Add(evil(&H{Name: "a/b", Kind: tarball.Regular}, &H{Name: "l", Link: "../x", Kind: tarball.Symlink}, &H{Name: "l/f", Kind: tarball.Regular}))
	f.Add(evil(&H{Name: "h", Link: "a", Kind: tarball.HardLink}, &H{Name: "d/", Kind: tarball.Directory}))
	f.Fuzz(func(t *testing.T, b []byte) {
		fs := newFS(t)
		d := t.TempDir()
		os.Mkdir(d+"/dst", 0o755)
		os.WriteFile(d+"/canary", []byte("x"), 0o600)
		fs.Unpack(bytes.NewReader(b), d+"/dst", "", UnpackOptions{})
		left, err := os.ReadDir(d)
		if err != nil || len(left) != 2 {
			t.Fatal(left, err)
		}
		if c, err := os.ReadFile(d + "/canary"); err != nil || string(c) != "x" {
			t.Fatal("outside changed")
		}
		os.Chmod(d+"/dst", 0o755)
		exec.Command("chmod", "-R", "u+rwx", d+"/dst").Run()
	})
}

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
