package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync/atomic"

	"dsec/api/v1/errs"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// session is being logged in to a registry for one repository.
type session struct {
	opts      Options
	ref       name.Reference
	repo      name.Repository
	base      *http.Transport
	wire      *wire
	client    *http.Client
	push      bool
	who       string
	anonymous bool
	at        atomic.Pointer[string] // the phase, for errors
	tell      *teller
}

func (s *session) phase() string  { return phasePrefix + *s.at.Load() }
func (s *session) enter(p string) { s.at.Store(&p) }
func (s *session) host() string   { return s.repo.RegistryStr() }
func (s *session) close()         { s.base.CloseIdleConnections() }

// url is that of a resource of the repository; the transport below puts in the
// scheme that the login found.
func (s *session) url(p string) string {
	return "https://" + s.host() + "/v2/" + s.repo.RepositoryStr() + "/" + p
}

// parseRef reads what people call an image: registry/repository:tag or @digest,
// Docker Hub and latest where they are left out.
func parseRef(ref string, opts ...name.Option) (name.Reference, error) {
	r, err := name.ParseReference(ref, opts...)
	if err != nil {
		return nil, errs.New(errs.BadRequest, phasePrefix+PhaseResolve, fmt.Sprintf("image reference %.200q: use registry/repository:tag, such as ghcr.io/owner/name:1.2", ref)).Because(err)
	}
	return r, nil
}

// login connects to the registry of ref.
func login(ctx context.Context, ref string, opts Options, push bool) (*session, error) {
	phase := PhaseResolve
	if push {
		phase = PhasePush
	}
	if err := opts.fill(); err != nil {
		return nil, err
	}
	parsed, err := parseRef(ref)
	if err != nil {
		return nil, err
	}
	host := parsed.Context().RegistryStr()
	plain := opts.PlainHTTP || isLoopback(host)
	if plain {
		if parsed, err = parseRef(ref, name.Insecure); err != nil {
			return nil, err
		}
	}
	s := &session{opts: opts, ref: parsed, repo: parsed.Context(), push: push, tell: &teller{to: opts.Progress}}
	s.enter(phase)
	cfg, err := opts.Auth.resolve(s.repo)
	if err != nil {
		return nil, err
	}
	s.who, s.anonymous = opts.Auth.String(), cfg == authn.AuthConfig{}
	if s.base, err = newTransport(&s.opts); err != nil {
		return nil, err
	}
	s.wire = &wire{base: s.base, opts: &s.opts, phase: s.phase, plainOK: plain, last: map[string]*errs.Error{}}
	if opts.PlainHTTP {
		s.wire.plainHost = host
	}
	if err := s.authenticate(ctx, cfg); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *session) authenticate(ctx context.Context, cfg authn.AuthConfig) error {
	auth := authn.Anonymous
	if !s.anonymous {
		auth = authn.FromConfig(cfg)
	}
	scope := transport.PullScope
	if s.push {
		scope = transport.PushScope
	}
	rt, err := transport.NewWithContext(ctx, s.repo.Registry, auth, s.wire, []string{s.repo.Scope(scope)})
	if err != nil {
		return s.loginError(ctx, err)
	}
	s.client = &http.Client{Transport: rt}
	return nil
}

// loginError types a failed login, which may have been tried over both schemes.
func (s *session) loginError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errs.Wrap(errs.RequestCanceled, s.phase(), "log in to "+s.host(), context.Cause(ctx))
	}
	s.wire.mu.Lock()
	secure, plain := s.wire.last["https"], s.wire.last["http"]
	s.wire.mu.Unlock()
	var e *errs.Error
	var answered *transport.Error
	var cert *tls.CertificateVerificationError
	switch {
	case secure != nil && errors.As(secure, &cert):
		return secure
	case errors.As(err, &answered):
	case plain != nil && s.wire.plainOK && (secure == nil || !secure.Retryable):
		return plain
	case !errors.As(err, &e) && secure != nil:
		return secure
	}
	return s.typed("log in to "+s.host(), err)
}

// do sends a request and returns its answer if that has one of the given states.
func (s *session) do(ctx context.Context, method, u, what string, body io.Reader, header http.Header, states ...int) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, u, body)
	if err != nil {
		return nil, errs.Wrap(errs.RegistryDown, s.phase(), "ask for "+what, bare(err))
	}
	for k, v := range header {
		req.Header[k] = v
	}
	if sized, ok := body.(interface{ Size() int64 }); ok && req.ContentLength <= 0 {
		req.ContentLength = sized.Size()
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, s.typed("ask for "+what, err)
	}
	for _, st := range states {
		if resp.StatusCode == st {
			return resp, nil
		}
	}
	defer resp.Body.Close()
	return resp, s.refused(resp, what)
}

// location resolves where an answer says to go on.
func location(resp *http.Response) (*url.URL, error) {
	u, err := resp.Location()
	if err != nil {
		return nil, err
	}
	if u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("scheme %.20q", u.Scheme)
	}
	return u, nil
}
