package client

import (
	"context"
	"fmt"
	"iter"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// ForkOptions changes a fork.
type ForkOptions struct {
	Lease     v1.Seconds        // of each child: see Spec
	LeaveOut  []string          // patterns, as of SnapshotOptions
	SecretEnv map[string]string // the children's, see [SecretEnv]; they have none of the sandbox's
}

// Fork makes n children of the sandbox on its node. They begin with its files, limits, environment
// and labels, and are nobody but themselves; the sandbox stands still for a moment and runs on.
// It yields each child as it is ready, or its error: always n results, unless the loop is
// left or the request itself fails.
func (s *Sandbox) Fork(ctx context.Context, n int, o ForkOptions) iter.Seq2[*Sandbox, error] {
	return func(yield func(*Sandbox, error) bool) {
		if err := element(s.id, false, errs.SandboxNotFound); err != nil {
			yield(nil, err)
			return
		}
		s.c.many(ctx, "/v1/sandboxes/"+s.id+"/fork", v1.ForkRequest{Count: n, Lease: o.Lease, LeaveOut: o.LeaveOut, SecretEnv: o.SecretEnv}, n, func(err error) error {
			return about("fork sandbox", s.id, err)
		}, yield)
	}
}

// many does a request that is answered with a result for each of n sandboxes.
func (c *Client) many(ctx context.Context, path string, req any, n int, wrap func(error) error, yield func(*Sandbox, error) bool) {
	got := 0
	for r, err := range stream[v1.CreateResult](ctx, c, "POST", path, nil, req) {
		if err != nil {
			yield(nil, wrap(err))
			return
		}
		got++
		var sb *Sandbox
		if r.Sandbox != nil {
			sb = c.handle(*r.Sandbox)
		} else if err = r.Error.Err(); err == nil {
			err = errs.New(errs.ProtocolError, "client.decode", "a result holds neither sandbox nor error")
		}
		if !yield(sb, err) {
			return
		}
	}
	if got < n {
		yield(nil, errs.New(errs.ConnectionLost, "client.read", fmt.Sprintf("the answer ended after %d of %d results", got, n)))
	}
}
