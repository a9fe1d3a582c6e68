package registry_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/registry"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/inmemory"
	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/sirupsen/logrus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	logrus.SetOutput(io.Discard)
	goleak.VerifyTestMain(m,
		// The reference registry leaves one behind for each that was run.
		goleak.IgnoreAnyFunction("github.com/docker/go-events.(*Broadcaster).run"),
	)
}

// registries are the real ones that the tests run in this process.
var registries = map[string]func(t testing.TB) http.Handler{
	"go-containerregistry": func(testing.TB) http.Handler { return ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0))) },
	"distribution": func(t testing.TB) http.Handler {
		cfg := &configuration.Configuration{Storage: configuration.Storage{"inmemory": configuration.Parameters{}, "maintenance": configuration.Parameters{"uploadpurging": map[any]any{"enabled": false}}}}
		cfg.Log.Level, cfg.Log.AccessLog.Disabled = "panic", true
		cfg.Catalog.MaxEntries = 100
		cfg.HTTP.Secret = "for tests"
		app := handlers.NewApp(context.Background(), cfg)
		t.Cleanup(func() {
			if err := app.Shutdown(); err != nil {
				t.Error(err)
			}
		})
		return app
	},
}

// server is a registry with a place for faults in front of it.
type server struct {
	*httptest.Server
	registry http.Handler
	mu       sync.Mutex
	fault    func(w http.ResponseWriter, r *http.Request, next http.Handler)
	seen     []string
}

func newServer(t testing.TB, h http.Handler) *server {
	t.Helper()
	s := &server{registry: h}
	s.Server = httptest.NewUnstartedServer(s)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.Start()
	t.Cleanup(s.Close)
	return s
}

func plainServer(t testing.TB) *server {
	return newServer(t, registries["go-containerregistry"](t))
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.seen = append(s.seen, r.Method+" "+r.URL.Path)
	fault := s.fault
	s.mu.Unlock()
	if fault != nil {
		fault(w, r, s.registry)
		return
	}
	s.registry.ServeHTTP(w, r)
}

func (s *server) inject(f func(w http.ResponseWriter, r *http.Request, next http.Handler)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault, s.seen = f, nil
}

func (s *server) count(prefix, part string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.seen {
		if strings.HasPrefix(l, prefix) && strings.Contains(l, part) {
			n++
		}
	}
	return n
}

func (s *server) host() string {
	return strings.TrimPrefix(strings.TrimPrefix(s.URL, "http://"), "https://")
}

func (s *server) ref(path string) string { return s.host() + "/" + path }

// put has another tool push to the registry, faults left out.
func (s *server) put(t testing.TB, path string, what remote.Taggable) {
	t.Helper()
	direct := httptest.NewServer(s.registry)
	defer direct.Close()
	ref, err := name.ParseReference(strings.TrimPrefix(direct.URL, "http://") + "/" + path)
	if err != nil {
		t.Fatal(err)
	}
	tr := http.DefaultTransport.(*http.Transport).Clone()
	defer tr.CloseIdleConnections()
	opts := []remote.Option{remote.WithTransport(tr)}
	switch x := what.(type) {
	case v1.Image:
		err = remote.Write(ref, x, opts...)
	case v1.ImageIndex:
		err = remote.WriteIndex(ref, x, opts...)
	default:
		err = remote.Put(ref, x, opts...)
	}
	if err != nil {
		t.Fatal(err)
	}
}

type entry struct {
	tar.Header
	content string
}

func file(name, content string) entry {
	return entry{tar.Header{Name: name, Mode: 0o644}, content}
}

func makeTar(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := e.Header
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		h.Size = int64(len(e.content))
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

func packed(t testing.TB, kind types.MediaType, p []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	switch kind {
	case types.OCILayerZStd:
		w, err := zstd.NewWriter(nil)
		if err != nil {
			t.Fatal(err)
		}
		return w.EncodeAll(p, nil)
	case types.OCIUncompressedLayer, types.DockerUncompressedLayer:
		return p
	}
	w := gzip.NewWriter(&buf)
	if _, err := w.Write(p); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// knownLayer is a stored layer with the digest of the tar in it.
type knownLayer struct {
	v1.Layer
	diff v1.Hash
}

func (l knownLayer) DiffID() (v1.Hash, error) { return l.diff, nil }

func makeLayer(t testing.TB, kind types.MediaType, p []byte) v1.Layer {
	t.Helper()
	h, _, err := v1.SHA256(bytes.NewReader(p))
	if err != nil {
		t.Fatal(err)
	}
	return knownLayer{static.NewLayer(packed(t, kind, p), kind), h}
}

func makeImage(t testing.TB, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1), layers...)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = "linux", "amd64"
	cfg.Config = v1.Config{
		Env: []string{"PATH=/bin", "A=b"}, Entrypoint: []string{"/init"}, Cmd: []string{"run"}, User: "1000:1000", WorkingDir: "/work",
		Labels: map[string]string{"k": "v"}, Volumes: map[string]struct{}{"/data": {}, "/cache": {}},
	}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

var wantConfig = image.Config{
	Env: []string{"PATH=/bin", "A=b"}, Entrypoint: []string{"/init"}, Cmd: []string{"run"}, User: "1000:1000", WorkDir: "/work",
	Labels: map[string]string{"k": "v"}, Volumes: []string{"/cache", "/data"},
}

// noise is content that does not compress.
func noise(seed uint64, n int) string {
	b := make([]byte, n)
	for i := range b {
		seed = seed*6364136223846793005 + 1442695040888963407
		b[i] = byte(seed >> 56)
	}
	return string(b)
}

// sizeable is an image of some layers and MiB, in which stacking matters.
func sizeable(t testing.TB) v1.Image {
	return makeImage(t,
		makeLayer(t, types.OCILayer, makeTar(t, file("a", noise(1, 700_000)), file("gone", "x"), file("d/old", "x"))),
		makeLayer(t, types.OCILayerZStd, makeTar(t, file(".wh.gone", ""), file("d/.wh..wh..opq", ""), file("d/new", noise(2, 1_500_000)))),
		makeLayer(t, types.OCIUncompressedLayer, makeTar(t, file("b", noise(3, 300_000)), entry{tar.Header{Name: "link", Typeflag: tar.TypeLink, Linkname: "b"}, ""})),
	)
}

var sizeableNames = []string{"./a", "./b", "./d", "./d/new", "./link"}

// quick are options that do not wait.
func quick(t testing.TB) registry.Options {
	return registry.Options{
		Platform: "linux/amd64", SpoolDir: t.TempDir(), IdleTimeout: 10 * time.Second,
		Sleep: func(ctx context.Context, _ time.Duration) error { return ctx.Err() },
		Rand:  func() float64 { return 0.5 },
	}
}

// pull pulls into a layer; spool files must be gone afterwards.
func pull(t testing.TB, ref string, opts registry.Options) (image.LayerFiles, registry.Result, error) {
	t.Helper()
	var res registry.Result
	l, _, err := imagetest.Build(t, layer.Options{}, func(b *layer.Builder) error {
		var err error
		res, err = registry.Pull(t.Context(), ref, b, opts)
		return err
	})
	if left, _ := os.ReadDir(opts.SpoolDir); len(left) > 0 {
		t.Errorf("spool files are left: %v", left)
	}
	return l, res, err
}

func names(t testing.TB, l image.LayerFiles) []string {
	t.Helper()
	var out []string
	for _, line := range imagetest.Mounted(t, l)[1:] {
		out = append(out, strings.Trim(strings.Fields(line)[0], `"`))
	}
	return out
}

func mustPull(t testing.TB, ref string, opts registry.Options) (image.LayerFiles, registry.Result) {
	t.Helper()
	l, res, err := pull(t, ref, opts)
	if err != nil {
		t.Fatal(err)
	}
	return l, res
}

// authFile writes a file as docker login does.
func authFile(t testing.TB, host, user, password string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "config.json")
	auth := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	if err := os.WriteFile(p, fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, host, auth), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}
