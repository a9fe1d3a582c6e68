package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"dsec/api/v1/errs"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// diagnosis is what a registry's JSON says about a refusal.
type diagnosis struct {
	Errors []struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	} `json:"errors"`
	Details string `json:"details"` // of token servers
}

// diagnose reads an answer's body; it is bounded and quoted, being anyone's.
func diagnose(resp *http.Response) (code, text string) {
	p, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	return parseDiagnosis(p)
}

func parseDiagnosis(p []byte) (code, text string) {
	var d diagnosis
	if json.Unmarshal(p, &d) != nil {
		return "", ""
	}
	text = d.Details
	if len(d.Errors) > 0 {
		code, text = d.Errors[0].Code, d.Errors[0].Message
	}
	if text != "" {
		text = fmt.Sprintf(": %.200q", text)
	}
	return code, text
}

func reason(resp *http.Response) string {
	_, text := diagnose(resp)
	return text
}

// refused types an answer that was not what a request asked for. what names the
// thing asked for, such as "tag 1.2".
func (s *session) refused(resp *http.Response, what string) *errs.Error {
	code, text := diagnose(resp)
	switch resp.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden:
		return s.denied(text)
	case http.StatusNotFound:
		msg := fmt.Sprintf("%s has no %s in %s", s.host(), what, s.repo.RepositoryStr())
		if code == string(transport.NameUnknownErrorCode) {
			msg = fmt.Sprintf("%s has no repository %s", s.host(), s.repo.RepositoryStr())
		}
		return errs.New(errs.RegistryNotFound, s.phase(), msg)
	}
	// 429 and 5xx have been typed below us, unless they came to what is not repeated.
	switch {
	case resp.StatusCode == http.StatusTooManyRequests:
		return errs.New(errs.RegistryBusy, s.phase(), s.host()+" limits requests"+text).After(retryAfter(resp.Header.Get("Retry-After"), s.opts.Now()))
	case resp.StatusCode >= 500:
		return errs.New(errs.RegistryDown, s.phase(), fmt.Sprintf("%s answers %s%s", s.host(), resp.Status, text))
	}
	e := errs.New(errs.RegistryDown, s.phase(), fmt.Sprintf("%s answers %s to the request for %s%s", s.host(), resp.Status, what, text))
	e.Retryable = false
	return e
}

// denied says which credentials to give.
func (s *session) denied(text string) *errs.Error {
	right := "pull from"
	if s.push {
		right = "push to"
	}
	msg := fmt.Sprintf("%s does not let %s %s %s%s", s.host(), s.who, right, s.repo.RepositoryStr(), text)
	if s.anonymous {
		msg = fmt.Sprintf("%s does not let anyone %s %s without credentials (or it does not exist): give a user name and password, a token, or a file that has them for %s%s",
			s.host(), right, s.repo.RepositoryStr(), s.host(), text)
	}
	return errs.New(errs.RegistryDenied, s.phase(), msg).With("registry", s.host()).With("repository", s.repo.RepositoryStr())
}

// typed types whatever a request failed with.
func (s *session) typed(action string, err error) error {
	if err == nil {
		return nil
	}
	var t *transport.Error
	if errors.As(err, &t) {
		switch t.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			text := ""
			if len(t.Errors) > 0 {
				text = fmt.Sprintf(": %.200q", t.Errors[0].Message)
			}
			return s.denied(text)
		}
		e := errs.New(errs.RegistryDown, s.phase(), fmt.Sprintf("%s: %s answers %d", action, s.host(), t.StatusCode))
		e.Retryable = false
		return e
	}
	var e *errs.Error
	if errors.As(err, &e) {
		return e // without the URL that net/http puts before it: it may be signed
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return errs.Wrap(errs.RegistryDown, s.phase(), action, bare(err))
	}
	return errs.New(errs.RegistryDown, s.phase(), action).Because(bare(err))
}

// bare drops the URL that net/http puts before an error.
func bare(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

// inPhase puts a failure of another package, or of a deadline of ours, in its phase.
func inPhase(ctx context.Context, phase, action string, limit time.Duration, err error) error {
	if err == nil {
		return nil
	}
	full := phasePrefix + phase
	var d *deadline
	if errors.As(context.Cause(ctx), &d) && errs.Of(err).Class() == errs.Deadline && !errors.Is(err, errIdle) {
		return errs.New(errs.DeadlineExceeded, full, fmt.Sprintf("%s took more than %s", action, limit))
	}
	e := errs.Of(errs.Wrap(errs.InternalError, full, action, err))
	if strings.HasPrefix(e.Phase, phasePrefix) {
		return e
	}
	out := errs.New(e.Code, full, action).Because(err)
	out.Retryable, out.Infra, out.RetryAfter, out.Details = e.Retryable, e.Infra, e.RetryAfter, e.Details
	return out
}

// deadline is the cause of contexts that a limit of ours ended.
type deadline struct{ phase string }

func (d *deadline) Error() string   { return d.phase + " took too long" }
func (d *deadline) Is(t error) bool { return t == context.DeadlineExceeded }

func withLimit(ctx context.Context, phase string, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, limit, &deadline{phase})
}
