package client

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// CreateOption changes one create.
type CreateOption func(*createOptions)

type createOptions struct {
	key     string
	keyed   bool
	secrets map[string]string
}

// IdempotencyKey makes a create safe to repeat: within five minutes the same key gives
// the same sandbox, also when both requests run at once. A key has 1 to 255 visible ASCII
// characters, without quotation mark and backslash; another is an error before anything is sent.
func IdempotencyKey(key string) CreateOption {
	return func(o *createOptions) { o.key, o.keyed = key, true }
}

// SecretEnv gives every process of the sandbox an environment, over the spec's, that is kept nowhere but in
// the sandbox: nothing returns it, and neither snapshots nor forks have it.
func SecretEnv(env map[string]string) CreateOption {
	return func(o *createOptions) { o.secrets = env }
}

// Create makes one sandbox and returns when its guest answers.
func (c *Client) Create(ctx context.Context, spec Spec, opts ...CreateOption) (*Sandbox, error) {
	var o createOptions
	for _, f := range opts {
		f(&o)
	}
	h := http.Header{}
	if o.keyed {
		if err := v1.CheckIdempotencyKey(o.key); err != nil {
			return nil, fmt.Errorf("create sandbox: %w", err)
		}
		h.Set("Idempotency-Key", o.key)
	}
	var sb v1.Sandbox
	if err := c.callHeader(ctx, http.MethodPost, "/v1/sandboxes", nil, h, v1.CreateRequest{Spec: spec, SecretEnv: o.secrets}, &sb); err != nil {
		return nil, fmt.Errorf("create sandbox: %w", err)
	}
	return c.handle(sb), nil
}

// CreateMany makes n sandboxes of one spec and yields each as it is ready, or its error:
// always n results, unless the loop is left or the request itself fails. Leaving the loop
// ends the request: what is being made then is undone, what was made and not yielded stays.
func (c *Client) CreateMany(ctx context.Context, spec Spec, n int, opts ...CreateOption) iter.Seq2[*Sandbox, error] {
	var o createOptions
	for _, f := range opts {
		f(&o)
	}
	return func(yield func(*Sandbox, error) bool) {
		if o.keyed {
			yield(nil, errs.New(errs.BadRequest, "client.create", "an idempotency key is for one sandbox: use Create"))
			return
		}
		c.many(ctx, "/v1/sandboxes/batch", v1.CreateRequest{Spec: spec, SecretEnv: o.secrets, Count: n}, n, func(err error) error { return fmt.Errorf("create sandboxes: %w", err) }, yield)
	}
}

// ListOptions selects sandboxes.
type ListOptions struct {
	Labels map[string]string // all must match
	State  v1.State
	Limit  int    // of one page; 0: the server's
	After  string // id of the last sandbox of the page before
}

// List returns one page of sandboxes.
func (c *Client) List(ctx context.Context, o ListOptions) (*v1.SandboxList, error) {
	q := url.Values{}
	addLabels(q, o.Labels)
	if o.State != "" {
		q.Set("state", string(o.State))
	}
	if o.Limit > 0 {
		q.Set("limit", strconv.Itoa(o.Limit))
	}
	if o.After != "" {
		q.Set("after", o.After)
	}
	var l v1.SandboxList
	if err := c.call(ctx, http.MethodGet, "/v1/sandboxes", q, nil, &l); err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	return &l, nil
}

// All yields every sandbox that o selects, page by page.
func (c *Client) All(ctx context.Context, o ListOptions) iter.Seq2[v1.Sandbox, error] {
	return func(yield func(v1.Sandbox, error) bool) {
		if o.Limit == 0 {
			o.Limit = 1000
		}
		for {
			l, err := c.List(ctx, o)
			if err != nil {
				yield(v1.Sandbox{}, err)
				return
			}
			for _, sb := range l.Items {
				if !yield(sb, nil) {
					return
				}
			}
			if len(l.Items) < o.Limit {
				return
			}
			o.After = l.Items[len(l.Items)-1].ID
		}
	}
}

// Get returns a sandbox with its usage.
func (c *Client) Get(ctx context.Context, id string) (*v1.Sandbox, error) {
	if err := element(id, false, errs.SandboxNotFound); err != nil {
		return nil, err
	}
	var sb v1.Sandbox
	if err := c.call(ctx, http.MethodGet, "/v1/sandboxes/"+id, nil, nil, &sb); err != nil {
		return nil, about("get sandbox", id, err)
	}
	return &sb, nil
}

// Delete removes a sandbox and returns when nothing of it is left.
func (c *Client) Delete(ctx context.Context, id string) error {
	if err := element(id, false, errs.SandboxNotFound); err != nil {
		return err
	}
	if err := c.call(ctx, http.MethodDelete, "/v1/sandboxes/"+id, nil, nil, nil); err != nil {
		return about("delete sandbox", id, err)
	}
	return nil
}

// maxIDs is how many ids one request may hold.
const maxIDs = 10000

// DeleteMany removes what req selects and yields each outcome as it comes. An error
// without an id is the request's own. Leaving the loop ends the request, and what was not
// removed yet may stay.
func (c *Client) DeleteMany(ctx context.Context, req v1.DeleteRequest) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		parts := [][]string{req.IDs}
		if len(req.IDs) > maxIDs {
			parts = slices.Collect(slices.Chunk(req.IDs, maxIDs))
		}
		for _, ids := range parts {
			req.IDs = ids
			for r, err := range stream[v1.DeleteResult](ctx, c, http.MethodPost, "/v1/sandboxes/delete", nil, req) {
				if err == nil {
					err = r.Error.Err()
				}
				if !yield(r.ID, err) || err != nil && r.ID == "" {
					return
				}
			}
		}
	}
}

// element checks a name that becomes part of a path, so that it cannot name another one.
func element(name string, slashes bool, unknown errs.Code) error {
	for part := range strings.SplitSeq(name, "/") {
		if part == "" || part == "." || part == ".." || !slashes && len(part) < len(name) {
			return errs.New(unknown, "client.request", fmt.Sprintf("%q names nothing", name))
		}
	}
	return nil
}

func addLabels(q url.Values, labels map[string]string) {
	for k, v := range labels {
		q.Add("label", k+"="+v)
	}
}
