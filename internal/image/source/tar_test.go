package source

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"

	"github.com/klauspost/compress/zstd"
	"pgregory.net/rapid"
)

// makeTar writes headers with their content; a header of size 0 gets its content's.
func makeTar(t testing.TB, entries ...tarEntry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := e.Header
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Size == 0 {
			h.Size = int64(len(e.content))
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

type tarEntry struct {
	tar.Header
	content string
}

func plain(name, content string) tarEntry {
	return tarEntry{tar.Header{Name: name, Mode: 0o644, ModTime: time.Unix(0, 0)}, content}
}

func streamed(t testing.TB, p []byte, opts Options, lopts layer.Options) (image.LayerFiles, Result, error) {
	t.Helper()
	opts.SpoolDir = t.TempDir()
	var res Result
	l, _, err := imagetest.Build(t, lopts, func(b *layer.Builder) error {
		var err error
		res, err = Stream(t.Context(), bytes.NewReader(p), b, opts)
		return err
	})
	if left, _ := os.ReadDir(opts.SpoolDir); len(left) > 0 {
		t.Errorf("spool files are left: %v", left)
	}
	return l, res, err
}

func gz(t testing.TB, p []byte) []byte {
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	if _, err := w.Write(p); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func zst(t testing.TB, p []byte) []byte {
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(p, nil)
}

// What GNU tar makes of a random tree, in its formats and compressions, is the tree.
func TestTarsOfRandomTrees(t *testing.T) {
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
		compression := rapid.SampledFrom([]string{"none", "gzip", "zstd"}).Draw(rt, "compression")
		args := []string{"-C", dir, "--format=pax", "--xattrs", "--xattrs-include=*", "--numeric-owner", "--sparse", "-cf", "-", "."}
		out, err := exec.Command("tar", args...).Output()
		if err != nil {
			rt.Fatalf("tar: %v", err)
		}
		switch compression {
		case "gzip":
			out = gz(t, out)
		case "zstd":
			out = zst(t, out)
		}
		l, res, err := streamed(t, out, Options{}, layer.Options{})
		if err != nil || res.Format != Tar {
			rt.Fatalf("%v, %v", res, err)
		}
		want, err := imagetest.Describe(dir)
		if err != nil {
			rt.Fatal(err)
		}
		if d := imagetest.Diff(asTarHas(want), asTarHas(imagetest.Mounted(t, l))); d != "" {
			rt.Fatal(d)
		}
	})
}

var linkInfo = regexp.MustCompile(`nlink=\d+( same="([^"\\]|\\.)*")?`)

// asTarHas leaves out what tar does not carry: sockets, and that devices and
// fifos have several names.
func asTarHas(lines []string) []string {
	var out []string
	for _, l := range lines {
		switch {
		case strings.Contains(l, " mode=14"):
			continue
		case strings.Contains(l, " rdev="):
			l = linkInfo.ReplaceAllString(l, "")
		}
		out = append(out, l)
	}
	return out
}

func TestTarIsKeptAsItIs(t *testing.T) {
	t.Parallel()
	p := makeTar(t,
		plain("manifest.json.d/x", "1"), plain("d/.wh.a", ""), plain("d/a", "a"), plain("d/.wh..wh..opq", ""),
		tarEntry{tar.Header{Name: "w", Typeflag: tar.TypeChar}, ""},
		tarEntry{tar.Header{Name: "cont", Typeflag: tar.TypeCont}, "c"},
	)
	l, res, err := streamed(t, p, Options{}, layer.Options{})
	if err != nil || res.Format != Tar {
		t.Fatal(res, err)
	}
	all := strings.Join(imagetest.Mounted(t, l), "\n")
	for _, want := range []string{`"./d/.wh.a"`, `"./d/a"`, `"./d/.wh..wh..opq"`, `"./w" mode=20000`, `"./cont"`} {
		if !strings.Contains(all, want) {
			t.Errorf("no %s in\n%s", want, all)
		}
	}
}

func TestTarAttributes(t *testing.T) {
	t.Parallel()
	p := makeTar(t,
		tarEntry{tar.Header{Name: "old", Uid: 1 << 31, Gid: 70000, Mode: 0o6711, ModTime: time.Unix(-5, 7), Format: tar.FormatPAX,
			PAXRecords: map[string]string{
				"SCHILY.xattr.trusted.overlay.opaque": "y",
				"SCHILY.acl.access":                   "user::rwx,user:1000:rw-,group::r-x,mask::rwx,other::--x",
			}}, "x"},
		tarEntry{tar.Header{Name: "neg", Uid: -2, Gid: -1, Mode: 0o600, Format: tar.FormatGNU}, "x"},
		tarEntry{tar.Header{Name: "acl", Format: tar.FormatPAX, PAXRecords: map[string]string{"SCHILY.acl.access": "user:games:rw-"}}, "x"},
		tarEntry{tar.Header{Name: "late", ModTime: time.Unix(1<<40, 0), Format: tar.FormatPAX}, ""},
	)
	var b *layer.Builder
	l, _, err := imagetest.Build(t, layer.Options{}, func(got *layer.Builder) error {
		b = got
		_, err := Stream(t.Context(), bytes.NewReader(p), got, Options{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(imagetest.Mounted(t, l), "\n")
	for _, want := range []string{
		"uid=2147483648 gid=70000 mtime=-5.000000007", "trusted.overlay.opaque=79", "uid=4294967294 gid=65534", "mtime=1099511627776.0",
		"system.posix_acl_access=02000000" + "01000700ffffffff" + "02000600e8030000" + "04000500ffffffff" + "10000700ffffffff" + "20000100ffffffff",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("no %s in\n%s", want, all)
		}
	}
	if b.Skipped()["ACL (it names users)"] != 1 || b.Skipped()["owner -1 (now nobody)"] != 1 {
		t.Errorf("skipped %v", b.Skipped())
	}
}

func TestDamagedAndForeignStreams(t *testing.T) {
	t.Parallel()
	content := strings.Repeat("content ", 1000)
	good := makeTar(t, plain("a", content), plain("b", content))
	for _, c := range []struct {
		name string
		p    []byte
		code errs.Code
		opts Options
	}{
		{"empty", nil, errs.ImageCorrupt, Options{}},
		{"text", []byte(strings.Repeat("hello", 500)), errs.ImageUnsupported, Options{}},
		{"short", []byte("hello"), errs.ImageUnsupported, Options{}},
		{"xz", []byte("\xfd7zXZ\x00 whatever"), errs.ImageUnsupported, Options{}},
		{"cut in content", good[:3000], errs.ImageCorrupt, Options{}},
		{"cut in a header", good[:512+8192+100], errs.ImageCorrupt, Options{}},
		{"cut between entries", good[:512+8192], errs.ImageCorrupt, Options{}},
		{"header damaged", flip(good, 512+8192+5), errs.ImageCorrupt, Options{}},
		{"gzip cut", gz(t, good)[:100], errs.ImageCorrupt, Options{}},
		{"gzip checksum", flip(gz(t, good), -6), errs.ImageCorrupt, Options{}},
		{"gzip of text", gz(t, []byte("hello")), errs.ImageUnsupported, Options{}},
		{"zstd cut", zst(t, good)[:50], errs.ImageCorrupt, Options{}},
		{"zstd damaged", flip(zst(t, good), 30), errs.ImageCorrupt, Options{}},
		{"bomb", gz(t, makeTar(t, plain("zeros", strings.Repeat("\x00", 1<<20)))), errs.BodyTooLarge, Options{MaxBytes: 1 << 16}},
		{"zstd bomb", zst(t, makeTar(t, plain("zeros", strings.Repeat("\x00", 1<<20)))), errs.BodyTooLarge, Options{MaxBytes: 1 << 16}},
		{"dot-dot", makeTar(t, plain("../etc/passwd", "x")), errs.ImageCorrupt, Options{}},
		{"hard link outside", makeTar(t, tarEntry{tar.Header{Name: "a", Typeflag: tar.TypeLink, Linkname: "../../etc/shadow"}, ""}), errs.ImageCorrupt, Options{}},
		{"forced docker", good, errs.ImageCorrupt, Options{Format: Docker}},
		{"forced oci", good, errs.ImageCorrupt, Options{Format: OCI}},
		{"forced dir", good, errs.ImageUnsupported, Options{Format: Dir}},
		{"no such format", good, errs.BadRequest, Options{Format: "zip"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, _, err := streamed(t, c.p, c.opts, layer.Options{})
			if !errors.Is(err, c.code) {
				t.Errorf("got %v, want %s", err, c.code)
			}
		})
	}
}

func flip(p []byte, at int) []byte {
	p = bytes.Clone(p)
	if at < 0 {
		at += len(p)
	}
	p[at] ^= 0x55
	return p
}

func TestBzip2(t *testing.T) {
	t.Parallel()
	// printf x > a && tar --format=v7 … | bzip2, as bytes: one file "a" of "x".
	cmd := exec.Command("bzip2", "-c")
	cmd.Stdin = bytes.NewReader(makeTar(t, plain("a", "x")))
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("bzip2: %v", err)
	}
	if _, res, err := streamed(t, out, Options{}, layer.Options{}); err != nil || res.Format != Tar {
		t.Fatal(res, err)
	}
}

func TestACancelledStreamEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err := imagetest.Build(t, layer.Options{}, func(b *layer.Builder) error {
		_, err := Stream(ctx, bytes.NewReader(makeTar(t, plain("a", "x"))), b, Options{})
		return err
	})
	if !errors.Is(err, errs.RequestCanceled) {
		t.Errorf("got %v", err)
	}
}

func TestParseACL(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"u::r--,g::---,o::---":                    "02000000" + "01000400ffffffff" + "04000000ffffffff" + "20000000ffffffff",
		"other::r--\nuser::rwx\ngroup:bin:r-x:2#": "02000000" + "01000700ffffffff" + "0800050002000000" + "20000400ffffffff",
		"": "malformed", "user:rwx": "malformed", "user::rwz": "malformed", "mask:1:rwx": "malformed", "group:bin:r-x": "it names users",
	} {
		p, err := parseACL(text)
		got := hex.EncodeToString(p)
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%q: got %s, want %s", text, got, want)
		}
	}
}

// FuzzStream feeds whatever to every parser of untrusted input; each must end
// with a typed error or a layer, never a panic or an untyped error.
func FuzzStream(f *testing.F) {
	good := makeTar(f, plain("a", "x"), tarEntry{tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "a"}, ""})
	for i := range byte(3) {
		f.Add(i, good)
		f.Add(i, gz(f, good))
		f.Add(i, zst(f, good))
		f.Add(i, dockerArchive(f, nil))
		f.Add(i, ociTar(f, nil))
	}
	spool := f.TempDir()
	f.Fuzz(func(t *testing.T, format byte, p []byte) {
		b := layer.NewBuilder(discard{}, layer.Options{MaxBytes: 1 << 20, MaxEntries: 1000})
		opts := Options{Format: []Format{Auto, Docker, OCI}[format%3], MaxBytes: 1 << 21, SpoolDir: spool}
		_, err := Stream(t.Context(), bytes.NewReader(p), b, opts)
		if err == nil {
			_, err = b.Finish(io.Discard)
		}
		if err != nil && errs.Of(err).Code == errs.InternalError {
			t.Errorf("%s: %v", opts.Format, err)
		}
	})
}

type discard struct{}

func (discard) Write(p []byte) (int, error)              { return len(p), nil }
func (discard) ReadAt(p []byte, _ int64) (int, error)    { return len(p), nil }
func (discard) WriteAt(p []byte, off int64) (int, error) { return len(p), nil }
func (discard) Truncate(int64) error                     { return nil }
