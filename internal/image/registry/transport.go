package registry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"dsec/api/v1/errs"
)

const (
	dialTimeout  = 15 * time.Second
	maxDrain     = 64 << 10 // of a refused answer, to use its connection again
	maxErrorBody = 16 << 10
)

var (
	errIdle  = errors.New("nothing came from the registry for the idle limit")
	errPlain = errors.New("plain HTTP")
)

// newTransport makes the connections themselves.
func newTransport(o *Options) (*http.Transport, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: o.SkipVerify}
	if o.CAFile != "" {
		p, err := readSmall(o.CAFile)
		if err != nil {
			return nil, errs.Wrap(errs.BadRequest, phasePrefix+PhaseResolve, "read CA file", err)
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(p) {
			return nil, errs.New(errs.BadRequest, phasePrefix+PhaseResolve, o.CAFile+" holds no certificate in PEM form")
		}
		cfg.RootCAs = pool
	}
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         o.Dial,
		TLSClientConfig:     cfg,
		TLSHandshakeTimeout: min(dialTimeout, o.IdleTimeout),
		ForceAttemptHTTP2:   true,
		DisableCompression:  true, // layers are kept as they are; their digests are of that
		MaxIdleConnsPerHost: o.Parallel + 1,
		IdleConnTimeout:     o.IdleTimeout,
	}, nil
}

// wire is the lowest of our layers: it refuses plain HTTP where it was not asked
// for, ends requests on which nothing moves, and tries again what can be.
type wire struct {
	base      http.RoundTripper
	opts      *Options
	phase     func() string
	plainOK   bool   // HTTP is allowed
	plainHost string // for which HTTPS is not even tried

	mu   sync.Mutex
	last map[string]*errs.Error // the last failure by scheme, for callers that lose it
}

func (w *wire) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" && !w.plainOK {
		return nil, errs.New(errs.BadRequest, w.phase(), fmt.Sprintf("the registry leads to %s over plain HTTP, which was not allowed", req.URL.Host)).Because(errPlain)
	}
	if req.URL.Scheme == "https" && w.plainHost != "" && req.URL.Host == w.plainHost {
		return nil, errPlain // the login tries both
	}
	// Parts of an upload are not: a repeated part would be appended, a repeated end
	// finds nothing.
	again := req.Method != http.MethodPatch && (req.Body == nil || req.GetBody != nil) && (req.Method != http.MethodPut || req.Body != nil)
	for failures := 1; ; failures++ {
		resp, err := w.once(req, failures > 1)
		wait, e := w.verdict(req, resp, err, failures)
		if e == nil {
			return resp, err
		}
		w.mu.Lock()
		w.last[req.URL.Scheme] = e
		w.mu.Unlock()
		if resp != nil {
			io.Copy(io.Discard, io.LimitReader(resp.Body, maxDrain))
			resp.Body.Close()
		}
		if !again || wait < 0 {
			return nil, e
		}
		if err := w.opts.Sleep(req.Context(), wait); err != nil {
			return nil, err
		}
	}
}

// verdict types a failure that another try may mend and says how long to wait
// before it; negative: give up. Everything else is for the caller (nil).
func (w *wire) verdict(req *http.Request, resp *http.Response, err error, failures int) (time.Duration, *errs.Error) {
	var e *errs.Error
	wait := w.opts.backoff(failures)
	switch {
	case err != nil && req.Context().Err() != nil:
		return 0, nil
	case err != nil:
		if e = connError(w.phase(), req.URL, w.opts.IdleTimeout, err); !e.Retryable {
			return -1, e
		}
	case resp.StatusCode == http.StatusTooManyRequests:
		e = errs.New(errs.RegistryBusy, w.phase(), req.URL.Host+" limits requests"+reason(resp))
	case resp.StatusCode == http.StatusRequestTimeout, resp.StatusCode >= 500 && resp.StatusCode != http.StatusNotImplemented:
		e = errs.New(errs.RegistryDown, w.phase(), fmt.Sprintf("%s answers %s%s", req.URL.Host, resp.Status, reason(resp)))
	default:
		return 0, nil
	}
	if resp != nil {
		if after := retryAfter(resp.Header.Get("Retry-After"), w.opts.Now()); after > 0 {
			e.RetryAfter = after
			wait = max(wait, after)
		}
	}
	deadline, has := req.Context().Deadline()
	if failures >= w.opts.Retry.Attempts || wait > w.opts.Retry.Max || has && w.opts.Now().Add(wait).After(deadline) {
		wait = -1
	}
	return wait, e
}

// retryAfter reads the header of that name: seconds or a date.
func retryAfter(v string, now time.Time) time.Duration {
	const most = 30 * 24 * time.Hour
	v = strings.TrimSpace(v)
	if n, err := strconv.ParseInt(v, 10, 64); err == nil {
		return time.Duration(max(0, min(n, int64(most/time.Second)))) * time.Second
	}
	if t, err := http.ParseTime(v); err == nil {
		return max(0, min(t.Sub(now), most))
	}
	return 0
}

// connError types what went wrong below HTTP.
func connError(phase string, u *url.URL, idle time.Duration, err error) *errs.Error {
	var e *errs.Error
	if errors.As(err, &e) {
		return e
	}
	e = errs.New(errs.RegistryDown, phase, "talk to "+u.Host).Because(err)
	var cert *tls.CertificateVerificationError
	var record tls.RecordHeaderError
	var host *net.DNSError
	switch {
	case errors.Is(err, errIdle):
		e = errs.New(errs.DeadlineExceeded, phase, fmt.Sprintf("nothing came from %s for %s", u.Host, idle))
	case errors.As(err, &cert):
		e.Message, e.Retryable = "the certificate of "+u.Host+" is not trusted; give its CA's certificate", false
	case errors.As(err, &record), strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		e.Message, e.Retryable = u.Host+" does not talk HTTPS; plain HTTP has to be allowed for it", false
	case errors.As(err, &host) && host.IsNotFound:
		e.Message, e.Retryable = "no host "+u.Hostname(), false
	}
	return e
}

// once sends the request, under watch until its answer is closed.
func (w *wire) once(req *http.Request, anew bool) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	watch := &watchdog{ctx: ctx, cancel: cancel, idle: w.opts.IdleTimeout}
	watch.timer = time.AfterFunc(watch.idle, func() { cancel(errIdle) })
	req = req.Clone(ctx)
	if anew && req.GetBody != nil {
		body, err := req.GetBody()
		if err != nil {
			return nil, err
		}
		req.Body = body
	}
	if req.Body != nil {
		req.Body = &sentBody{req.Body, watch}
	}
	resp, err := w.base.RoundTrip(req)
	watch.timer.Stop()
	if err != nil {
		err = watch.explain(err)
		cancel(nil)
		return nil, err
	}
	resp.Body = &watchedBody{resp.Body, watch}
	return resp, nil
}

// watchdog cancels a request on which nothing moves. It only runs while someone
// waits for the registry.
type watchdog struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	idle   time.Duration
	timer  *time.Timer
}

func (d *watchdog) explain(err error) error {
	if cause := context.Cause(d.ctx); errors.Is(cause, errIdle) {
		return errIdle
	}
	return err
}

type sentBody struct {
	io.ReadCloser
	w *watchdog
}

func (b *sentBody) Read(p []byte) (int, error) {
	b.w.timer.Stop()
	n, err := b.ReadCloser.Read(p)
	b.w.timer.Reset(b.w.idle)
	return n, err
}

type watchedBody struct {
	io.ReadCloser
	w *watchdog
}

func (b *watchedBody) Read(p []byte) (int, error) {
	b.w.timer.Reset(b.w.idle)
	n, err := b.ReadCloser.Read(p)
	b.w.timer.Stop()
	if err != nil && err != io.EOF {
		err = b.w.explain(err)
	}
	return n, err
}

func (b *watchedBody) Close() error {
	b.w.timer.Stop()
	err := b.ReadCloser.Close()
	b.w.cancel(nil)
	return err
}

// isLoopback tells whether host[:port] can only be this machine.
func isLoopback(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
