package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

// entry of a tar that a test makes by hand.
type entry struct {
	name, link, data string
	typ              byte // 0: a file
}

func tarOf(t *testing.T, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.typ, Mode: 0o755, Size: int64(len(e.data))}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// hostFile makes a file on the host that no sandbox may see or change.
func hostFile(t *testing.T) (path string, check func()) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "of-the-host")
	if err := os.WriteFile(path, []byte("host"), 0o666); err != nil {
		t.Fatal(err)
	}
	return path, func() {
		t.Helper()
		if data, err := os.ReadFile(path); err != nil || string(data) != "host" {
			t.Errorf("the host's file: %q, %v", data, err)
		}
		if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 1 {
			t.Errorf("beside the host's file: %v, %v", entries, err)
		}
	}
}

func TestPathsNeverLeaveTheRoot(t *testing.T) {
	t.Parallel()
	host, untouched := hostFile(t)
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	f, ctx := sb.Files(), t.Context()
	up := "/tmp/" + strings.Repeat("../", 30)
	if res, err := sb.Run(ctx, "sh", "-c", fmt.Sprintf(`
		ln -s %[1]s%[2]s /tmp/relative; ln -s %[2]s /tmp/absolute; ln -s %[1]s%[3]s /tmp/dir
		ln -s /tmp/loop /tmp/loop; mkdir -p /tmp/real; ln -s real /tmp/inside`, up, host, filepath.Dir(host))); err != nil || res.Code != 0 {
		t.Fatal(err, res)
	}
	for _, path := range []string{up + host, "/tmp/relative", "/tmp/absolute", "/tmp/dir/of-the-host", "/proc/self/root" + host, "/proc/1/root" + host, "/proc/1/cwd/" + up + host} {
		if data, err := f.ReadFile(ctx, path); err == nil || !errors.Is(err, errs.PathNotFound) && !errors.Is(err, errs.PermissionDenied) && !errors.Is(err, errs.BadPath) {
			t.Errorf("read %s: %q, %v", path, data, err)
		}
		if _, err := f.Stat(ctx, path); err == nil {
			t.Errorf("stat %s: it is there", path)
		}
		// A write through it may make something inside the sandbox, never outside.
		f.WriteFile(ctx, path, []byte("sandbox"), client.WriteOptions{Parents: true})
		f.WriteFile(ctx, path+".2", []byte("sandbox"), client.WriteOptions{Parents: true, Atomic: true})
		f.Mkdir(ctx, path+".dir", 0o755)
		untouched()
		f.RemoveAll(ctx, filepath.Dir(host)) // the sandbox's own, if a write has made it
		untouched()
	}
	f.RemoveAll(ctx, "/tmp/dir/")
	f.Chmod(ctx, "/tmp/absolute", 0o777, true)
	f.Move(ctx, "/tmp/inside", "/tmp/dir/moved")
	untouched()
	for path, want := range map[string]errs.Code{
		"/tmp/loop": errs.BadPath, "/etc/hosts/x": errs.NotDirectory, "/tmp/\x00": errs.BadPath,
		"/" + strings.Repeat("x", 300): errs.BadPath, "/" + strings.Repeat("x/", 5000): errs.BadPath,
	} {
		if err := f.WriteFile(ctx, path, nil, client.WriteOptions{}); !errors.Is(err, want) {
			t.Errorf("write %.40q: %v, want %s", path, err, want)
		}
	}
	if _, err := f.ReadFile(ctx, "/tmp"); !errors.Is(err, errs.IsDirectory) {
		t.Errorf("read a directory: %v", err)
	}
}

func TestUnpackNeverLeavesTheRoot(t *testing.T) {
	t.Parallel()
	host, untouched := hostFile(t)
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	up := strings.Repeat("../", 30)
	for name, archive := range map[string][]byte{
		"parent":          tarOf(t, entry{name: up + host, data: "x"}),
		"absolute":        tarOf(t, entry{name: host, data: "x"}),
		"through a link":  tarOf(t, entry{name: "d", link: up + filepath.Dir(host), typ: tar.TypeSymlink}, entry{name: "d/of-the-host", data: "x"}),
		"absolute link":   tarOf(t, entry{name: "e", link: filepath.Dir(host), typ: tar.TypeSymlink}, entry{name: "e/new", data: "x"}),
		"over a link":     tarOf(t, entry{name: "l", link: host, typ: tar.TypeSymlink}, entry{name: "l", data: "x"}),
		"hard link":       tarOf(t, entry{name: "h", link: up + host, typ: tar.TypeLink}, entry{name: "h", data: "x"}),
		"hard link to it": tarOf(t, entry{name: "s", link: host, typ: tar.TypeSymlink}, entry{name: "g", link: "s", typ: tar.TypeLink}, entry{name: "g", data: "x"}),
	} {
		_, _, err := sb.Files().UnpackFrom(t.Context(), "/tmp/u", bytes.NewReader(archive), client.UnpackOptions{Parents: true, KeepOwner: true})
		if err != nil && !errors.Is(err, client.ErrInvalid) && !errors.Is(err, client.ErrNotFound) && !errors.Is(err, client.ErrConflict) && !errors.Is(err, errs.Corrupt) {
			t.Errorf("%s: %v", name, err)
		}
		if e, err := sb.Files().Stat(t.Context(), host); err == nil {
			t.Errorf("%s: written to the sandbox's own %s: %v", name, host, e)
		}
		untouched()
	}
	good := tarOf(t, entry{name: "f", data: strings.Repeat("x", 5000)})
	for name, archive := range map[string][]byte{"garbage": bytes.Repeat([]byte("garbage!"), 1000), "cut off": good[:2000], "empty": {}} {
		if _, _, err := sb.Files().UnpackFrom(t.Context(), "/tmp/c", bytes.NewReader(archive), client.UnpackOptions{Parents: true}); !errors.Is(err, client.ErrInvalid) && !errors.Is(err, errs.Corrupt) {
			t.Errorf("a tar that is %s: %v", name, err)
		}
	}
	if res, err := sb.Run(t.Context(), "true"); err != nil || res.Code != 0 {
		t.Errorf("the sandbox afterwards: %v", err)
	}
}

// A hostile sandbox sends a tree to the host: nothing may land outside of the target.
func TestCopyOutOfAHostileTreeStaysInTheTarget(t *testing.T) {
	t.Parallel()
	host, untouched := hostFile(t)
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	if res, err := sb.Run(t.Context(), "sh", "-c", fmt.Sprintf(`mkdir -p /w/sub && cd /w && ln -s %[1]s link && ln -s %[2]s d && echo x > sub/of-the-host && mkfifo fifo`, host, filepath.Dir(host))); err != nil || res.Code != 0 {
		t.Fatal(err, res)
	}
	// The target already has a link where the tree has a directory.
	target := t.TempDir()
	if err := os.Symlink(filepath.Dir(host), filepath.Join(target, "sub")); err != nil {
		t.Fatal(err)
	}
	err := sb.Files().CopyOut(t.Context(), "/w/.", target, client.CopyOptions{})
	untouched()
	if target, rerr := os.Readlink(filepath.Join(target, "link")); err == nil && (rerr != nil || target != host) {
		t.Errorf("links are copied as links: %q, %v", target, rerr)
	}
}

// files lists a directory tree by name and size.
func files(t *testing.T, dir string) map[string]int64 {
	t.Helper()
	all := map[string]int64{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it ends while we look
		}
		if err != nil {
			return err
		}
		if info, err := d.Info(); err == nil && !d.IsDir() {
			all[path] = info.Size()
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestCorruptImagesAreRefused(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	host, untouched := hostFile(t)
	random := bed.Random(t)
	noise := make([]byte, 1<<20)
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	good := tarOf(t, entry{name: "bin/f", data: strings.Repeat("data", 100000)})
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	zw.Write(good)
	zw.Close()
	broken := bytes.Clone(zipped.Bytes())
	broken[len(broken)/2] ^= 0xff
	flipped := bytes.Clone(good)
	flipped[10] ^= 1 // the first header's name no longer has its checksum
	up := strings.Repeat("../", 30)

	before := files(t, filepath.Join(b.Data, "images"))
	for _, x := range []struct {
		name    string
		archive []byte
		want    []errs.Code
		format  string
	}{
		{"noise", noise, []errs.Code{errs.ImageCorrupt, errs.ImageUnsupported}, ""},
		{"nothing", nil, []errs.Code{errs.ImageCorrupt}, ""},
		{"cut off", good[:200000], []errs.Code{errs.ImageCorrupt}, ""},
		{"flipped header", flipped, []errs.Code{errs.ImageCorrupt, errs.ImageUnsupported}, ""},
		{"cut off gzip", zipped.Bytes()[:zipped.Len()/2], []errs.Code{errs.ImageCorrupt}, ""},
		{"broken gzip", broken, []errs.Code{errs.ImageCorrupt}, ""},
		{"docker archive without its layer", tarOf(t, entry{name: "manifest.json", data: `[{"Config":"c.json","RepoTags":null,"Layers":["l.tar"]}]`}, entry{name: "c.json", data: `{"rootfs":{"type":"layers","diff_ids":["sha256:` + strings.Repeat("0", 64) + `"]}}`}), []errs.Code{errs.ImageCorrupt}, ""},
		{"docker archive with a broken manifest", tarOf(t, entry{name: "manifest.json", data: `[{`}), []errs.Code{errs.ImageCorrupt}, "docker-archive"},
		{"OCI layout without an index", tarOf(t, entry{name: "oci-layout", data: `{"imageLayoutVersion":"1.0.0"}`}), []errs.Code{errs.ImageCorrupt}, "oci-layout"},
		{"a parent path", tarOf(t, entry{name: up + host, data: "x"}), []errs.Code{errs.ImageCorrupt, errs.BadPath}, ""},
		{"a hard link out", tarOf(t, entry{name: "h", link: up + host, typ: tar.TypeLink}), []errs.Code{errs.ImageCorrupt, errs.BadPath}, ""},
		{"a hard link to nothing", tarOf(t, entry{name: "h", link: "nosuch", typ: tar.TypeLink}), []errs.Code{errs.ImageCorrupt}, ""},
	} {
		img, err := c.Import(t.Context(), "bad", bytes.NewReader(x.archive), client.ImportOptions{Format: x.format})
		ok := false
		for _, code := range x.want {
			ok = ok || errors.Is(err, code)
		}
		if e := client.ErrorOf(err); !ok || e.Infra {
			t.Errorf("%s: %v, %v, want %v", x.name, img, err, x.want)
		}
		untouched()
	}
	if list, err := c.Images(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("%d images, %v", len(list), err)
	}
	if after := files(t, filepath.Join(b.Data, "images")); !maps.Equal(before, after) {
		t.Errorf("the image store changed from\n%v\nto\n%v", before, after)
	}
	// Links of an image are its own affair: they are resolved inside the sandbox.
	if _, err := c.Import(t.Context(), "links", bytes.NewReader(tarOf(t, entry{name: "l", link: up + host, typ: tar.TypeSymlink})), client.ImportOptions{}); err != nil {
		t.Errorf("an image with a link: %v", err)
	}
	sb := b.Sandbox(t, c, client.Spec{Image: "links"})
	if data, err := sb.ReadFile(t.Context(), "/l"); !errors.Is(err, errs.PathNotFound) {
		t.Errorf("through the image's link: %q, %v", data, err)
	}
	if res, err := sb.Run(t.Context(), "/bin/true"); err != nil || res.Code != 127 {
		t.Errorf("a command in an image without any: %+v, %v", res, err)
	}
}

// An image import with the wrong word for its format says so.
func TestImportChecksTheFormat(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeTree(t, dir)
	shared.Fails(t, 1, "bad_request", "image", "import", "--format", "docker-archive", "x", dir)
	shared.Fails(t, 1, "local_file", "image", "import", "x", "/no/such/source")
	shared.Fails(t, 1, "image_", "image", "import", "--format", "oci-layout", "x", shared.Bin)
	if r := shared.CLI(t, "image", "inspect", "x"); r.Code == 0 {
		t.Error("an image was made")
	}
}
