package apiserver

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"dsec/aether"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/iam"
)

const (
	headerRequestID = "X-Request-Id"
	maxRequestID    = 128
)

// request is what is known of one request. It is its ResponseWriter, too.
type request struct {
	http.ResponseWriter
	id        string
	principal *iam.Principal
	status    int
	bytes     int64
	timeout   time.Duration // for a part of the answer to be taken
	body      *tracked      // nil: none is expected
	// fault is what was answered when it was not a success, for the log.
	fault error
}

type requestKey struct{}

// requestOf returns the request that ctx belongs to.
func requestOf(ctx context.Context) *request {
	r, _ := ctx.Value(requestKey{}).(*request)
	if r == nil {
		return &request{}
	}
	return r
}

// WriteHeader implements http.ResponseWriter.
func (r *request) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
	if status >= 400 && r.unread() {
		r.Header().Set("Connection", "close")
	}
	r.arm()
	r.ResponseWriter.WriteHeader(status)
}

// writeSize is what a reader has the timeout for.
const writeSize = 256 << 10

// arm gives the reader its time once more. The deadline stays when the handler returns, as
// net/http sends the last of the answer then; the connection's next request lifts it.
func (r *request) arm() {
	_ = http.NewResponseController(r.ResponseWriter).SetWriteDeadline(time.Now().Add(r.timeout)) // a writer without deadlines is a test's
}

// unread tells whether some of the request's body was not read.
func (r *request) unread() bool { return r.body != nil && !r.body.ended.Load() }

// Write implements http.ResponseWriter. A reader that takes nothing for the timeout is cut off.
func (r *request) Write(p []byte) (n int, err error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	for {
		r.arm()
		part := p[n:min(len(p), n+writeSize)]
		m, err := r.ResponseWriter.Write(part)
		n += m
		r.bytes += int64(m)
		if err != nil || n == len(p) {
			return n, err
		}
	}
}

// Unwrap serves http.ResponseController.
func (r *request) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// handler wraps the routes with what every request gets: an id, a log line with status,
// duration and bytes, metrics, and an answer if the handler panics.
func (s *Server) handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, hr *http.Request) {
		start := time.Now()
		req := &request{ResponseWriter: w, id: s.requestID(hr), timeout: s.cfg.StreamTimeout}
		w.Header()[headerRequestID] = []string{req.id}
		ctx := context.WithValue(aether.WithRequestID(hr.Context(), req.id), requestKey{}, req)
		hr = hr.WithContext(ctx)
		rc := http.NewResponseController(w)
		_ = rc.SetWriteDeadline(time.Time{})                       // that of the answer before
		if hr.ContentLength != 0 && rc.EnableFullDuplex() == nil { // the body stays readable after an answer
			req.body = &tracked{Reader: hr.Body}
			hr.Body = req.body
		}
		s.metrics.inFlight.Inc()
		defer func() {
			s.metrics.inFlight.Dec()
			if v := recover(); v != nil {
				s.recovered(req, hr, v)
			}
			s.finished(req, hr, time.Since(start))
		}()
		s.mux.ServeHTTP(req, hr)
		if req.status >= 400 && req.unread() {
			drain(rc, req.body)
		}
	})
}

// recovered answers after a panic, if nothing was answered yet.
func (s *Server) recovered(req *request, hr *http.Request, v any) {
	if v == http.ErrAbortHandler {
		panic(v)
	}
	s.cfg.Log.Error("panic", "request", req.id, "route", hr.Pattern, "panic", v, "stack", string(debug.Stack()))
	req.fault = fmt.Errorf("panic: %v", v)
	if req.status == 0 {
		writeProblem(req, problemOf(req, errs.New(errs.InternalError, "apiserver", "the server failed on this request; its log has the cause")))
	}
}

func (s *Server) finished(req *request, hr *http.Request, took time.Duration) {
	if req.status == 0 {
		req.status = http.StatusOK // net/http's default
	}
	route := hr.Pattern
	s.metrics.request(route, req.status, took)
	level := slog.LevelDebug
	switch {
	case req.status >= 500:
		level = slog.LevelWarn
	case req.status >= 400:
		level = slog.LevelInfo
	}
	if !s.cfg.Log.Enabled(hr.Context(), level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("request", req.id), slog.String("method", hr.Method), slog.String("path", hr.URL.Path),
		slog.Int("status", req.status), slog.Duration("took", took), slog.Int64("bytes", req.bytes), slog.String("remote", hr.RemoteAddr),
	}
	if req.principal != nil {
		attrs = append(attrs, slog.String("token", req.principal.Name))
	}
	if req.fault != nil {
		attrs = append(attrs, slog.Any("err", req.fault))
	}
	s.cfg.Log.LogAttrs(hr.Context(), level, "request", attrs...)
}

// requestID takes the client's id if it is fit for logs and headers.
func (s *Server) requestID(hr *http.Request) string {
	if h := hr.Header[headerRequestID]; len(h) == 1 && h[0] != "" && len(h[0]) <= maxRequestID && isPlain(h[0]) {
		return h[0]
	}
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], s.random.Uint64())
	return hex.EncodeToString(b[:])
}

func isPlain(s string) bool {
	for _, c := range []byte(s) {
		if c <= ' ' || c >= 0x7f || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

const metaRight = "right"

// authorize is huma's middleware: it authenticates, and checks the right that the
// operation names. An operation without one is open to all.
func (s *Server) authorize(hc huma.Context, next func(huma.Context)) {
	hc = &statusContext{humaContext: hc}
	right, _ := hc.Operation().Metadata[metaRight].(v1.Right)
	if right == "" {
		next(hc)
		return
	}
	req := requestOf(hc.Context())
	p, err := s.cfg.IAM.Authenticate(bearer(hc.Header("Authorization")))
	if err == nil {
		req.principal = p
		err = p.Require(right)
	}
	if err != nil {
		req.fault = err
		_, w := humago.Unwrap(hc)
		writeProblem(w, problemOf(req, err))
		return
	}
	next(hc)
}

// bearer returns the token of an Authorization header, or "".
func bearer(header string) string {
	scheme, token, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// notFound answers what no route matches, and tells a wrong method from a wrong path.
func (s *Server) notFound(w http.ResponseWriter, hr *http.Request) {
	req := requestOf(hr.Context())
	var allowed []string
	for _, m := range []string{http.MethodGet, http.MethodPost, http.MethodDelete} {
		probe := &http.Request{Method: m, URL: hr.URL, Host: hr.Host}
		if _, pattern := s.mux.Handler(probe); pattern != "/" && m != hr.Method {
			allowed = append(allowed, m)
		}
	}
	err := errs.New(errs.RouteNotFound, "apiserver", "nothing is at "+hr.URL.Path)
	if len(allowed) > 0 {
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		err = errs.New(errs.MethodNotAllowed, "apiserver", hr.Method+" is not possible here; use "+strings.Join(allowed, " or "))
	}
	req.fault = err
	writeProblem(w, problemOf(req, err))
}
