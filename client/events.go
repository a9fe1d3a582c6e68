package client

import (
	"context"
	"errors"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"dsec/api/v1/errs"
)

// EventOptions selects events.
type EventOptions struct {
	From   uint64    // revision to go on from, such as a list's; 0: what the server still has
	Follow bool      // wait for more, across lost connections
	Since  time.Time // leave out what happened before
	Labels map[string]string
}

// Events yields changes in the order of their revision. With Follow it ends only with
// ctx or an error: a lost connection is made again from the last revision seen, so
// that nothing is missed or seen twice; errs.RevisionCompacted says that the server no
// longer has what was asked for, and that the caller has to list again.
func (c *Client) Events(ctx context.Context, o EventOptions) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		from, seen, wait := o.From, false, retryMin
		for answered := false; ; {
			q := url.Values{"from": {strconv.FormatUint(from, 10)}, "follow": {strconv.FormatBool(o.Follow)}}
			addLabels(q, o.Labels)
			var failed error
			for e, err := range stream[Event](ctx, c, http.MethodGet, "/v1/events", q, nil) {
				if err != nil {
					failed = err
					break
				}
				answered, wait = true, retryMin
				if seen && e.Revision <= from {
					continue
				}
				from, seen = e.Revision, true
				if e.Time.Before(o.Since) {
					continue
				}
				if !yield(e, nil) {
					return
				}
			}
			switch {
			case ctx.Err() != nil || !o.Follow && failed == nil:
				return
			case !o.Follow || failed != nil && !reconnectable(failed, answered):
				yield(Event{}, failed)
				return
			}
			if !sleep(ctx, wait) {
				return
			}
			wait = min(2*wait, retryMax)
		}
	}
}

// reconnectable says whether a watch may go on after err. A server that never
// answered is more likely a wrong address than one that restarts.
func reconnectable(err error, answered bool) bool {
	return errors.Is(err, errs.ConnectionLost) || answered && (errors.Is(err, errs.ServerUnreachable) || errors.Is(err, errs.ShuttingDown))
}

// Back-off between attempts to reach the server again.
const (
	retryMin = 50 * time.Millisecond
	retryMax = 2 * time.Second
)

// sleep waits for d and says whether ctx still holds.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
