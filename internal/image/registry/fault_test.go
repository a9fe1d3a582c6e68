package registry_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/registry"
)

// basic lets those in who know the password.
func basic(w http.ResponseWriter, r *http.Request, next http.Handler) {
	switch user, pass, _ := r.BasicAuth(); {
	case user == "reader" && pass == "p:w" && r.Method != http.MethodGet && r.Method != http.MethodHead:
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"errors":[{"code":"DENIED","message":"read only"}]}`)
	case user == "me" && pass == "p:w", user == "reader" && pass == "p:w":
		next.ServeHTTP(w, r)
	default:
		w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprint(w, `{"errors":[{"code":"UNAUTHORIZED","message":"who are you"}]}`)
	}
}

// tokens is the token flow: a challenge, a token server that wants a password,
// tokens that are good for some requests.
type tokens struct {
	mu     sync.Mutex
	given  int
	left   map[string]int // requests that tokens are still good for
	public bool
	denied bool
}

func (k *tokens) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r.URL.Path == "/token" {
		if user, pass, _ := r.BasicAuth(); !k.public && (user != "me" || pass != "p:w") {
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprint(w, `{"details":"incorrect username or password"}`)
			return
		}
		k.given++
		if k.left == nil {
			k.left = map[string]int{}
		}
		k.left[fmt.Sprintf("Bearer t%d", k.given)] = 3
		fmt.Fprintf(w, `{"token":"t%d"}`, k.given)
		return
	}
	token := r.Header.Get("Authorization")
	if token == "Bearer fixed" {
		next.ServeHTTP(w, r)
		return
	}
	if k.left[token] == 0 {
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="registry",scope="repository:x:pull"`, r.Host))
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if k.denied && r.URL.Path != "/v2/" {
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"errors":[{"code":"DENIED","message":"requested access to the resource is denied"}]}`)
		return
	}
	k.left[token]--
	next.ServeHTTP(w, r)
}

func TestCredentials(t *testing.T) {
	t.Parallel()
	for _, flow := range []string{"basic", "token"} {
		t.Run(flow, func(t *testing.T) {
			t.Parallel()
			s := plainServer(t)
			s.put(t, "x:1", sizeable(t))
			k := &tokens{}
			if flow == "basic" {
				s.inject(basic)
			} else {
				s.inject(k.serve)
			}
			try := func(a registry.Auth) error {
				opts := quick(t)
				opts.Auth = a
				_, _, err := pull(t, s.ref("x:1"), opts)
				return err
			}
			good := []registry.Auth{
				{Username: "me", Password: "p:w"},
				{ConfigFile: authFile(t, s.host(), "me", "p:w")},
				{ConfigFile: authFile(t, "http://"+s.host()+"/v1/", "me", "p:w")},
				{ConfigFile: authFile(t, s.host()+"/x", "me", "p:w")},
			}
			if flow == "token" {
				good = append(good, registry.Auth{Token: "fixed"})
			}
			for _, a := range good {
				if err := try(a); err != nil {
					t.Errorf("%v: %v", a, err)
				}
			}
			if flow == "token" && k.given < 8 {
				t.Errorf("only %d tokens: none expired", k.given)
			}
			for _, c := range []struct {
				a    registry.Auth
				says []string
			}{
				{registry.Auth{}, []string{"without credentials", "user name and password", s.host(), "x"}},
				{registry.Auth{Username: "me", Password: "wr0ng"}, []string{`user "me"`, "pull from x"}},
				{registry.Auth{ConfigFile: authFile(t, "other.example", "me", "p:w")}, []string{"without credentials"}},
				{registry.Auth{ConfigFile: authFile(t, s.host()+"/xy", "me", "p:w")}, []string{"without credentials"}},
			} {
				err := try(c.a)
				if e := errs.Of(err); !errors.Is(err, errs.RegistryDenied) || e.Phase != "image.registry.resolve" || e.Retryable {
					t.Errorf("%v: %v", c.a, err)
					continue
				}
				for _, part := range c.says {
					if !strings.Contains(err.Error(), part) {
						t.Errorf("%v: %v lacks %q", c.a, err, part)
					}
				}
				for _, secret := range []string{"p:w", "wr0ng"} {
					if strings.Contains(err.Error(), secret) || strings.Contains(fmt.Sprintf("%v %+v %#v", c.a, c.a, c.a), secret) {
						t.Errorf("a secret in %v or its options", err)
					}
				}
			}
		})
	}
}

func TestPublicTokensAndDenial(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	s.put(t, "x:1", sizeable(t))
	s.inject((&tokens{public: true}).serve)
	mustPull(t, s.ref("x:1"), quick(t))
	s.inject((&tokens{public: true, denied: true}).serve)
	_, _, err := pull(t, s.ref("x:1"), quick(t))
	if !errors.Is(err, errs.RegistryDenied) || !strings.Contains(err.Error(), "requested access") {
		t.Error(err)
	}
}

func TestFilesOfCredentials(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	s.put(t, "x:1", sizeable(t))
	s.inject(basic)
	for content, want := range map[string]string{
		`not json`:                 "not JSON",
		`{"credsStore":"desktop"}`: "docker-credential-desktop",
		`{"auths":{"HOST":{}},"credHelpers":{"HOST":"ecr-login"}}`: "docker-credential-ecr-login",
		`{"auths":{"HOST":{"auth":"c2VjcmV0"}}}`:                   "malformed",
		`{"auths":{"HOST":{"auth":"%%%"}}}`:                        "malformed",
		``:                                                         "not JSON",
	} {
		p := filepath.Join(t.TempDir(), "c.json")
		if err := os.WriteFile(p, []byte(strings.ReplaceAll(content, "HOST", s.host())), 0o600); err != nil {
			t.Fatal(err)
		}
		opts := quick(t)
		opts.Auth.ConfigFile = p
		_, _, err := pull(t, s.ref("x:1"), opts)
		if !errors.Is(err, errs.BadRequest) || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", content, err)
		}
	}
	opts := quick(t)
	opts.Auth.ConfigFile = "/nonexistent/config.json"
	if _, _, err := pull(t, s.ref("x:1"), opts); !errors.Is(err, errs.LocalFile) {
		t.Error(err)
	}
}

// every answers so for the first n requests whose path has the part.
func every(n int, part string, answer http.HandlerFunc) func(http.ResponseWriter, *http.Request, http.Handler) {
	var left atomic.Int64
	left.Store(int64(n))
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, part) && left.Add(-1) >= 0 {
			answer(w, r)
			return
		}
		next.ServeHTTP(w, r)
	}
}

func TestRetryAfterIsHonoured(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		name, header string
		times        int
		want         []time.Duration
		gives        time.Duration // up, with this to wait
	}{
		{"seconds", "7", 2, []time.Duration{7 * time.Second, 7 * time.Second}, 0},
		{"a date", now.Add(9 * time.Second).Format(http.TimeFormat), 1, []time.Duration{9 * time.Second}, 0},
		{"nothing said", "", 2, []time.Duration{150 * time.Millisecond, 300 * time.Millisecond}, 0},
		{"nonsense", "soon", 1, []time.Duration{150 * time.Millisecond}, 0},
		{"the past", now.Add(-time.Hour).Format(http.TimeFormat), 1, []time.Duration{150 * time.Millisecond}, 0},
		{"too long", "3600", 1, nil, time.Hour},
		{"for ever", "99999999999999999", 1, nil, 30 * 24 * time.Hour},
		{"again and again", "1", 1000, []time.Duration{1e9, 1e9, 1e9, 1600 * time.Millisecond * 3 / 4}, time.Second},
	} {
		for _, part := range []string{"/manifests/", "/blobs/", "/v2/"} {
			t.Run(c.name+part, func(t *testing.T) {
				t.Parallel()
				s := plainServer(t)
				s.put(t, "x:1", sizeable(t))
				s.inject(every(c.times, part, func(w http.ResponseWriter, _ *http.Request) {
					if c.header != "" {
						w.Header().Set("Retry-After", c.header)
					}
					w.WriteHeader(http.StatusTooManyRequests)
					fmt.Fprint(w, `{"errors":[{"code":"TOOMANYREQUESTS","message":"pull rate limit"}]}`)
				}))
				var waits []time.Duration
				var mu sync.Mutex
				opts := quick(t)
				opts.Parallel = 1
				opts.Now = func() time.Time { return now }
				opts.Sleep = func(_ context.Context, d time.Duration) error {
					mu.Lock()
					defer mu.Unlock()
					waits = append(waits, d)
					return nil
				}
				opts.ResolveTimeout, opts.TransferTimeout = 100*365*24*time.Hour, 100*365*24*time.Hour // the clock stands
				_, _, err := pull(t, s.ref("x:1"), opts)
				mu.Lock()
				defer mu.Unlock()
				if !slices.Equal(waits, c.want) {
					t.Errorf("waited %v, want %v", waits, c.want)
				}
				switch {
				case c.gives == 0 && err != nil:
					t.Error(err)
				case c.gives != 0:
					if e := errs.Of(err); !errors.Is(err, errs.RegistryBusy) || e.RetryAfter != c.gives || !strings.Contains(err.Error(), "pull rate limit") {
						t.Errorf("got %v, retry after %v", err, e)
					}
				}
			})
		}
	}
}

func TestServerErrorsAreTriedAgain(t *testing.T) {
	t.Parallel()
	for _, part := range []string{"/v2/", "/manifests/", "/blobs/"} {
		for _, status := range []int{500, 502, 503, 504, 408} {
			s := plainServer(t)
			s.put(t, "x:1", sizeable(t))
			bad := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
			s.inject(every(3, part, bad))
			mustPull(t, s.ref("x:1"), quick(t))
			s.inject(every(1000, part, bad))
			_, _, err := pull(t, s.ref("x:1"), quick(t))
			if !errors.Is(err, errs.RegistryDown) || !strings.Contains(err.Error(), fmt.Sprint(status)) {
				t.Errorf("%s %d: %v", part, status, err)
			}
			opts := quick(t)
			opts.Retry.Attempts = -1
			s.inject(every(1, part, bad))
			if _, _, err := pull(t, s.ref("x:1"), opts); !errors.Is(err, errs.RegistryDown) {
				t.Errorf("%s %d: %v", part, status, err)
			}
		}
	}
}

func TestNoRegistryThere(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	for _, ref := range []string{addr + "/x:1", "registry.invalid/x:1"} {
		_, _, err = pull(t, ref, quick(t))
		if !errors.Is(err, errs.RegistryDown) || errs.Of(err).Phase != "image.registry.resolve" {
			t.Error(err)
		}
	}
	// A web server that is no registry.
	s := newServer(t, http.NotFoundHandler())
	if _, _, err = pull(t, s.ref("x:1"), quick(t)); !errors.Is(err, errs.RegistryDown) || errs.Of(err).Retryable {
		t.Error(err)
	}
}

// slowly sends a few bytes and then nothing until the client goes.
func slowly(part string, first int) func(http.ResponseWriter, *http.Request, http.Handler) {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.Contains(r.URL.Path, part) {
			next.ServeHTTP(w, r)
			return
		}
		if first > 0 {
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
			io.WriteString(w, strings.Repeat(" ", first))
			w.(http.Flusher).Flush()
		}
		<-r.Context().Done()
	}
}

func TestDeadlines(t *testing.T) {
	t.Parallel()
	const short = 150 * time.Millisecond
	for _, c := range []struct {
		name, part string
		first      int
		set        func(*registry.Options)
		phase      string
		says       string
	}{
		{"resolve", "/manifests/", 0, func(o *registry.Options) { o.ResolveTimeout = short }, "resolve", "took more than"},
		{"resolve, in the middle", "/manifests/", 5, func(o *registry.Options) { o.ResolveTimeout = short }, "resolve", "took more than"},
		{"login", "/v2/", 0, func(o *registry.Options) { o.ResolveTimeout = short }, "resolve", "took more than"},
		{"idle login", "/v2/", 0, func(o *registry.Options) { o.IdleTimeout = short }, "resolve", "nothing came"},
		{"idle manifest", "/manifests/", 0, func(o *registry.Options) { o.IdleTimeout = short }, "resolve", "nothing came"},
		{"idle manifest, in the middle", "/manifests/", 5, func(o *registry.Options) { o.IdleTimeout = short }, "resolve", "nothing came"},
		{"idle layer", "LAYER", 0, func(o *registry.Options) { o.IdleTimeout = short }, "download", "nothing came"},
		{"idle layer, in the middle", "LAYER", 10, func(o *registry.Options) { o.IdleTimeout = short }, "download", "nothing came"},
		{"download", "LAYER", 0, func(o *registry.Options) { o.TransferTimeout = short }, "download", "took more than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := plainServer(t)
			img := sizeable(t)
			s.put(t, "x:1", img)
			m, err := img.Manifest()
			if err != nil {
				t.Fatal(err)
			}
			s.inject(slowly(strings.ReplaceAll(c.part, "LAYER", m.Layers[0].Digest.Hex), c.first))
			opts := quick(t)
			opts.Retry.Attempts = 2
			c.set(&opts)
			began := time.Now()
			_, _, err = pull(t, s.ref("x:1"), opts)
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("took %s", took)
			}
			e := errs.Of(err)
			if !errors.Is(err, errs.DeadlineExceeded) || e.Phase != "image.registry."+c.phase || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// A layer that comes slowly but steadily is no silence, and a slow reader neither.
func TestSlowIsNotIdle(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	s.put(t, "x:1", sizeable(t))
	s.inject(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		next.ServeHTTP(&dripping{ResponseWriter: w}, r)
	})
	opts := quick(t)
	opts.IdleTimeout = 250 * time.Millisecond
	opts.Parallel, opts.SpoolMax = 1, 1
	opts.Progress = func(p registry.Progress) {
		if p.Phase == registry.PhaseConvert {
			time.Sleep(100 * time.Millisecond)
		}
	}
	mustPull(t, s.ref("x:1"), opts)
}

type dripping struct {
	http.ResponseWriter
}

func (d *dripping) Write(p []byte) (int, error) {
	total := len(p)
	for len(p) > 0 {
		n := min(len(p), 200_000)
		if _, err := d.ResponseWriter.Write(p[:n]); err != nil {
			return total - len(p), err
		}
		d.ResponseWriter.(http.Flusher).Flush()
		p = p[n:]
		time.Sleep(100 * time.Millisecond)
	}
	return total, nil
}

func TestAFailureEndsTheOtherDownloads(t *testing.T) {
	t.Parallel()
	s := plainServer(t)
	img := sizeable(t)
	s.put(t, "x:1", img)
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	s.inject(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, m.Layers[2].Digest.Hex) {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		slowly(m.Layers[0].Digest.Hex, 10)(w, r, next)
	})
	began := time.Now()
	_, _, err = pull(t, s.ref("x:1"), quick(t))
	if !errors.Is(err, errs.RegistryDenied) || time.Since(began) > 5*time.Second {
		t.Errorf("%v after %s", err, time.Since(began))
	}
}
