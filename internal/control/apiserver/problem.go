package apiserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

const problemType = "application/problem+json"

// problemOf renders an error for one request.
func problemOf(req *request, err error) *v1.Problem {
	p := v1.ProblemOf(err)
	p.RequestID = req.id
	return p
}

// writeProblem answers with p where huma has no part in it.
func writeProblem(w http.ResponseWriter, p *v1.Problem) {
	problemHeaders(w.Header().Set, p)
	w.WriteHeader(p.Status)
	// A client that does not read it is gone.
	_ = json.NewEncoder(w).Encode(p)
}

func problemHeaders(set func(string, string), p *v1.Problem) {
	set("Content-Type", problemType)
	if p.RetryAfterMS > 0 {
		set("Retry-After", strconv.FormatInt((p.RetryAfterMS+999)/1000, 10)) // whole seconds, rounded up
	}
	if p.Code == string(errs.BadToken) {
		set("WWW-Authenticate", `Bearer realm="dsec"`)
	}
}

// statusContext lets the transformer decide the status that huma then writes.
type statusContext struct {
	humaContext
	status int
}

type humaContext huma.Context

// Unwrap lets humago find its own context.
func (c *statusContext) Unwrap() huma.Context { return c.humaContext }

// SetStatus implements huma.Context.
func (c *statusContext) SetStatus(status int) {
	if c.status != 0 {
		status = c.status
	}
	c.humaContext.SetStatus(status)
}

// transform turns every error, huma's own too, into a Problem.
func transform(ctx huma.Context, _ string, body any) (any, error) {
	var p *v1.Problem
	switch e := body.(type) {
	case *v1.Problem:
		p = e
	case *huma.ErrorModel:
		p = problemOf(requestOf(ctx.Context()), fromHuma(e))
	default:
		return body, nil
	}
	problemHeaders(ctx.SetHeader, p)
	if sc, ok := ctx.(*statusContext); ok {
		sc.status = p.Status
	}
	return p, nil
}

// fromHuma converts a failed validation. The first detail is the message; the others,
// by field, are details.
func fromHuma(m *huma.ErrorModel) error {
	switch m.Status {
	case http.StatusRequestEntityTooLarge:
		return errs.New(errs.BodyTooLarge, "request.read", m.Detail)
	case http.StatusRequestTimeout:
		return errs.New(errs.DeadlineExceeded, "request.read", "the request's body did not come in time")
	case http.StatusInternalServerError:
		cause := errors.New(m.Detail)
		if len(m.Errors) > 0 {
			cause = errors.New(m.Errors[0].Message)
		}
		if m.Detail == "cannot read request body" {
			return errs.New(errs.BadRequest, "request.read", "the request's body broke off").Because(cause)
		}
		return errs.New(errs.InternalError, "apiserver", "unexpected failure").Because(cause)
	}
	code, message := errs.BadRequest, m.Detail
	var field string
	if len(m.Errors) > 0 {
		d := m.Errors[0]
		field = fieldOf(d.Location)
		message = d.Message
		if name, ok := strings.CutPrefix(message, "expected required property "); ok && field == "" {
			field, _, _ = strings.Cut(name, " ")
		}
		if field != "" {
			message = field + ": " + d.Message
		}
		if field == "backend" {
			e := v1.UnknownBackend("request.validate", fmt.Sprint(d.Value))
			code, message = e.Code, e.Message
		}
	}
	e := errs.New(code, "request.validate", message)
	if strings.HasPrefix(message, "unknown content type") {
		e.Advise("send JSON, with the header Content-Type: application/json (curl --json does)")
	}
	if field != "" {
		e.With("field", field)
	}
	for _, d := range m.Errors[min(1, len(m.Errors)):] {
		if f := fieldOf(d.Location); f != "" && f != field {
			e.With(f, d.Message)
		}
	}
	return e
}

func quoted(v any) string { return fmt.Sprintf("%.100q", fmt.Sprint(v)) }

// fieldOf cuts huma's "body.", "query.", "path." and "header." off a location.
func fieldOf(location string) string {
	_, field, found := strings.Cut(location, ".")
	if !found {
		return ""
	}
	return field
}
