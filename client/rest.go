package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// maxErrorBody bounds how much of an error answer is read.
const maxErrorBody = 1 << 20

// call does one JSON request; in or out may be nil.
func (c *Client) call(ctx context.Context, method, path string, query url.Values, in, out any) error {
	return c.callHeader(ctx, method, path, query, http.Header{}, in, out)
}

func (c *Client) callHeader(ctx context.Context, method, path string, query url.Values, h http.Header, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return errs.Wrap(errs.BadRequest, "client.encode", "the request cannot be encoded", err)
		}
		body = bytes.NewReader(b)
		h.Set("Content-Type", "application/json")
	}
	resp, err := c.send(ctx, method, path, query, h, body)
	if err != nil {
		return err
	}
	defer drain(resp.Body)
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return c.badAnswer(ctx, method, path, err)
	}
	return nil
}

// send does one request and turns an answer of 400 or more into its error. The caller
// closes the body.
func (c *Client) send(ctx context.Context, method, path string, query url.Values, h http.Header, body io.Reader) (*http.Response, error) {
	u := *c.base
	// Names hold slashes and colons that must reach the server as they are.
	u.Path, u.RawPath = c.base.Path+path, ""
	u.RawQuery = query.Encode()
	req, err := http.NewRequestWithContext(ctx, method, u.String(), body)
	if err != nil {
		return nil, errs.Wrap(errs.BadRequest, "client.request", "the request cannot be made", err)
	}
	for k, v := range h {
		req.Header[k] = v
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	req.Header.Set("User-Agent", c.agent)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	if resp.StatusCode < 400 {
		return resp, nil
	}
	defer drain(resp.Body)
	return nil, problemOf(resp)
}

// unreachable names a transport failure. The caller's own deadline or cancel stays what it is.
func (c *Client) unreachable(ctx context.Context, err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err // without the URL, which we say ourselves
	}
	var known *errs.Error
	if errors.As(err, &known) {
		return err
	}
	if ctx.Err() != nil {
		return errs.Wrap(errs.RequestCanceled, "client.request", "the request to "+c.URL()+" was given up", context.Cause(ctx))
	}
	return errs.New(errs.ServerUnreachable, "client.connect", "no answer from "+c.URL()).Because(err)
}

// badAnswer names an answer that ended early or makes no sense.
func (c *Client) badAnswer(ctx context.Context, method, path string, err error) error {
	if ctx.Err() != nil {
		return errs.Wrap(errs.RequestCanceled, "client.request", "the request to "+c.URL()+" was given up", context.Cause(ctx))
	}
	var syntax *json.SyntaxError
	var typ *json.UnmarshalTypeError
	if errors.As(err, &syntax) || errors.As(err, &typ) {
		return errs.New(errs.ProtocolError, "client.decode", fmt.Sprintf("the answer to %s %s is not what this version expects", method, path)).Because(err)
	}
	return errs.New(errs.ConnectionLost, "client.read", fmt.Sprintf("the answer to %s %s ended early", method, path)).Because(err)
}

// problemOf reads an error answer. One that is not ours (a proxy's, another server's)
// keeps its status and its first words.
func problemOf(resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	var p v1.Problem
	ct, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if strings.HasSuffix(ct, "json") && json.Unmarshal(b, &p) == nil && p.Code != "" {
		err := errs.Of(p.Err())
		if err.RetryAfter == 0 {
			err.RetryAfter = retryAfter(resp.Header)
		}
		if id := resp.Header.Get("X-Request-Id"); id != "" {
			err.With("request_id", id)
		}
		return err
	}
	code := errs.InternalError
	switch resp.StatusCode {
	case http.StatusBadRequest, http.StatusUnprocessableEntity:
		code = errs.BadRequest
	case http.StatusUnauthorized:
		code = errs.BadToken
	case http.StatusForbidden:
		code = errs.MissingRight
	case http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented:
		code = errs.UnknownMethod
	case http.StatusRequestEntityTooLarge:
		code = errs.BodyTooLarge
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		code = errs.ServerUnreachable
	}
	text := strings.TrimSpace(string(b[:min(len(b), 200)]))
	e := errs.New(code, "client.request", fmt.Sprintf("the server answered %s: %q", resp.Status, text))
	return e.After(retryAfter(resp.Header)).With("status", strconv.Itoa(resp.StatusCode))
}

func retryAfter(h http.Header) time.Duration {
	s, err := strconv.ParseFloat(h.Get("Retry-After"), 64)
	if err != nil || s < 0 || s > 1e6 {
		return 0
	}
	return time.Duration(s * float64(time.Second))
}

// drain lets the connection be used again, within reason.
func drain(body io.ReadCloser) {
	io.CopyN(io.Discard, body, 64<<10)
	body.Close()
}

// stream does one JSON request and yields the JSON values of its answer as they come.
// An error is the last thing yielded.
func stream[T any](ctx context.Context, c *Client, method, path string, query url.Values, in any) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var zero T
		var body io.Reader
		h := http.Header{"Accept": {"application/x-ndjson"}}
		if in != nil {
			b, err := json.Marshal(in)
			if err != nil {
				yield(zero, errs.Wrap(errs.BadRequest, "client.encode", "the request cannot be encoded", err))
				return
			}
			body = bytes.NewReader(b)
			h.Set("Content-Type", "application/json")
		}
		streamBody[T](ctx, c, method, path, query, h, body)(yield)
	}
}

func streamBody[T any](ctx context.Context, c *Client, method, path string, query url.Values, h http.Header, body io.Reader) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var zero T
		// The server learns that the caller stopped iterating by the end of the request.
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		resp, err := c.send(ctx, method, path, query, h, body)
		if err != nil {
			yield(zero, err)
			return
		}
		defer resp.Body.Close()
		dec := json.NewDecoder(resp.Body)
		for {
			var v T
			switch err := dec.Decode(&v); {
			case err == io.EOF:
				return
			case err != nil:
				yield(zero, c.badAnswer(ctx, method, path, err))
				return
			}
			if !yield(v, nil) {
				return
			}
		}
	}
}
