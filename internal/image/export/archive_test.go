package export_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/export"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/source"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"golang.org/x/sys/unix"
)

func small(t testing.TB, name, content string) *layer.Reader {
	t.Helper()
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		return b.File(t.Context(), name, layer.Attr{Perm: 0o644}, int64(len(content)), strings.NewReader(content))
	})
	return reader(t, l)
}

func TestArchivesAreReadByEveryone(t *testing.T) {
	t.Parallel()
	cfg := image.Config{
		Env: []string{"A=b"}, Entrypoint: []string{"/e"}, Cmd: []string{"c"}, User: "u", WorkDir: "/w",
		Labels: map[string]string{"k": "v"}, Volumes: []string{"/v1", "/v2"},
	}
	for _, opts := range []export.Options{{}, {Compression: export.Zstd}, {Compression: export.None, Format: export.OCI}, {Format: export.OCI}} {
		var buf, again bytes.Buffer
		for _, w := range []*bytes.Buffer{&buf, &again} {
			opts.SpoolDir = t.TempDir()
			same := small(t, "a", "x")
			img := export.Image{Config: cfg, Layers: export.Stacked(export.TarOptions{}, same, small(t, "b", "y"), same)}
			if err := export.Archive(t.Context(), w, img, "example.com/name:tag", opts); err != nil {
				t.Fatal(err)
			}
			if left, _ := os.ReadDir(opts.SpoolDir); len(left) > 0 {
				t.Errorf("left %v", left)
			}
		}
		if !bytes.Equal(buf.Bytes(), again.Bytes()) {
			t.Error("two archives of the same image differ")
		}
		for _, format := range []source.Format{source.Docker, source.OCI, source.Auto} {
			for _, ref := range []string{"", "example.com/name:tag"} {
				l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
					res, err := source.Stream(t.Context(), bytes.NewReader(buf.Bytes()), b, source.Options{Format: format, Ref: ref, SpoolDir: t.TempDir()})
					if !reflect.DeepEqual(res.Config, cfg) {
						t.Errorf("%+v", res.Config)
					}
					return err
				})
				if n := len(imagetest.Mounted(t, l)); n != 3 {
					t.Errorf("%d entries", n)
				}
			}
		}
		if opts.Compression != export.Gzip {
			continue // the other tool knows no other
		}
		p := filepath.Join(t.TempDir(), "image.tar")
		if err := os.WriteFile(p, buf.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		tag, err := name.NewTag("example.com/name:tag")
		if err != nil {
			t.Fatal(err)
		}
		img, err := tarball.ImageFromPath(p, &tag)
		if err != nil {
			t.Fatal(err)
		}
		if err := validate.Image(img); err != nil {
			t.Error(err)
		}
		tags, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(p) })
		if err != nil || !slices.Equal(tags[0].RepoTags, []string{"example.com/name:tag"}) {
			t.Errorf("%+v, %v", tags, err)
		}
	}
}

func TestFullDisksAndBadOptions(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "full")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	img := export.Image{Layers: export.Stacked(export.TarOptions{}, small(t, "a", strings.Repeat("x", 1<<20)))}
	err := export.Archive(t.Context(), &bytes.Buffer{}, img, "", export.Options{Compression: export.None, SpoolDir: dir})
	if !errors.Is(err, errs.DiskFull) {
		t.Error(err)
	}
	for _, o := range []export.Options{{Compression: "lzma"}, {Format: "x"}, {Format: export.Docker, Compression: export.Zstd}} {
		if err := export.Archive(t.Context(), &bytes.Buffer{}, export.Image{}, "", o); !errors.Is(err, errs.BadRequest) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if err := export.Archive(t.Context(), &bytes.Buffer{}, export.Image{Platform: "linux"}, "", export.Options{}); !errors.Is(err, errs.BadRequest) {
		t.Error(err)
	}
	if err := export.Archive(t.Context(), &limited{1000}, img, "", export.Options{SpoolDir: t.TempDir()}); !errors.Is(err, errLimit) {
		t.Error(err)
	}
}
