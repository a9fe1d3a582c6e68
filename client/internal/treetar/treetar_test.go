package treetar

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Needs root: owners and devices are made.
func TestRoundTripKeepsEverything(t *testing.T) {
	t.Parallel()
	src, dst := t.TempDir(), t.TempDir()
	long := strings.Repeat("long-name-", 20)
	for _, err := range []error{
		os.WriteFile(filepath.Join(src, "f"), []byte("data"), 0o644),
		os.Chown(filepath.Join(src, "f"), 1234, 5678),
		os.Chmod(filepath.Join(src, "f"), 0o755|fs.ModeSetuid),
		os.Link(filepath.Join(src, "f"), filepath.Join(src, "z")),
		os.Symlink("/etc/passwd", filepath.Join(src, "abs")),
		os.Lchown(filepath.Join(src, "abs"), 77, 88),
		os.MkdirAll(filepath.Join(src, "ro"), 0o755),
		os.WriteFile(filepath.Join(src, "ro", long), nil, 0o400),
		os.Chmod(filepath.Join(src, "ro"), 0o555|fs.ModeSticky),
		unix.Mkfifo(filepath.Join(src, "fifo"), 0o620),
		unix.Mknod(filepath.Join(src, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	xattr := unix.Setxattr(filepath.Join(src, "f"), "trusted.test", []byte("\x00binary\xff"), 0)
	var b bytes.Buffer
	var names []string
	if err := Pack(t.Context(), &b, src, PackOptions{OnEntry: func(n string, _ int64) { names = append(names, n) }}); err != nil {
		t.Fatal(err)
	}
	if len(names) != 8 {
		t.Errorf("entries %q", names)
	}
	root, err := os.OpenRoot(dst)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	res, err := Unpack(t.Context(), &b, root, UnpackOptions{KeepOwner: true})
	if err != nil || len(res.Skipped) > 0 || res.Bytes != 4 {
		t.Fatalf("%+v, %v", res, err)
	}
	for _, name := range []string{"f", "z", "abs", "ro", "ro/" + long, "fifo", "null"} {
		var a, b unix.Stat_t
		if err := errors.Join(unix.Lstat(filepath.Join(src, name), &a), unix.Lstat(filepath.Join(dst, name), &b)); err != nil {
			t.Fatal(err)
		}
		if a.Mode != b.Mode || a.Uid != b.Uid || a.Gid != b.Gid || a.Rdev != b.Rdev || a.Size != b.Size && a.Mode&unix.S_IFMT != unix.S_IFDIR ||
			a.Nlink != b.Nlink || a.Mtim != b.Mtim && a.Mode&unix.S_IFMT != unix.S_IFLNK {
			t.Errorf("%s: %+v became %+v", name, a, b)
		}
	}
	if xattr == nil {
		v := make([]byte, 64)
		n, err := unix.Getxattr(filepath.Join(dst, "f"), "trusted.test", v)
		if err != nil || string(v[:n]) != "\x00binary\xff" {
			t.Errorf("xattr %q, %v", v[:max(n, 0)], err)
		}
	} else if !errors.Is(xattr, unix.ENOTSUP) {
		t.Error(xattr)
	}
}

// write makes a tar of headers; a regular file's content is its size in bytes of 'x'.
func write(t testing.TB, headers ...*tar.Header) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		w.Write(bytes.Repeat([]byte("x"), int(h.Size)))
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// hostile are streams that try to leave the root.
func hostile(t testing.TB) map[string][]byte {
	file := func(name string) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeReg, Size: 3, Mode: 0o644}
	}
	return map[string][]byte{
		"dots":           write(t, file("../../escape")),
		"absolute":       write(t, file("/escape")),
		"symlink dir":    write(t, &tar.Header{Name: "d", Typeflag: tar.TypeSymlink, Linkname: ".."}, file("d/escape")),
		"absolute link":  write(t, &tar.Header{Name: "d", Typeflag: tar.TypeSymlink, Linkname: "/"}, file("d/tmp/escape")),
		"symlink file":   write(t, &tar.Header{Name: "f", Typeflag: tar.TypeSymlink, Linkname: "../outside"}, file("f")),
		"hard link":      write(t, &tar.Header{Name: "f", Typeflag: tar.TypeLink, Linkname: "../outside"}),
		"link via link":  write(t, &tar.Header{Name: "d", Typeflag: tar.TypeSymlink, Linkname: ".."}, &tar.Header{Name: "f", Typeflag: tar.TypeLink, Linkname: "d/outside"}),
		"chmod via link": write(t, &tar.Header{Name: "d", Typeflag: tar.TypeDir, Mode: 0o755}, &tar.Header{Name: "d", Typeflag: tar.TypeSymlink, Linkname: "../outside"}),
		"dir over link":  write(t, &tar.Header{Name: "d", Typeflag: tar.TypeSymlink, Linkname: ".."}, &tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o777}),
		"file as root":   write(t, &tar.Header{Name: ".", Typeflag: tar.TypeReg}),
		"negative owner": write(t, &tar.Header{Name: "f", Typeflag: tar.TypeReg, Uid: -1, Gid: -1}),
	}
}

// unpackBeside unpacks into a directory and fails if what lies beside it changes.
func unpackBeside(t testing.TB, b []byte, o UnpackOptions) error {
	parent := t.TempDir()
	out := filepath.Join(parent, "outside")
	if err := errors.Join(os.Mkdir(filepath.Join(parent, "in"), 0o755), os.WriteFile(out, []byte("safe"), 0o600), os.Chmod(parent, 0o700)); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(filepath.Join(parent, "in"))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	// A stream may promise a file of exabytes.
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, uerr := Unpack(ctx, bytes.NewReader(b), root, o)
	l, err := os.ReadDir(parent)
	if err != nil || len(l) != 2 {
		t.Errorf("the directory above holds %v, %v", l, err)
	}
	c, err := os.ReadFile(out)
	fi, serr := os.Stat(out)
	if err != nil || serr != nil || string(c) != "safe" || fi.Mode() != 0o600 || fi.Sys().(*syscall.Stat_t).Nlink != 1 {
		t.Errorf("the file outside was touched: %q %v %v %v", c, fi, err, serr)
	}
	if fi, err := os.Stat(parent); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("the directory above was changed: %v, %v", fi, err)
	}
	return uerr
}

func TestUnpackStaysInside(t *testing.T) {
	t.Parallel()
	for name, b := range hostile(t) {
		t.Run(name, func(t *testing.T) {
			for _, keep := range []bool{false, true} {
				err := unpackBeside(t, b, UnpackOptions{KeepOwner: keep})
				t.Logf("keep owner %t: %v", keep, err)
			}
		})
	}
}

func TestUnpackWithoutPrivilege(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	b := write(t,
		&tar.Header{Name: "f", Typeflag: tar.TypeReg, Size: 1, Mode: 0o4755, Uid: 99, Gid: 99},
		&tar.Header{Name: "dev", Typeflag: tar.TypeBlock, Devmajor: 8},
	)
	res, err := Unpack(t.Context(), bytes.NewReader(b), root, UnpackOptions{})
	if err != nil || len(res.Skipped) != 1 || res.Skipped[0] != "dev" {
		t.Errorf("%+v, %v", res, err)
	}
	fi, err := os.Stat(filepath.Join(dir, "f"))
	if err != nil || fi.Mode() != 0o755 || fi.Sys().(*syscall.Stat_t).Uid != uint32(os.Getuid()) {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	// Again over what is there: files are replaced, a directory in a file's place is not.
	if _, err := Unpack(t.Context(), bytes.NewReader(b), root, UnpackOptions{}); err != nil {
		t.Error(err)
	}
	if err := errors.Join(os.Remove(filepath.Join(dir, "f")), os.Mkdir(filepath.Join(dir, "f"), 0o755)); err != nil {
		t.Fatal(err)
	}
	if _, err := Unpack(t.Context(), bytes.NewReader(b), root, UnpackOptions{}); !errors.Is(err, unix.EISDIR) {
		t.Errorf("a file over a directory: %v", err)
	}
}

func TestUnpackTruncated(t *testing.T) {
	t.Parallel()
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	b := write(t, &tar.Header{Name: "f", Typeflag: tar.TypeReg, Size: 5000, Mode: 0o644})
	if _, err := Unpack(t.Context(), bytes.NewReader(b[:2000]), root, UnpackOptions{}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v", err)
	}
}

func FuzzUnpack(f *testing.F) {
	for _, b := range hostile(f) {
		f.Add(b, true)
	}
	f.Add([]byte{}, false)
	f.Fuzz(func(t *testing.T, b []byte, keep bool) {
		unpackBeside(t, b, UnpackOptions{KeepOwner: keep})
	})
}
