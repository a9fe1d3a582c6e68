package aether

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

func ops(methods ...string) []*msg.BatchOp {
	var list []*msg.BatchOp
	for _, m := range methods {
		list = append(list, &msg.BatchOp{Method: m, Target: "sb"})
	}
	return list
}

func codes(r *msg.BatchResult) (list []errs.Code) {
	for _, it := range r.Items {
		if it.Error == nil {
			list = append(list, "")
		} else {
			list = append(list, errs.Code(it.Error.Code))
		}
	}
	return list
}

func TestBatch(t *testing.T) {
	t.Parallel()
	h := testHandlers()
	h["input"] = func(ctx context.Context, s *Stream) (Message, error) {
		if _, err := s.Recv(ctx); !errors.Is(err, io.EOF) {
			return nil, errors.New("no FIN at once")
		}
		return nil, nil
	}
	c, _ := startPair(t, ServerConfig{Handlers: h}, ClientConfig{})
	for _, parallel := range []uint32{0, 4, 1000} {
		r, err := c.Batch(t.Context(), &msg.Batch{Parallel: parallel, Ops: ops("where", "fail", "input", "source", "nope", "batch", "panic", "where")})
		if err != nil {
			t.Fatal(err)
		}
		want := []errs.Code{"", errs.PathNotFound, "", "", errs.UnknownMethod, errs.NotSupported, errs.InternalError, ""}
		for i, got := range codes(r) {
			if got != want[i] {
				t.Errorf("parallel %d, op %d: %q, want %q", parallel, i, got, want[i])
			}
		}
		var m msg.Selector
		if err := m.ParseWire(r.Items[7].Body); err != nil || m.Tag != "sb|" {
			t.Errorf("%q, %v", m.Tag, err)
		}
	}
	// Data output cannot travel in a batch.
	op := &msg.BatchOp{Method: "source", Body: (&msg.ReadRequest{Length: 5}).AppendWire(nil)}
	r, err := c.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{op}})
	if err != nil || codes(r)[0] != errs.NotSupported {
		t.Fatalf("%v, %v", codes(r), err)
	}
	if r, err := c.Batch(t.Context(), &msg.Batch{}); err != nil || len(r.Items) != 0 {
		t.Fatalf("empty batch: %v, %v", r, err)
	}
}

func TestBatchStopOnError(t *testing.T) {
	t.Parallel()
	var ran atomic.Int64
	h := testHandlers()
	h["count"] = func(context.Context, *Stream) (Message, error) { ran.Add(1); return nil, nil }
	c, _ := startPair(t, ServerConfig{Handlers: h}, ClientConfig{})
	r, err := c.Batch(t.Context(), &msg.Batch{StopOnError: true, Ops: ops("count", "fail", "count", "count")})
	if err != nil {
		t.Fatal(err)
	}
	if got := codes(r); got[0] != "" || got[1] != errs.PathNotFound || got[2] != errs.RequestCanceled || got[3] != errs.RequestCanceled || ran.Load() != 1 {
		t.Fatalf("%v, ran %d", got, ran.Load())
	}
}

func TestBatchHasOneDeadline(t *testing.T) {
	t.Parallel()
	p := rawClient(t, ServerConfig{})
	body := (&msg.Batch{Ops: ops("hang", "echo")}).AppendWire(nil)
	p.write(rawFrame(typeOpen, flagFin, 1, 0, (&msg.Open{Method: MethodBatch, TimeoutUs: 5000, Body: body}).AppendWire(nil)))
	_, payload := p.expect(typeEnd)
	status, body, err := msg.ParseEnd(payload)
	if err != nil || status != nil {
		t.Fatal(FromStatus(status), err)
	}
	var r msg.BatchResult
	if err := r.ParseWire(body); err != nil {
		t.Fatal(err)
	}
	if got := codes(&r); got[0] != errs.DeadlineExceeded || got[1] != errs.DeadlineExceeded {
		t.Fatal(got)
	}
	c, _ := startPair(t, ServerConfig{}, ClientConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if _, err := c.Batch(ctx, &msg.Batch{Parallel: 2, Ops: ops("hang", "hang")}); err != nil && !errors.Is(err, errs.Deadline) {
		t.Fatal(err)
	}
}

func TestBatchLimits(t *testing.T) {
	t.Parallel()
	c, _ := startPair(t, ServerConfig{Handlers: map[string]Handler{
		"big":   func(context.Context, *Stream) (Message, error) { return rawMessage(make([]byte, 400<<10)), nil },
		"small": func(context.Context, *Stream) (Message, error) { return nil, nil },
	}}, ClientConfig{})
	r, err := c.Batch(t.Context(), &msg.Batch{Ops: ops("big", "big", "big", "small")})
	if err != nil {
		t.Fatal(err)
	}
	if got := codes(r); got[0] != "" || got[1] != "" || got[2] != errs.BodyTooLarge || got[3] != "" {
		t.Fatal(got)
	}
	many := &msg.Batch{}
	for range maxBatchOps + 1 {
		many.Ops = append(many.Ops, &msg.BatchOp{Method: "small"})
	}
	if _, err := c.Batch(t.Context(), many); !errors.Is(err, errs.TooLarge) {
		t.Fatal(err)
	}
	many.Ops = many.Ops[1:]
	if _, err := c.Batch(t.Context(), many); err != nil {
		t.Fatal(err)
	}
}
