package registry_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/registry"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"
)

func TestPullOfWhatOtherToolsPush(t *testing.T) {
	t.Parallel()
	for reg, handler := range registries {
		t.Run(reg, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, handler(t))
			img := sizeable(t)
			s.put(t, "some/image:1.2", img)
			var mu sync.Mutex
			last := map[string]registry.Progress{}
			opts := quick(t)
			opts.Progress = func(p registry.Progress) {
				mu.Lock()
				defer mu.Unlock()
				if p.Done < last[p.Phase].Done {
					t.Errorf("%s went back", p.Phase)
				}
				last[p.Phase] = p
			}
			l, res := mustPull(t, s.ref("some/image:1.2"), opts)
			if got := names(t, l); !slices.Equal(got, sizeableNames) {
				t.Errorf("got %v", got)
			}
			if !reflect.DeepEqual(res.Config, wantConfig) {
				t.Errorf("config %+v", res.Config)
			}
			digest, err := img.Digest()
			if err != nil {
				t.Fatal(err)
			}
			if res.Digest != digest.String() || res.Manifest != digest.String() || res.Platform != "linux/amd64" || res.Ref != s.ref("some/image:1.2") {
				t.Errorf("%+v", res)
			}
			for _, phase := range []string{registry.PhaseDownload, registry.PhaseConvert} {
				if p := last[phase]; p.Done != p.Total || p.Done != res.Downloaded {
					t.Errorf("%+v, downloaded %d", p, res.Downloaded)
				}
			}
			if _, ok := last[registry.PhaseResolve]; !ok {
				t.Error("no phase resolve")
			}
			// By its digest it is the same.
			clear(last)
			again, res2 := mustPull(t, s.ref("some/image@"+digest.String()), opts)
			if d := imagetest.Diff(imagetest.Mounted(t, l), imagetest.Mounted(t, again)); d != "" || res2.Digest != res.Digest {
				t.Errorf("%s %+v", d, res2)
			}
		})
	}
}

func index(t testing.TB, platforms ...string) v1.ImageIndex {
	t.Helper()
	var idx v1.ImageIndex = empty.Index
	for _, p := range platforms {
		plat, err := v1.ParsePlatform(p)
		if err != nil {
			t.Fatal(err)
		}
		img := makeImage(t, makeLayer(t, types.OCILayer, makeTar(t, file(strings.ReplaceAll(p, "/", "-"), p))))
		cfg, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		cfg = cfg.DeepCopy()
		cfg.OS, cfg.Architecture, cfg.Variant = plat.OS, plat.Architecture, plat.Variant
		if img, err = mutate.ConfigFile(img, cfg); err != nil {
			t.Fatal(err)
		}
		idx = mutate.AppendManifests(idx, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: plat}})
	}
	return idx
}

func TestPlatformIsChosenFromAnIndex(t *testing.T) {
	t.Parallel()
	for reg, handler := range registries {
		t.Run(reg, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, handler(t))
			idx := index(t, "linux/arm64/v8", "windows/amd64", "linux/amd64")
			s.put(t, "multi", idx)
			s.put(t, "nested", mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: idx}))
			for _, ref := range []string{"multi", "nested"} {
				for want, file := range map[string]string{"linux/amd64": "./linux-amd64", "linux/arm64": "./linux-arm64-v8", "linux/arm64/v8": "./linux-arm64-v8"} {
					opts := quick(t)
					opts.Platform = want
					l, res := mustPull(t, s.ref(ref), opts)
					if got := names(t, l); !slices.Equal(got, []string{file}) || res.Digest == res.Manifest {
						t.Errorf("%s %s: %v %+v", ref, want, got, res)
					}
				}
				opts := quick(t)
				opts.Platform = "linux/riscv64"
				_, _, err := pull(t, s.ref(ref), opts)
				for _, part := range []string{"linux/riscv64", "linux/amd64", "linux/arm64/v8", "windows/amd64"} {
					if !errors.Is(err, errs.ImageUnsupported) || !strings.Contains(err.Error(), part) {
						t.Errorf("%s: %v", ref, err)
						break
					}
				}
			}
		})
	}
}

// answer has the registry give these bytes for every manifest.
func answer(media, body string) func(http.ResponseWriter, *http.Request, http.Handler) {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			next.ServeHTTP(w, r)
			return
		}
		if media != "" {
			w.Header().Set("Content-Type", media)
		}
		fmt.Fprint(w, body)
	}
}

func TestWhatIsNoPullableImageIsRefused(t *testing.T) {
	t.Parallel()
	const config = `"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a","size":2}`
	const hash = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
	layerOf := func(media string) string {
		return `{"schemaVersion":2,` + config + `,"layers":[{"mediaType":"` + media + `","digest":"` + hash + `","size":2}]}`
	}
	for _, c := range []struct {
		name, media, body string
		code              errs.Code
		says              string
	}{
		{"schema 1", "application/vnd.docker.distribution.manifest.v1+prettyjws", `{"schemaVersion":1}`, errs.ImageUnsupported, "schema 1"},
		{"schema 1 without a type", "", `{"schemaVersion":1,"fsLayers":[]}`, errs.ImageUnsupported, "schema 1"},
		{"foreign layer", string(types.OCIManifestSchema1), layerOf(string(types.DockerForeignLayer)), errs.ImageUnsupported, "foreign"},
		{"restricted layer", string(types.OCIManifestSchema1), layerOf(string(types.OCIRestrictedLayer)), errs.ImageUnsupported, "foreign"},
		{"unknown layer", string(types.OCIManifestSchema1), layerOf("application/x-wasm"), errs.ImageUnsupported, "x-wasm"},
		{"no image", string(types.OCIManifestSchema1), `{"schemaVersion":2,"config":{"mediaType":"application/vnd.helm.config","digest":"` + hash + `","size":2},"layers":[]}`, errs.ImageUnsupported, "helm"},
		{"another document", "application/json", `{"hello":"world"}`, errs.ImageUnsupported, "not an image"},
		{"web page", "text/html", `<html>log in</html>`, errs.ImageCorrupt, "not JSON"},
		{"truncated manifest", string(types.OCIManifestSchema1), layerOf(string(types.OCILayer))[:150], errs.ImageCorrupt, "manifest"},
		{"truncated index", string(types.OCIImageIndex), `{"schemaVersion":2,"manifests":[{"mediaType":`, errs.ImageCorrupt, "index"},
		{"empty", string(types.OCIManifestSchema1), ``, errs.ImageCorrupt, ""},
		{"huge manifest", string(types.OCIManifestSchema1), `{"a":"` + strings.Repeat("x", 5<<20) + `"}`, errs.ImageUnsupported, "more than"},
		{"huge config", string(types.OCIManifestSchema1), strings.Replace(layerOf(string(types.OCILayer)), `"size":2}`, `"size":999999999999}`, 1), errs.ImageUnsupported, "config"},
		{"negative size", string(types.OCIManifestSchema1), strings.Replace(layerOf(string(types.OCILayer)), `"size":2}]`, `"size":-2}]`, 1), errs.ImageCorrupt, "-2"},
		{"too large", string(types.OCIManifestSchema1), strings.Replace(layerOf(string(types.OCILayer)), `"size":2}]`, `"size":9000000000000000000}]`, 1), errs.ImageUnsupported, "bytes"},
		{"index in itself", string(types.OCIImageIndex), `{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.index.v1+json","digest":"` + hash + `","size":190}]}`, errs.ImageCorrupt, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := plainServer(t)
			s.inject(answer(c.media, c.body))
			_, _, err := pull(t, s.ref("x:1"), quick(t))
			if !errors.Is(err, c.code) || !strings.Contains(fmt.Sprint(err), c.says) {
				t.Errorf("got %v", err)
			}
			if e := errs.Of(err); e.Phase != "image.registry.resolve" || e.Infra {
				t.Errorf("phase %q, infra %v", e.Phase, e.Infra)
			}
		})
	}
}

func TestMissingThingsAreNamed(t *testing.T) {
	t.Parallel()
	for reg, handler := range registries {
		t.Run(reg, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, handler(t))
			img := sizeable(t)
			s.put(t, "have/this:1.0", img)
			for ref, want := range map[string]string{
				"have/this:2.0": "has no tag 2.0; it has 1.0",
				"have/that:1.0": "has no repository have/that",
				"have/this@sha256:" + strings.Repeat("0", 64): "has no manifest sha256:0000",
			} {
				_, _, err := pull(t, s.ref(ref), quick(t))
				if !errors.Is(err, errs.RegistryNotFound) || !strings.Contains(err.Error(), want) {
					t.Errorf("%s: %v", ref, err)
				}
			}
			s.inject(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				m, _ := img.Manifest()
				if strings.Contains(r.URL.Path, m.Layers[1].Digest.Hex) {
					http.NotFound(w, r)
					return
				}
				next.ServeHTTP(w, r)
			})
			_, _, err := pull(t, s.ref("have/this:1.0"), quick(t))
			if !errors.Is(err, errs.RegistryNotFound) || !strings.Contains(err.Error(), "layer 2 of 3") || errs.Of(err).Phase != "image.registry.download" {
				t.Error(err)
			}
		})
	}
}

func TestBadReferencesAndOptions(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	for _, ref := range []string{"", "UPPER/case", "a:b:c", "x@sha256:12", strings.Repeat("x", 300)} {
		if _, _, err := pull(t, s.host()+"/"+ref, quick(t)); !errors.Is(err, errs.BadRequest) {
			t.Errorf("%q: %v", ref, err)
		}
	}
	opts := quick(t)
	opts.CAFile = filepath.Join(t.TempDir(), "ca")
	if _, _, err := pull(t, s.ref("x"), opts); !errors.Is(err, errs.BadRequest) {
		t.Error(err)
	}
	if err := os.WriteFile(opts.CAFile, []byte("no"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := pull(t, s.ref("x"), opts); !errors.Is(err, errs.BadRequest) || !strings.Contains(err.Error(), "no certificate") {
		t.Error(err)
	}
	opts = quick(t)
	opts.Auth = registry.Auth{Username: "a", Token: "b"}
	if _, _, err := pull(t, s.ref("x"), opts); !errors.Is(err, errs.BadRequest) {
		t.Error(err)
	}
}

// tlsServer is a registry over HTTPS with a certificate of its own authority.
func tlsServer(t testing.TB, h http.Handler) (s *httptest.Server, ca string) {
	t.Helper()
	s = httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	ca = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	return s, ca
}

func TestHTTPS(t *testing.T) {
	t.Parallel()
	back := plainServer(t)
	back.put(t, "x:1", sizeable(t))
	https, ca := tlsServer(t, back)
	ref := strings.TrimPrefix(https.URL, "https://") + "/x:1"
	opts := quick(t)
	opts.CAFile = ca
	mustPull(t, ref, opts)
	opts.CAFile, opts.SkipVerify = "", true
	mustPull(t, ref, opts)
	opts.SkipVerify = false
	_, _, err := pull(t, ref, opts)
	if !errors.Is(err, errs.RegistryDown) || !strings.Contains(err.Error(), "CA") || errs.Of(err).Retryable {
		t.Error(err)
	}
}

// A registry over HTTPS that leads elsewhere over HTTP is not followed, and
// credentials do not go to where layers are redirected.
func TestRedirects(t *testing.T) {
	t.Parallel()
	back := plainServer(t)
	back.put(t, "x:1", sizeable(t))
	var mu sync.Mutex
	leaked := ""
	cdn := func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		leaked += r.Header.Get("Authorization")
		mu.Unlock()
		back.ServeHTTP(w, r)
	}
	plainCDN := httptest.NewServer(http.HandlerFunc(cdn))
	t.Cleanup(plainCDN.Close)
	front := func(to string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if user, _, _ := r.BasicAuth(); user != "me" {
				w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			if strings.Contains(r.URL.Path, "/blobs/") {
				http.Redirect(w, r, to+r.URL.Path+"?signature=secret", http.StatusTemporaryRedirect)
				return
			}
			back.ServeHTTP(w, r)
		}
	}
	opts := quick(t)
	opts.Auth = registry.Auth{Username: "me", Password: "secret"}
	plain := httptest.NewServer(front(plainCDN.URL))
	t.Cleanup(plain.Close)
	mustPull(t, strings.TrimPrefix(plain.URL, "http://")+"/x:1", opts)
	mu.Lock()
	defer mu.Unlock()
	if leaked != "" {
		t.Errorf("credentials %q went to where layers are", leaked)
	}
	https, ca := tlsServer(t, front(plainCDN.URL))
	opts.CAFile, opts.Dial = ca, dialTo(https.URL)
	if _, _, err := pull(t, "example.com/x:1", opts); !errors.Is(err, errs.BadRequest) || !strings.Contains(err.Error(), "plain HTTP") || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
}

// dialTo has every name be that server's.
func dialTo(u string) func(context.Context, string, string) (net.Conn, error) {
	_, addr, _ := strings.Cut(u, "://")
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
}

// Only what is asked for is told to anyone over plain HTTP, private addresses or not.
func TestPlainHTTPIsAskedFor(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	s.put(t, "x:1", sizeable(t))
	for _, host := range []string{"10.1.2.3", "192.168.1.1:5000", "registry.local", "example.com:80"} {
		opts := quick(t)
		opts.Dial = dialTo(s.URL)
		opts.Auth = registry.Auth{Username: "me", Password: "secret"}
		s.inject(nil)
		_, _, err := pull(t, host+"/x:1", opts)
		if !errors.Is(err, errs.RegistryDown) || !strings.Contains(err.Error(), "plain HTTP has to be allowed") || errs.Of(err).Retryable {
			t.Errorf("%s: %v", host, err)
		}
		if n := s.count("", ""); n != 0 {
			t.Errorf("%s: %d requests over plain HTTP", host, n)
		}
		opts.PlainHTTP = true
		mustPull(t, host+"/x:1", opts)
	}
}

func TestRangesAreNotNeeded(t *testing.T) {
	t.Parallel()
	testCuts(t, func(r *http.Request) { r.Header.Del("Range") })
}

func TestConnectionsCutAtRandomPlaces(t *testing.T) {
	t.Parallel()
	testCuts(t, func(*http.Request) {})
}

func testCuts(t *testing.T, edit func(*http.Request)) {
	for reg, handler := range registries {
		t.Run(reg, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, handler(t))
			s.put(t, "x:1", sizeable(t))
			want, _ := mustPull(t, s.ref("x:1"), quick(t))
			wantLines := imagetest.Mounted(t, want)
			for seed := range uint64(8) {
				cuts := &cutter{seed: seed, left: 12, edit: edit}
				s.inject(cuts.serve)
				opts := quick(t)
				opts.Retry.Attempts = 13
				l, _, err := pull(t, s.ref("x:1"), opts)
				if err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				if d := imagetest.Diff(wantLines, imagetest.Mounted(t, l)); d != "" {
					t.Errorf("seed %d: %s", seed, d)
				}
				if cuts.left == 12 {
					t.Errorf("seed %d: nothing was cut", seed)
				}
			}
			// One that always breaks is given up.
			s.inject((&cutter{seed: 1, left: 1 << 30, edit: edit, always: true}).serve)
			_, _, err := pull(t, s.ref("x:1"), quick(t))
			if !errors.Is(err, errs.RegistryDown) || !errs.Of(err).Retryable || !strings.Contains(err.Error(), "broke off") {
				t.Error(err)
			}
		})
	}
}

// cutter breaks answers off after some of their bytes.
type cutter struct {
	mu     sync.Mutex
	seed   uint64
	left   int
	edit   func(*http.Request)
	always bool
}

func (c *cutter) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	c.edit(r)
	if r.URL.Path == "/v2/" {
		next.ServeHTTP(w, r)
		return
	}
	c.mu.Lock()
	c.seed = c.seed*6364136223846793005 + 1442695040888963407
	at, cut := int(c.seed>>40), c.left > 0 && (c.always || c.seed>>33&3 != 0)
	if cut {
		c.left--
	}
	c.mu.Unlock()
	if !cut {
		next.ServeHTTP(w, r)
		return
	}
	rec := httptest.NewRecorder()
	next.ServeHTTP(rec, r)
	body := rec.Body.Bytes()
	for k, v := range rec.Header() {
		w.Header()[k] = v
	}
	w.Header().Set("Content-Length", fmt.Sprint(len(body)))
	w.WriteHeader(rec.Code)
	n := 0
	if len(body) > 0 && !c.always {
		n = at % len(body)
	}
	w.Write(body[:n])
	w.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}

func TestWrongBytesAreNoticed(t *testing.T) {
	t.Parallel()
	img := sizeable(t)
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ ref, part, phase string }{
		"manifest by tag":    {"x:1", "/manifests/", "resolve"},
		"manifest by digest": {"x@" + digest.String(), "/manifests/", "resolve"},
		"config":             {"x:1", m.Config.Digest.Hex, "resolve"},
		"gzip layer":         {"x:1", m.Layers[0].Digest.Hex, "convert"},
		"zstd layer":         {"x:1", m.Layers[1].Digest.Hex, "convert"},
		"plain layer":        {"x:1", m.Layers[2].Digest.Hex, "convert"},
	} {
		for _, at := range []int{0, 100, -1} {
			t.Run(fmt.Sprint(name, at), func(t *testing.T) {
				t.Parallel()
				s := plainServer(t)
				s.put(t, "x:1", img)
				s.inject(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
					if !strings.Contains(r.URL.Path, c.part) {
						next.ServeHTTP(w, r)
						return
					}
					rec := httptest.NewRecorder()
					next.ServeHTTP(rec, r)
					p := bytes.Clone(rec.Body.Bytes())
					i := at
					if i < 0 {
						i = len(p) - 1
					}
					p[i] ^= 4
					for k, v := range rec.Header() {
						w.Header()[k] = v
					}
					w.Write(p)
				})
				_, _, err := pull(t, s.ref(c.ref), quick(t))
				if !errors.Is(err, errs.ImageCorrupt) || !strings.Contains(err.Error(), "digest") {
					t.Errorf("got %v", err)
				}
				if e := errs.Of(err); e.Phase != "image.registry."+c.phase {
					t.Errorf("phase %s", e.Phase)
				}
			})
		}
	}
}

func TestLayersOfOtherSizesAreNoticed(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(w http.ResponseWriter, p []byte){
		"longer":         func(w http.ResponseWriter, p []byte) { w.Write(append(p, 'x')) },
		"longer, unsaid": func(w http.ResponseWriter, p []byte) { w.Write(p); w.(http.Flusher).Flush(); w.Write([]byte("x")) },
		"shorter, said": func(w http.ResponseWriter, p []byte) {
			w.Header().Set("Content-Length", fmt.Sprint(len(p)-1))
			w.Write(p[:len(p)-1])
		},
		"shorter, unsaid":  func(w http.ResponseWriter, p []byte) { w.Write(p[:10]); w.(http.Flusher).Flush() },
		"the same, unsaid": func(w http.ResponseWriter, p []byte) { w.Write(p[:10]); w.(http.Flusher).Flush(); w.Write(p[10:]) },
		"a range not wanted": func(w http.ResponseWriter, p []byte) {
			w.Header().Set("Content-Range", "bytes 5-9/100")
			w.WriteHeader(206)
			w.Write(p)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := plainServer(t)
			s.put(t, "x:1", makeImage(t, makeLayer(t, types.OCILayer, makeTar(t, file("a", noise(1, 5000))))))
			s.inject(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				rec := httptest.NewRecorder()
				next.ServeHTTP(rec, r)
				if !strings.Contains(r.URL.Path, "/blobs/") || rec.Body.Len() < 4000 {
					for k, v := range rec.Header() {
						w.Header()[k] = v
					}
					w.WriteHeader(rec.Code)
					w.Write(rec.Body.Bytes())
					return
				}
				edit(w, bytes.Clone(rec.Body.Bytes()))
			})
			_, _, err := pull(t, s.ref("x:1"), quick(t))
			switch e := errs.Of(err); {
			case name == "the same, unsaid":
				if err != nil {
					t.Error(err)
				}
			case e == nil || e.Code != errs.ImageCorrupt && e.Code != errs.RegistryDown || e.Phase != "image.registry.download":
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestFullSpoolDirectory(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "full")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s := plainServer(t)
	s.put(t, "x:1", sizeable(t))
	opts := quick(t)
	opts.SpoolDir = dir
	if _, _, err := pull(t, s.ref("x:1"), opts); !errors.Is(err, errs.DiskFull) || errs.Of(err).Phase != "image.registry.download" {
		t.Error(err)
	}
}

func TestSpoolIsBounded(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	var layers []v1.Layer
	for i := range uint64(5) {
		layers = append(layers, makeLayer(t, types.OCILayer, makeTar(t, file(fmt.Sprint(i), noise(i+1, 6<<20)))))
	}
	s.put(t, "x:1", makeImage(t, layers...))
	opts := quick(t)
	opts.SpoolMax, opts.Parallel = 4<<20, 5
	_, res := mustPull(t, s.ref("x:1"), opts)
	if res.SpoolPeak > 4<<20 || res.Downloaded < 30<<20 {
		t.Errorf("%+v", res)
	}
}

func TestTheSameLayerTwice(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	l := makeLayer(t, types.OCILayer, makeTar(t, file("a", "1")))
	s.put(t, "x:1", makeImage(t, l, makeLayer(t, types.OCILayer, makeTar(t, file("a", "22"), file("b", ""))), l))
	got, _ := mustPull(t, s.ref("x:1"), quick(t))
	if all := strings.Join(imagetest.Mounted(t, got), "\n"); !strings.Contains(all, "size=1") || !strings.Contains(all, "./b") {
		t.Error(all)
	}
}

func TestCancelledPull(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	s.put(t, "x:1", sizeable(t))
	ctx, cancel := context.WithCancel(t.Context())
	opts := quick(t)
	opts.Progress = func(p registry.Progress) {
		if p.Phase == registry.PhaseDownload && p.Done > 0 {
			cancel()
		}
	}
	_, _, err := imagetest.Build(t, layer.Options{}, func(b *layer.Builder) error {
		_, err := registry.Pull(ctx, s.ref("x:1"), b, opts)
		return err
	})
	if !errors.Is(err, errs.RequestCanceled) {
		t.Error(err)
	}
}

func TestHostileLayersAreRefusedAsInArchives(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	for name, e := range map[string]entry{
		"dots":  file("../../etc/passwd", "x"),
		"link":  {tar.Header{Name: "l", Typeflag: tar.TypeLink, Linkname: "../../etc/shadow"}, ""},
		"whole": {tar.Header{Name: "/", Typeflag: tar.TypeSymlink, Linkname: "x"}, ""},
	} {
		s.put(t, name, makeImage(t, makeLayer(t, types.OCILayer, makeTar(t, e))))
		if _, _, err := pull(t, s.ref(name), quick(t)); !errors.Is(err, errs.ImageCorrupt) || errs.Of(err).Phase != "image.registry.convert" {
			t.Errorf("%s: %v", name, err)
		}
	}
}
