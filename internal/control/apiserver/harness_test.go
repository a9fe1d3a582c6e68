package apiserver_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	v1 "dsec/api/v1"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
	"dsec/internal/control/store/storetest"
	"dsec/internal/control/watcher"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const rootToken = "root-token-for-tests"

// world is a control plane on an in-memory store, with a client that checks every
// answer against the OpenAPI document.
type world struct {
	t      testing.TB
	store  *storetest.Memory
	ctl    *control.Control
	base   string
	client *http.Client
	edge   *controltest.Edge // the first
	docs   *documented
}

type option func(*control.Config, *controltest.Config)

func newWorld(t testing.TB, opts ...option) *world {
	t.Helper()
	w := &world{t: t, store: storetest.NewMemory("seed")}
	ec := controltest.Config{Store: w.store, Images: []v1.Image{testImage}}
	w.serve(opts, &ec)
	if _, err := w.store.PutImage(t.Context(), testImage); err != nil {
		t.Fatal(err)
	}
	if ec.ID != "none" {
		w.edge = controltest.Start(t, ec)
		w.awaitEdges(1)
	}
	eventually(t, "the test image is known", func() bool {
		status, _, _ := w.do(http.MethodGet, "/v1/images/debian", nil)
		return status == 200
	})
	return w
}

var testImage = v1.Image{Name: "debian", Digest: "sha256:" + strings.Repeat("a", 64), Layers: []v1.Layer{}}

// serve starts a control plane over w.store.
func (w *world) serve(opts []option, ec *controltest.Config) {
	cfg := control.Config{
		Listen: "127.0.0.1:0", RootToken: rootToken, Store: w.store, Version: "test", StreamTimeout: 2 * time.Second,
		Watcher: watcher.Config{Grace: 100 * time.Millisecond},
	}
	for _, o := range opts {
		o(&cfg, ec)
	}
	ctl, err := control.Start(w.t.Context(), cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	w.ctl, w.base = ctl, "http://"+ctl.Addr().String()
	tr := &http.Transport{MaxIdleConnsPerHost: 64}
	if cfg.TLS != nil {
		w.base = "https://" + ctl.Addr().String()
		tr.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} // the test of TLS itself checks the name
	}
	if w.docs == nil {
		w.docs = &documented{t: w.t}
	}
	w.docs.next = tr
	w.client = &http.Client{Transport: w.docs}
	w.t.Cleanup(func() { w.shut() })
	w.docs.load(w)
}

func (w *world) shut() {
	w.client.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := w.ctl.Close(ctx); err != nil {
		w.t.Error(err)
	}
}

func (w *world) awaitEdges(n int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 10*time.Second)
	defer cancel()
	if err := w.ctl.WaitEdge(ctx, n); err != nil {
		w.t.Fatal(err)
	}
}

// header is one header of a request.
type header struct{ name, value string }

func as(token string) header    { return header{"Authorization", "Bearer " + token} }
func withKey(key string) header { return header{"Idempotency-Key", key} }
func anonymous() header         { return header{"Authorization", ""} }

func (w *world) request(ctx context.Context, method, path string, body any, headers ...header) *http.Request {
	w.t.Helper()
	var r io.Reader
	switch b := body.(type) {
	case nil:
	case string:
		r = strings.NewReader(b)
	case io.Reader:
		r = b
	default:
		raw, err := json.Marshal(b)
		if err != nil {
			w.t.Fatal(err)
		}
		r = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, w.base+path, r)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, h := range append([]header{as(rootToken)}, headers...) {
		req.Header.Set(h.name, h.value)
		if h.value == "" {
			req.Header.Del(h.name)
		}
	}
	return req
}

func (w *world) do(method, path string, body any, headers ...header) (int, http.Header, string) {
	w.t.Helper()
	res, err := w.client.Do(w.request(w.t.Context(), method, path, body, headers...))
	if err != nil {
		w.t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		w.t.Fatalf("%s %s: %v", method, path, err)
	}
	return res.StatusCode, res.Header, string(raw)
}

// want does a request, checks its status and decodes its answer.
func want[T any](w *world, status int, method, path string, body any, headers ...header) T {
	w.t.Helper()
	got, _, raw := w.do(method, path, body, headers...)
	var out T
	if got != status {
		w.t.Fatalf("%s %s gives %d, want %d: %s", method, path, got, status, raw)
	}
	if status == http.StatusNoContent {
		return out
	}
	if err := json.Unmarshal([]byte(raw), &out); err != nil {
		w.t.Fatalf("%s %s: %v in %q", method, path, err, raw)
	}
	return out
}

// problem does a request that must fail with code.
func (w *world) problem(code string, method, path string, body any, headers ...header) v1.Problem {
	w.t.Helper()
	status, h, raw := w.do(method, path, body, headers...)
	var p v1.Problem
	if err := json.Unmarshal([]byte(raw), &p); err != nil {
		w.t.Fatalf("%s %s gives %d, no Problem: %q", method, path, status, raw)
	}
	switch {
	case p.Code != code:
		w.t.Errorf("%s %s %v: code %q, want %q: %s", method, path, body, p.Code, code, raw)
	case p.Status != status:
		w.t.Errorf("%s %s: HTTP status %d, in the body %d", method, path, status, p.Status)
	case p.RequestID == "" || p.RequestID != h.Get("X-Request-Id"):
		w.t.Errorf("%s %s: request id %q, header %q", method, path, p.RequestID, h.Get("X-Request-Id"))
	case h.Get("Content-Type") != "application/problem+json":
		w.t.Errorf("%s %s: content type %q", method, path, h.Get("Content-Type"))
	case p.Message == "" || p.Class == "":
		w.t.Errorf("%s %s: incomplete: %s", method, path, raw)
	}
	return p
}

func lines[T any](t testing.TB, raw string) []T {
	t.Helper()
	var out []T
	for l := range strings.Lines(raw) {
		var v T
		if err := json.Unmarshal([]byte(l), &v); err != nil {
			t.Fatalf("line %q: %v", l, err)
		}
		out = append(out, v)
	}
	return out
}

func (w *world) create(body any, headers ...header) v1.Sandbox {
	w.t.Helper()
	return want[v1.Sandbox](w, 201, http.MethodPost, "/v1/sandboxes", body, headers...)
}

func (w *world) token(rights ...v1.Right) string {
	w.t.Helper()
	return want[v1.Token](w, 201, http.MethodPost, "/v1/tokens", v1.TokenRequest{Name: fmt.Sprint(rights), Rights: rights}).Secret
}

func roomy(c *control.Config, ec *controltest.Config) { ec.Capacity.Slots = 1 << 40 }

var hollow = map[string]any{"backend": "hollow"}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// documented checks that every answer's status is in the OpenAPI document.
type documented struct {
	t    testing.TB
	next http.RoundTripper

	mu     sync.Mutex
	routes []route
}

type route struct {
	path   *regexp.Regexp
	status map[string]map[string]bool // method → statuses
}

func (d *documented) load(w *world) {
	var doc struct {
		Paths map[string]map[string]struct {
			Responses map[string]any `json:"responses"`
		} `json:"paths"`
	}
	status, _, raw := w.do(http.MethodGet, "/openapi.json", nil, anonymous())
	if err := json.Unmarshal([]byte(raw), &doc); err != nil || status != 200 {
		w.t.Fatal(status, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.routes = nil
	params := regexp.MustCompile(`\\\{name\\\}|\\\{id\\\}`)
	for path, methods := range doc.Paths {
		r := route{status: map[string]map[string]bool{}}
		pattern := params.ReplaceAllStringFunc(regexp.QuoteMeta(path), func(p string) string {
			if strings.Contains(p, "name") {
				return ".+"
			}
			return "[^/]+"
		})
		r.path = regexp.MustCompile("^" + pattern + "$")
		for m, op := range methods {
			r.status[strings.ToUpper(m)] = map[string]bool{}
			for s := range op.Responses {
				r.status[strings.ToUpper(m)][s] = true
			}
		}
		d.routes = append(d.routes, r)
	}
}

// RoundTrip implements http.RoundTripper.
func (d *documented) RoundTrip(req *http.Request) (*http.Response, error) {
	res, err := d.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.routes {
		statuses := r.status[req.Method]
		if statuses == nil || !r.path.MatchString(req.URL.Path) {
			continue
		}
		if statuses[fmt.Sprint(res.StatusCode)] {
			return res, nil
		}
	}
	undocumented := res.StatusCode == 404 || res.StatusCode == 405 || strings.HasPrefix(req.URL.Path, "/openapi")
	if len(d.routes) > 0 && !undocumented {
		d.t.Errorf("%s %s gives %d, which the OpenAPI document does not have", req.Method, req.URL.Path, res.StatusCode)
	}
	return res, nil
}

// CloseIdleConnections serves http.Client.
func (d *documented) CloseIdleConnections() { d.next.(*http.Transport).CloseIdleConnections() }
