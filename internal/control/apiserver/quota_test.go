package apiserver_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

// One token's connections and streams are bounded; another token does not notice.
func TestTokenLimits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *control.Config, _ *controltest.Config) { c.TokenConns, c.TokenStreams = 2, 3 })
	sb := w.create(hollow)
	greedy, modest := w.token(v1.RightSandbox), w.token(v1.RightSandbox, v1.RightRead)
	a, b := dialAether(t, w, greedy), dialAether(t, w, greedy)
	if _, err := tryAether(t, w, greedy); err == nil || err.Error() != "429 Too Many Requests" {
		t.Errorf("a third connection gives %v", err)
	}
	p := w.problem("token_limit", "GET", "/v1/events?follow=true", nil, as(greedy))
	if p.Details["resource"] != "connections" || p.Details["limit"] != "2" || !p.Retryable || p.Infra {
		t.Errorf("%+v", p)
	}

	var open []*aether.Stream
	for _, c := range []*aether.Conn{a, b, a} {
		s, err := c.Open(t.Context(), sb.ID, "process.start", &msg.StartRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Recv(t.Context()); err != nil { // it is open at the other end
			t.Fatal(err)
		}
		open = append(open, s)
	}
	if _, err := echo(t.Context(), b, sb.ID, "x"); !errors.Is(err, errs.TokenLimit) || errs.Of(err).Details["resource"] != "streams" {
		t.Errorf("a fourth stream gives %v", err)
	}
	if out, err := echo(t.Context(), dialAether(t, w, modest), sb.ID, "x"); err != nil || out != "x" {
		t.Errorf("another token: %q, %v", out, err)
	}

	open[0].Cancel()
	eventually(t, "a stream that ended is free again", func() bool { _, err := echo(t.Context(), b, sb.ID, "x"); return err == nil })
	a.Close()
	eventually(t, "a connection that ended is free again", func() bool {
		c, err := tryAether(t, w, greedy)
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
	// What is left of the closed connection counts no more: one stream is open.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 2 {
		s, err := b.Open(ctx, sb.ID, "process.start", &msg.StartRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Recv(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// The operations of a batch that is taken apart are streams at the edge, and count.
func TestTokenLimitsCountBatches(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *control.Config, _ *controltest.Config) { c.TokenStreams = 1 })
	one, two := w.create(hollow), w.create(hollow)
	c := dialAether(t, w, rootToken)
	res, err := c.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{
		{Method: "process.exec", Target: one.ID}, {Method: "process.exec", Target: two.ID},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for i, item := range res.Items {
		if !errors.Is(aether.FromStatus(item.Error), errs.TokenLimit) {
			t.Errorf("operation %d gives %+v", i, item)
		}
	}
}
