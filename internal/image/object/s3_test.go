package object_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
	"dsec/internal/image/object/objecttest"
)

func openS3(t *testing.T, cfg object.S3Config) *object.S3 {
	t.Helper()
	s, err := object.OpenS3(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.CloseIdle)
	return s
}

func TestS3(t *testing.T) {
	t.Parallel()
	cfg := objecttest.S3(t)
	t.Run("Conformance", func(t *testing.T) {
		var n atomic.Int64
		objecttest.Run(t, func(t *testing.T) object.Store {
			cfg := cfg
			cfg.Prefix = fmt.Sprintf("run/%d/", n.Add(1))
			return openS3(t, cfg)
		})
	})
	t.Run("Throttled", func(t *testing.T) {
		cfg := cfg
		cfg.Prefix = "throttled/"
		throttled(t, openS3(t, cfg))
	})
	t.Run("Refused", func(t *testing.T) { refused(t, cfg) })
	t.Run("Weather", func(t *testing.T) { weather(t, cfg) })
}

// refused: what the server says about wrong credentials, buckets and endpoints.
func refused(t *testing.T, good object.S3Config) {
	for name, c := range map[string]struct {
		change func(*object.S3Config)
		code   errs.Code
		retry  bool
	}{
		"wrong secret":     {func(c *object.S3Config) { c.SecretKey = "wrong-secret-key" }, errs.StoreDenied, false},
		"wrong access key": {func(c *object.S3Config) { c.AccessKey = "nobody" }, errs.StoreDenied, false},
		"no such bucket":   {func(c *object.S3Config) { c.Bucket = "no-such-bucket" }, errs.ObjectNotFound, false},
		"bad endpoint":     {func(c *object.S3Config) { c.Endpoint = "127.0.0.1:1" }, errs.BadRequest, false},
		"bad prefix":       {func(c *object.S3Config) { c.Prefix = "../x" }, errs.BadRequest, false},
		"nobody listens":   {func(c *object.S3Config) { c.Endpoint = "http://" + freeAddress(t) }, errs.StoreUnavailable, true},
	} {
		cfg := good
		cfg.Attempts, cfg.Backoff = 2, time.Millisecond
		c.change(&cfg)
		_, err := object.OpenS3(t.Context(), cfg)
		if e := errs.Of(err); err == nil || e.Code != c.code || e.Retryable != c.retry {
			t.Errorf("%s: got %v, want %s (retryable: %v)", name, err, c.code, c.retry)
		}
	}
}

func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// weather: a real server behind a proxy that makes trouble.
func weather(t *testing.T, cfg object.S3Config) {
	target, err := url.Parse(cfg.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.Host = r.In.Host // it is signed
	}}
	var trouble atomic.Pointer[func(w http.ResponseWriter, r *http.Request, n int64) bool]
	var n atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f := trouble.Load(); f != nil && (*f)(w, r, n.Add(1)) {
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	defer srv.Close()
	make := func(f func(w http.ResponseWriter, r *http.Request, n int64) bool) { n.Store(0); trouble.Store(&f) }
	status := func(code int, header ...string) func(w http.ResponseWriter, r *http.Request, n int64) bool {
		return func(w http.ResponseWriter, r *http.Request, n int64) bool {
			if len(header) == 2 {
				w.Header().Set(header[0], header[1])
			}
			w.WriteHeader(code)
			return true
		}
	}
	cfg.Endpoint, cfg.Prefix = srv.URL, "weather/"
	cfg.Attempts, cfg.Backoff, cfg.Timeout = 4, time.Millisecond, 500*time.Millisecond
	s := openS3(t, cfg)
	b := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	put := func(key string) error { return s.Put(t.Context(), key, int64(len(b)), bytes.NewReader(b)) }
	if err := put("object"); err != nil {
		t.Fatal(err)
	}
	read := func() error {
		rc, err := s.Get(t.Context(), "object", 16, int64(len(b)-16))
		if err != nil {
			return err
		}
		defer rc.Close()
		got, err := io.ReadAll(rc)
		if err == nil && !bytes.Equal(got, b[16:]) {
			t.Errorf("other bytes came back (%d)", len(got))
		}
		return err
	}
	ops := map[string]func() error{
		"get":    read,
		"put":    func() error { return put("object") },
		"stat":   func() error { _, err := s.Stat(t.Context(), "object"); return err },
		"list":   func() error { return s.List(t.Context(), "", func(object.Info) error { return nil }) },
		"delete": func() error { return s.Delete(t.Context(), "gone") },
	}

	for name, op := range ops {
		// Trouble that passes is not seen.
		for what, f := range map[string]func(w http.ResponseWriter, r *http.Request, n int64) bool{
			"503":         status(http.StatusServiceUnavailable),
			"500":         status(http.StatusInternalServerError),
			"429":         status(http.StatusTooManyRequests, "Retry-After", "0"),
			"cut answers": func(http.ResponseWriter, *http.Request, int64) bool { panic(http.ErrAbortHandler) },
		} {
			make(func(w http.ResponseWriter, r *http.Request, n int64) bool { return n <= 2 && f(w, r, n) })
			if err := op(); err != nil {
				t.Errorf("%s with two times %s: %v", name, what, err)
			}
		}
		// Trouble that stays is typed.
		for code, want := range map[int]struct {
			code  errs.Code
			retry bool
			tries int64
		}{
			http.StatusServiceUnavailable: {errs.StoreUnavailable, true, 4},
			http.StatusTooManyRequests:    {errs.StoreUnavailable, true, 4},
			http.StatusBadGateway:         {errs.StoreUnavailable, true, 4},
			http.StatusForbidden:          {errs.StoreDenied, false, 1},
			http.StatusUnauthorized:       {errs.StoreDenied, false, 1},
			http.StatusBadRequest:         {errs.StoreUnavailable, false, 1},
		} {
			make(status(code))
			err := op()
			if e := errs.Of(err); err == nil || e.Code != want.code || e.Retryable != want.retry || !e.Infra {
				t.Errorf("%s with %d: got %v, want %s (retryable: %v)", name, code, err, want.code, want.retry)
			}
			if n.Load() != want.tries {
				t.Errorf("%s with %d: %d tries instead of %d", name, code, n.Load(), want.tries)
			}
		}
		make(status(http.StatusTooManyRequests, "Retry-After", "7"))
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if _, err := s.Stat(ctx, "object"); !errors.Is(err, errs.DeadlineExceeded) {
			t.Errorf("a deadline before the time that the server asks for: %v", err)
		}
		cancel()
		// A server that says nothing at all.
		make(func(w http.ResponseWriter, r *http.Request, n int64) bool {
			select {
			case <-r.Context().Done():
			case <-time.After(3 * time.Second):
			}
			panic(http.ErrAbortHandler)
		})
		if name == "stat" || name == "get" {
			err := op()
			if e := errs.Of(err); err == nil || e.Code != errs.StoreUnavailable || !e.Retryable {
				t.Errorf("%s of a silent server: %v", name, err)
			}
		}
	}
	// Bodies that break off are gone on with, and the end of one is never an EOF.
	cut := func(every bool) func(w http.ResponseWriter, r *http.Request, n int64) bool {
		return func(w http.ResponseWriter, r *http.Request, n int64) bool {
			if r.Method == http.MethodGet && (every || n <= 3) {
				proxy.ServeHTTP(&cutWriter{ResponseWriter: w, left: 100_000}, r)
				panic(http.ErrAbortHandler)
			}
			return false
		}
	}
	make(cut(false))
	if err := read(); err != nil {
		t.Errorf("a body that broke off three times: %v", err)
	}
	if n.Load() != 4 {
		t.Errorf("%d requests instead of 4", n.Load())
	}
	make(func(w http.ResponseWriter, r *http.Request, n int64) bool {
		if r.Method == http.MethodGet {
			if n > 1 {
				w.WriteHeader(http.StatusServiceUnavailable)
				return true
			}
			proxy.ServeHTTP(&cutWriter{ResponseWriter: w, left: 100_000}, r)
			panic(http.ErrAbortHandler)
		}
		return false
	})
	if err := read(); !errors.Is(err, errs.StoreUnavailable) {
		t.Errorf("a body that broke off for good: %v", err)
	}
	trouble.Store(nil)
	if err := read(); err != nil {
		t.Error(err)
	}
}

// cutWriter lets through so many bytes of a body.
type cutWriter struct {
	http.ResponseWriter
	left int
}

func (w *cutWriter) Write(p []byte) (int, error) {
	if w.left == 0 {
		return 0, errors.New("cut")
	}
	n, err := w.ResponseWriter.Write(p[:min(len(p), w.left)])
	w.left -= n
	w.ResponseWriter.(http.Flusher).Flush()
	if err == nil && n < len(p) {
		err = io.ErrShortWrite
	}
	return n, err
}
