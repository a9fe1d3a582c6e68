package source

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// layersOf is an image in which every rule of stacking matters.
func layersOf(t testing.TB) [][]byte {
	return [][]byte{
		makeTar(t, plain("keep", "base"), plain("gone", "x"), plain("d/a", "a"), plain("d/b", "b"), plain("was-dir/x", "x"),
			tarEntry{tar.Header{Name: "lib", Typeflag: tar.TypeSymlink, Linkname: "usr/lib"}, ""}, plain("usr/lib/so", "so"), plain("linked", strings.Repeat("l", 5000))),
		makeTar(t, plain(".wh.gone", ""), plain("d/.wh..wh..opq", ""), plain("d/c", "c"), plain("was-dir", "file"), plain("lib/more", "more"),
			tarEntry{tar.Header{Name: "other-name", Typeflag: tar.TypeLink, Linkname: "linked"}, ""}),
		makeTar(t, plain("keep", "top"), plain(".wh.linked", "")),
	}
}

const stacked = `d d/c keep lib other-name usr usr/lib usr/lib/more usr/lib/so was-dir`

func testImage(t testing.TB) v1.Image {
	t.Helper()
	img := v1.Image(empty.Image)
	for _, p := range layersOf(t) {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(p)), nil })
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = "linux", "amd64"
	cfg.Config = v1.Config{
		Env: []string{"A=b"}, Entrypoint: []string{"/e"}, Cmd: []string{"c"}, User: "1:2", WorkingDir: "/w",
		Labels: map[string]string{"k": "v"}, Volumes: map[string]struct{}{"/v2": {}, "/v1": {}},
	}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

var wantConfig = image.Config{
	Env: []string{"A=b"}, Entrypoint: []string{"/e"}, Cmd: []string{"c"}, User: "1:2", WorkDir: "/w",
	Labels: map[string]string{"k": "v"}, Volumes: []string{"/v1", "/v2"},
}

// dockerArchive is what docker save writes; change edits its members.
func dockerArchive(t testing.TB, change func(map[string][]byte)) []byte {
	t.Helper()
	var buf bytes.Buffer
	tag, err := name.NewTag("example.com/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.Write(tag, testImage(t), &buf); err != nil {
		t.Fatal(err)
	}
	return changed2(t, buf.Bytes(), change)
}

func ociDir(t testing.TB, dir string) {
	t.Helper()
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	img := testImage(t)
	if err := p.AppendImage(img, layout.WithAnnotations(map[string]string{annRefName: "v1"})); err != nil {
		t.Fatal(err)
	}
}

// ociTar is an OCI layout as a tar; change edits its members.
func ociTar(t testing.TB, change func(map[string][]byte)) []byte {
	t.Helper()
	dir := t.TempDir()
	ociDir(t, dir)
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return changed2(t, buf.Bytes(), change)
}

// changed2 edits the members of a tar; removed ones are gone, new ones come last.
func changed2(t testing.TB, p []byte, change func(map[string][]byte)) []byte {
	t.Helper()
	if change == nil {
		return p
	}
	members := map[string][]byte{}
	var order []string
	for tr := tar.NewReader(bytes.NewReader(p)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if members[h.Name], err = io.ReadAll(tr); err != nil {
			t.Fatal(err)
		}
		order = append(order, h.Name)
	}
	change(members)
	var entries []tarEntry
	for _, n := range order {
		if c, ok := members[n]; ok {
			entries = append(entries, plain(n, string(c)))
			delete(members, n)
		}
	}
	for n, c := range members {
		entries = append(entries, plain(n, string(c)))
	}
	return makeTar(t, entries...)
}

func names(lines []string) string {
	var out []string
	for _, l := range lines[1:] {
		out = append(out, strings.TrimPrefix(strings.Trim(strings.Fields(l)[0], `"`), "./"))
	}
	return strings.Join(out, " ")
}

func checkStacked(t *testing.T, l image.LayerFiles, res Result, format Format) {
	t.Helper()
	if res.Format != format {
		t.Errorf("read as %q", res.Format)
	}
	if got := names(imagetest.Mounted(t, l)); got != stacked {
		t.Errorf("got  %s\nwant %s", got, stacked)
	}
	if got, want := fmt.Sprintf("%+v", res.Config), fmt.Sprintf("%+v", wantConfig); got != want {
		t.Errorf("config %s, want %s", got, want)
	}
}

func TestImagesAreFlattened(t *testing.T) {
	t.Parallel()
	docker, oci := dockerArchive(t, nil), ociTar(t, nil)
	blobs := func(m map[string][]byte) { // what newer engines write: manifest.json naming blobs
		var list []dockerImage
		if err := json.Unmarshal(m[dockerManifest], &list); err != nil {
			t.Fatal(err)
		}
		for i, n := range list[0].Layers {
			p := m[n]
			delete(m, n)
			h, _, err := v1.SHA256(bytes.NewReader(p))
			if err != nil {
				t.Fatal(err)
			}
			list[0].Layers[i] = "blobs/sha256/" + h.Hex
			m[list[0].Layers[i]] = p
		}
		p, err := json.Marshal(list)
		if err != nil {
			t.Fatal(err)
		}
		m[dockerManifest] = p
	}
	for _, c := range []struct {
		name   string
		p      []byte
		format Format
		opts   Options
	}{
		{"docker", docker, Docker, Options{}},
		{"docker, gzip", gz(t, docker), Docker, Options{}},
		{"docker, forced and named", docker, Docker, Options{Format: Docker, Ref: "example.com/app:v1"}},
		{"docker with blobs", dockerArchive(t, blobs), Docker, Options{}},
		{"oci", oci, OCI, Options{}},
		{"oci, zstd, named", zst(t, oci), OCI, Options{Ref: "v1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l, res, err := streamed(t, c.p, c.opts, layer.Options{})
			if err != nil {
				t.Fatal(err)
			}
			checkStacked(t, l, res, c.format)
			if c.name != "docker" {
				return
			}
			file := filepath.Join(t.TempDir(), "image.tar")
			if err := os.WriteFile(file, c.p, 0o600); err != nil {
				t.Fatal(err)
			}
			l, _ = imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
				var err error
				res, err = Path(t.Context(), file, b, Options{})
				return err
			})
			checkStacked(t, l, res, Docker)
		})
	}
	t.Run("oci directory", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		ociDir(t, dir)
		var res Result
		l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
			var err error
			res, err = Path(t.Context(), dir, b, Options{})
			return err
		})
		checkStacked(t, l, res, OCI)
	})
}

func TestBadImagesAreRefused(t *testing.T) {
	t.Parallel()
	edit := func(f func(t *testing.T, m map[string][]byte)) func(*testing.T) func(map[string][]byte) {
		return func(t *testing.T) func(map[string][]byte) { return func(m map[string][]byte) { f(t, m) } }
	}
	largest := func(m map[string][]byte, prefix string) string {
		var best string
		for n, p := range m {
			if strings.HasPrefix(n, prefix) && (best == "" || len(p) > len(m[best])) {
				best = n
			}
		}
		return best
	}
	replace := func(name, old, new string) func(t *testing.T, m map[string][]byte) {
		return func(t *testing.T, m map[string][]byte) {
			if !bytes.Contains(m[name], []byte(old)) {
				t.Fatalf("%s has no %s: %s", name, old, m[name])
			}
			m[name] = bytes.Replace(m[name], []byte(old), []byte(new), 1)
		}
	}
	for _, c := range []struct {
		name string
		oci  bool
		edit func(*testing.T) func(map[string][]byte)
		code errs.Code
		opts Options
	}{
		{"oci: a blob's byte", true, edit(func(t *testing.T, m map[string][]byte) {
			n := largest(m, "blobs/")
			m[n] = flip(m[n], len(m[n])/2)
		}), errs.ImageCorrupt, Options{}},
		{"oci: a blob's end", true, edit(func(t *testing.T, m map[string][]byte) { n := largest(m, "blobs/"); m[n] = m[n][:len(m[n])-1] }), errs.ImageCorrupt, Options{}},
		{"oci: a blob missing", true, edit(func(t *testing.T, m map[string][]byte) { delete(m, largest(m, "blobs/")) }), errs.ImageCorrupt, Options{}},
		{"oci: index cut", true, edit(func(t *testing.T, m map[string][]byte) { m[ociIndex] = m[ociIndex][:20] }), errs.ImageCorrupt, Options{}},
		{"oci: digest with a path", true, edit(replace(ociIndex, `"sha256:`, `"sha256:../../../`)), errs.ImageCorrupt, Options{}},
		{"oci: other platform", true, edit(replace(ociIndex, `"annotations"`, `"platform":{"os":"windows","architecture":"amd64"},"annotations"`)), errs.ImageUnsupported, Options{}},
		{"oci: unknown manifest", true, edit(replace(ociIndex, `application/vnd.docker.distribution.manifest.v2+json`, `application/x-other`)), errs.ImageUnsupported, Options{}},
		{"oci: no such ref", true, nil, errs.ImageUnsupported, Options{Ref: "v9"}},
		{"oci: for another CPU", true, nil, errs.ImageUnsupported, Options{Platform: "linux/arm64"}},
		{"docker: a layer's byte", false, edit(func(t *testing.T, m map[string][]byte) {
			for n := range m {
				if strings.HasSuffix(n, ".tar.gz") {
					m[n] = flip(m[n], len(m[n])/2)
				}
			}
		}), errs.ImageCorrupt, Options{}},
		{"docker: a layer missing", false, edit(func(t *testing.T, m map[string][]byte) {
			for n := range m {
				if strings.HasSuffix(n, ".tar.gz") {
					delete(m, n)
				}
			}
		}), errs.ImageCorrupt, Options{}},
		{"docker: layers swapped", false, edit(func(t *testing.T, m map[string][]byte) {
			var list []dockerImage
			if err := json.Unmarshal(m[dockerManifest], &list); err != nil {
				t.Fatal(err)
			}
			l := list[0].Layers
			l[0], l[1] = l[1], l[0]
			m[dockerManifest], _ = json.Marshal(list)
		}), errs.ImageCorrupt, Options{}},
		{"docker: fewer layers than its config", false, edit(func(t *testing.T, m map[string][]byte) {
			var list []dockerImage
			if err := json.Unmarshal(m[dockerManifest], &list); err != nil {
				t.Fatal(err)
			}
			list[0].Layers = list[0].Layers[:1]
			m[dockerManifest], _ = json.Marshal(list)
		}), errs.ImageCorrupt, Options{}},
		{"docker: two images, none named", false, edit(func(t *testing.T, m map[string][]byte) {
			m[dockerManifest] = []byte(`[` + strings.Trim(string(m[dockerManifest]), "[]\n") + `,` + strings.Trim(string(m[dockerManifest]), "[]\n") + `]`)
		}), errs.BadRequest, Options{}},
		{"docker: no such name", false, nil, errs.BadRequest, Options{Ref: "other"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var change func(map[string][]byte)
			if c.edit != nil {
				change = c.edit(t)
			}
			p := dockerArchive
			if c.oci {
				p = ociTar
			}
			_, _, err := streamed(t, p(t, change), c.opts, layer.Options{})
			if !errors.Is(err, c.code) {
				t.Errorf("got %v, want %s", err, c.code)
			}
		})
	}
}

func TestLayersOfOtherMediaTypesAreUnsupported(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	img := testImage(t)
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layersOf(t)[0])), nil },
		tarball.WithMediaType("application/vnd.oci.image.layer.v1.tar+gzip+encrypted"))
	if err != nil {
		t.Fatal(err)
	}
	if img, err = mutate.AppendLayers(img, l); err != nil {
		t.Fatal(err)
	}
	if err := p.AppendImage(img); err != nil {
		t.Fatal(err)
	}
	_, _, err = imagetest.Build(t, layer.Options{}, func(b *layer.Builder) error {
		_, err := Path(t.Context(), dir, b, Options{})
		return err
	})
	if !errors.Is(err, errs.ImageUnsupported) || !strings.Contains(err.Error(), "encrypted") {
		t.Errorf("got %v", err)
	}
}

func TestOCIDirectoryLinksDoNotLeadOut(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ociDir(t, dir)
	err := filepath.WalkDir(filepath.Join(dir, "blobs"), func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		out := filepath.Join(t.TempDir(), d.Name())
		if err := os.Rename(p, out); err != nil {
			return err
		}
		return os.Symlink(out, p)
	})
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = imagetest.Build(t, layer.Options{}, func(b *layer.Builder) error {
		_, err := Path(t.Context(), dir, b, Options{})
		return err
	})
	if !errors.Is(err, errs.ImageCorrupt) {
		t.Errorf("got %v", err)
	}
}
