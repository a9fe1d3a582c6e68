package registry_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/export"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/registry"
	"dsec/internal/image/source"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"pgregory.net/rapid"
)

func reader(t testing.TB, l image.LayerFiles) *layer.Reader {
	t.Helper()
	open := func(p string) (io.ReaderAt, int64) {
		if p == "" {
			return nil, 0
		}
		f, err := os.Open(p)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		st, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		return f, st.Size()
	}
	meta, msize := open(l.Meta)
	data, dsize := open(l.Data)
	r, err := layer.NewReader(meta, msize, data, dsize)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func fromDir(t testing.TB, dir string) image.LayerFiles {
	t.Helper()
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		_, err := source.Path(t.Context(), dir, b, source.Options{})
		return err
	})
	return l
}

var socket = regexp.MustCompile(`^"([^"\\]|\\.)*" mode=14\d{4} `)

func withoutSockets(lines []string) []string {
	var out []string
	for _, l := range lines {
		if !socket.MatchString(l) {
			out = append(out, l)
		}
	}
	return out
}

// What is pushed comes back as the same tree, and other tools find it sound.
func TestPullOfAPushIsTheSameTree(t *testing.T) {
	t.Parallel()
	for reg, handler := range registries {
		t.Run(reg, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, handler(t))
			base, n := t.TempDir(), 0
			rapid.Check(t, func(rt *rapid.T) {
				n++
				dir := filepath.Join(base, fmt.Sprint(n))
				if err := os.Mkdir(dir, 0o755); err != nil {
					rt.Fatal(err)
				}
				defer os.RemoveAll(dir)
				imagetest.RandomTree(rt, dir)
				l := fromDir(t, dir)
				opts := registry.PushOptions{Options: quick(t)}
				opts.Compression = rapid.SampledFrom([]export.Compression{export.Gzip, export.Zstd, export.None}).Draw(rt, "compression")
				if opts.Compression != export.Zstd {
					opts.Format = rapid.SampledFrom([]export.Format{export.Docker, export.OCI}).Draw(rt, "format")
				}
				ref := s.ref("tree:t" + fmt.Sprint(n))
				res, err := registry.Push(t.Context(), ref, export.Image{
					Platform: "linux/amd64", Config: wantConfig,
					Layers: []export.Layer{export.Merged(export.TarOptions{SparseMin: rapid.SampledFrom([]int64{1, -1}).Draw(rt, "sparse")}, reader(t, l))},
				}, opts)
				if err != nil {
					rt.Fatal(err)
				}
				back, got, err := pull(t, ref, quick(t))
				if err != nil {
					rt.Fatal(err)
				}
				if got.Digest != res.Digest || !reflect.DeepEqual(got.Config, wantConfig) {
					rt.Fatalf("%+v, %+v", res, got)
				}
				if d := imagetest.Diff(withoutSockets(imagetest.Mounted(t, l)), imagetest.Mounted(t, back)); d != "" {
					rt.Fatal(d)
				}
				if n%10 == 0 && opts.Compression == export.Gzip { // the other tool knows no other
					validates(t, ref)
				}
			})
		})
	}
}

// validates has another tool read and check everything.
func validates(t testing.TB, ref string) {
	t.Helper()
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	tr := http.DefaultTransport.(*http.Transport).Clone()
	defer tr.CloseIdleConnections()
	img, err := remote.Image(r, remote.WithTransport(tr))
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Image(img); err != nil {
		t.Error(err)
	}
}

// ours is an image of two layers from files.
func ours(t testing.TB) export.Image {
	t.Helper()
	layers := make([]*layer.Reader, 2)
	for i := range layers {
		l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
			content := noise(uint64(i+1), 600_000)
			return b.File(t.Context(), fmt.Sprintf("f%d", i), layer.Attr{Perm: 0o644}, int64(len(content)), strings.NewReader(content))
		})
		layers[i] = reader(t, l)
	}
	return export.Image{Platform: "linux/amd64", Config: wantConfig, Layers: export.Stacked(export.TarOptions{}, layers...)}
}

func push(t testing.TB, s *server, tag string, edit func(*registry.PushOptions)) (registry.PushResult, error) {
	t.Helper()
	opts := registry.PushOptions{Options: quick(t)}
	if edit != nil {
		edit(&opts)
	}
	res, err := registry.Push(t.Context(), s.ref("ours:"+tag), ours(t), opts)
	if left, _ := os.ReadDir(opts.SpoolDir); len(left) > 0 {
		t.Errorf("spool files are left: %v", left)
	}
	return res, err
}

func TestWhatTheRegistryHasIsNotSentAgain(t *testing.T) {
	t.Parallel()
	for reg, handler := range registries {
		t.Run(reg, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, handler(t))
			first, err := push(t, s, "1", nil)
			if err != nil || first.Sent != 3 || first.Skipped != 0 || first.SentBytes < 1_200_000 || first.Size < 1_200_000 {
				t.Fatalf("%+v, %v", first, err)
			}
			s.inject(nil)
			second, err := push(t, s, "2", nil)
			if err != nil || second.Sent != 0 || second.Skipped != 3 || second.Digest != first.Digest {
				t.Errorf("%+v, %v", second, err)
			}
			if n := s.count("P", "/uploads/"); n > 0 {
				t.Errorf("%d uploads", n)
			}
			validates(t, s.ref("ours:2"))
		})
	}
}

func TestManifestsAreDockers(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	for _, c := range []struct {
		compression     export.Compression
		format          export.Format
		manifest, layer types.MediaType
	}{
		{"", "", types.DockerManifestSchema2, types.DockerLayer},
		{"none", "", types.DockerManifestSchema2, types.DockerUncompressedLayer},
		{"", "oci", types.OCIManifestSchema1, types.OCILayer},
		{"zstd", "", types.OCIManifestSchema1, types.OCILayerZStd},
		{"none", "oci", types.OCIManifestSchema1, types.OCIUncompressedLayer},
	} {
		tag := string(c.compression) + string(c.format) + "x"
		if _, err := push(t, s, tag, func(o *registry.PushOptions) { o.Compression, o.Format = c.compression, c.format }); err != nil {
			t.Fatal(err)
		}
		r, err := name.ParseReference(s.ref("ours:" + tag))
		if err != nil {
			t.Fatal(err)
		}
		img, err := remote.Image(r)
		if err != nil {
			t.Fatal(err)
		}
		m, err := img.Manifest()
		if err != nil {
			t.Fatal(err)
		}
		cfg, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		if m.MediaType != c.manifest || m.Layers[0].MediaType != c.layer || cfg.Config.User != "1000:1000" || len(cfg.History) != 2 || cfg.Platform().String() != "linux/amd64" {
			t.Errorf("%+v: %+v %+v", c, m, cfg)
		}
	}
	_, err := push(t, s, "bad", func(o *registry.PushOptions) { o.Compression, o.Format = "zstd", "docker" })
	if !errors.Is(err, errs.BadRequest) {
		t.Error(err)
	}
}

func TestUploadsThatBreakAreMadeAgain(t *testing.T) {
	t.Parallel()
	for reg, handler := range registries {
		for name, c := range map[string]struct {
			method, part string
			answered     bool // the registry did it, the answer is lost
		}{
			"start":             {"POST", "/uploads/", false},
			"body":              {"PATCH", "/uploads/", false},
			"body, unanswered":  {"PATCH", "/uploads/", true},
			"end":               {"PUT", "/uploads/", false},
			"end, unanswered":   {"PUT", "/uploads/", true},
			"check":             {"HEAD", "/blobs/", false},
			"manifest":          {"PUT", "/manifests/", false},
			"manifest, unansw.": {"PUT", "/manifests/", true},
		} {
			t.Run(reg+"/"+name, func(t *testing.T) {
				t.Parallel()
				s := newServer(t, handler(t))
				fail := func(n int32) {
					var times atomic.Int32 // requests come over several connections
					times.Store(n)
					s.inject(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
						if r.Method == c.method && strings.Contains(r.URL.Path, c.part) && times.Add(-1) >= 0 {
							if c.answered {
								next.ServeHTTP(httptest.NewRecorder(), r)
							} else {
								io.CopyN(io.Discard, r.Body, 100_000)
							}
							panic(http.ErrAbortHandler)
						}
						next.ServeHTTP(w, r)
					})
				}
				fail(2)
				if _, err := push(t, s, "1", nil); err != nil {
					t.Fatal(err)
				}
				s.inject(nil)
				validates(t, s.ref("ours:1"))
				if c.answered {
					return
				}
				s = newServer(t, handler(t))
				fail(1000)
				_, err := push(t, s, "1", nil)
				if e := errs.Of(err); !errors.Is(err, errs.RegistryDown) || e.Phase != "image.registry.push" || !e.Retryable {
					t.Error(err)
				}
			})
		}
	}
}

func TestPushIsRefused(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	s.inject(basic)
	_, err := push(t, s, "1", nil)
	if !errors.Is(err, errs.RegistryDenied) || !strings.Contains(err.Error(), "push to ours without credentials") || errs.Of(err).Phase != "image.registry.push" {
		t.Error(err)
	}
	_, err = push(t, s, "1", func(o *registry.PushOptions) { o.Auth = registry.Auth{Username: "reader", Password: "p:w"} })
	if !errors.Is(err, errs.RegistryDenied) || !strings.Contains(err.Error(), `user "reader" push to ours`) || !strings.Contains(err.Error(), "read only") {
		t.Error(err)
	}
	if _, err = push(t, s, "1", func(o *registry.PushOptions) { o.Auth = registry.Auth{Username: "me", Password: "p:w"} }); err != nil {
		t.Error(err)
	}
	s.inject(nil)
	_, err = registry.Push(t.Context(), s.ref("ours@sha256:"+strings.Repeat("0", 64)), ours(t), registry.PushOptions{Options: quick(t)})
	if !errors.Is(err, errs.BadRequest) {
		t.Error(err)
	}
}

func TestPushMeetsLimits(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	limit := func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Retry-After", "600")
		w.WriteHeader(http.StatusTooManyRequests)
	}
	for _, c := range []struct{ method, part string }{{"POST", "/uploads/"}, {"PATCH", "/uploads/"}, {"PUT", "/uploads/"}, {"PUT", "/manifests/"}} {
		s.inject(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.Method == c.method && strings.Contains(r.URL.Path, c.part) {
				limit(w, r, next)
				return
			}
			next.ServeHTTP(w, r)
		})
		_, err := push(t, s, "x"+c.method, nil)
		if e := errs.Of(err); !errors.Is(err, errs.RegistryBusy) || e.RetryAfter != 10*time.Minute {
			t.Errorf("%v: %v", c, err)
		}
	}
	s.inject(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodPatch {
			io.CopyN(io.Discard, r.Body, 1000)
			select { // with a body unread, the server does not notice that the client goes
			case <-r.Context().Done():
			case <-time.After(time.Second):
			}
			return
		}
		next.ServeHTTP(w, r)
	})
	s2 := newServer(t, registries["go-containerregistry"](t))
	s2.inject(s.fault)
	_, err := push(t, s2, "y", func(o *registry.PushOptions) { o.IdleTimeout, o.Retry.Attempts = 200*time.Millisecond, 2 })
	if !errors.Is(err, errs.DeadlineExceeded) || !strings.Contains(err.Error(), "nothing came") {
		t.Error(err)
	}
	_, err = push(t, s2, "y", func(o *registry.PushOptions) { o.TransferTimeout = 300 * time.Millisecond })
	if !errors.Is(err, errs.DeadlineExceeded) || !strings.Contains(err.Error(), "took more than") {
		t.Error(err)
	}
}

// A layer that cannot be read fails the push, and nothing gets the tag.
func TestBadLayersAreNotPushed(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	bad := errs.New(errs.ImageCorrupt, "test", "broken layer")
	img := ours(t)
	img.Layers = append(img.Layers, func(_ context.Context, w io.Writer) error {
		if _, err := w.Write(bytes.Repeat([]byte("x"), 3<<20)); err != nil {
			return err
		}
		return bad
	})
	_, err := registry.Push(t.Context(), s.ref("ours:1"), img, registry.PushOptions{Options: quick(t)})
	if !errors.Is(err, errs.ImageCorrupt) || !strings.Contains(err.Error(), "layer 3 of 3") {
		t.Error(err)
	}
	if _, _, err := pull(t, s.ref("ours:1"), quick(t)); !errors.Is(err, errs.RegistryNotFound) {
		t.Error(err)
	}
}
