package client

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"slices"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Pause lets the sandbox stand still and moves its memory out, and returns when that is
// done. Nothing has to be resumed: any operation in it does that first. Pausing what is
// paused succeeds. Errors: errs.SwapFull, errs.NotSupported, errs.StateConflict.
func (s *Sandbox) Pause(ctx context.Context) (*v1.PauseResult, error) {
	return s.turn(ctx, "pause")
}

// Resume lets a paused sandbox run again, which any operation in it would do, too. If its
// node has no room for it, it stays paused: that is errs.NodeFull, which says what is short;
// trying again is up to the caller.
func (s *Sandbox) Resume(ctx context.Context) (*v1.PauseResult, error) {
	return s.turn(ctx, "resume")
}

func (s *Sandbox) turn(ctx context.Context, verb string) (*v1.PauseResult, error) {
	r := new(v1.PauseResult)
	if err := s.manage(ctx, verb, nil, r); err != nil {
		return nil, err
	}
	return r, nil
}

// Hint tells the platform when the sandbox will be used next, as far as is known: it pauses
// the sandbox if that costs less than holding its memory until then. The hint ends with the
// next operation, or the next hint.
func (s *Sandbox) Hint(ctx context.Context, next time.Duration) (*v1.HintResult, error) {
	r := new(v1.HintResult)
	if err := s.manage(ctx, "hint", v1.HintRequest{NextCall: v1.Seconds(next.Seconds())}, r); err != nil {
		return nil, err
	}
	return r, nil
}

// manage does one request about the sandbox.
func (s *Sandbox) manage(ctx context.Context, verb string, in, out any) error {
	if err := element(s.id, false, errs.SandboxNotFound); err != nil {
		return err
	}
	if err := s.c.call(ctx, http.MethodPost, "/v1/sandboxes/"+s.id+"/"+verb, nil, in, out); err != nil {
		return about(verb+" sandbox", s.id, err)
	}
	return nil
}

// PauseMany pauses what req selects, a job of thousands by one request, and yields the
// outcome of each as it ends: a result with its own Error is a sandbox's failure. An error
// beside it is the request's, and the last thing yielded. Leaving the loop ends the request;
// what is paused stays so.
func (c *Client) PauseMany(ctx context.Context, req v1.PauseRequest) iter.Seq2[v1.PauseResult, error] {
	return c.turnMany(ctx, "pause", req)
}

// ResumeMany resumes what req selects, and yields as [Client.PauseMany] does. What the node
// has no room for stays paused, with errs.NodeFull.
func (c *Client) ResumeMany(ctx context.Context, req v1.PauseRequest) iter.Seq2[v1.PauseResult, error] {
	return c.turnMany(ctx, "resume", req)
}

func (c *Client) turnMany(ctx context.Context, verb string, req v1.PauseRequest) iter.Seq2[v1.PauseResult, error] {
	return func(yield func(v1.PauseResult, error) bool) {
		parts := [][]string{req.IDs}
		if len(req.IDs) > maxIDs {
			parts = slices.Collect(slices.Chunk(req.IDs, maxIDs))
		}
		for _, ids := range parts {
			req.IDs = ids
			got := 0
			for r, err := range stream[v1.PauseResult](ctx, c, http.MethodPost, "/v1/sandboxes/"+verb, nil, req) {
				if err != nil {
					yield(v1.PauseResult{}, fmt.Errorf("%s sandboxes: %w", verb, err))
					return
				}
				got++
				if !yield(r, nil) {
					return
				}
			}
			if got < len(ids) {
				yield(v1.PauseResult{}, errs.New(errs.ConnectionLost, "client.read", fmt.Sprintf("the answer ended after %d of %d results", got, len(ids))))
				return
			}
		}
	}
}

// UsageOptions selects of which sandboxes [Client.Usage] tells: of all if it is empty.
type UsageOptions struct {
	IDs    []string          // at most 200
	Labels map[string]string // all must match
}

// Usage returns what sandboxes and their nodes use now, by one request however many they
// are; of all it may be a second old. It wakes no paused sandbox. [Client.Get] tells more of one.
func (c *Client) Usage(ctx context.Context, o UsageOptions) (*v1.UsageList, error) {
	q := url.Values{"id": o.IDs}
	addLabels(q, o.Labels)
	l := new(v1.UsageList)
	if err := c.call(ctx, http.MethodGet, "/v1/sandboxes/usage", q, nil, l); err != nil {
		return nil, fmt.Errorf("read usage: %w", err)
	}
	return l, nil
}
