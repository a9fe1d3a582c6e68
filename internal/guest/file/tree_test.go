package file

import (
	"archive/tar"
	"bytes"
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

	"golang.org/x/sys/unix"
)

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
