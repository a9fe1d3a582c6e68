package aether

import (
	"context"
	"sync"
	"sync/atomic"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// MethodBatch is the method that carries many operations; every server has it.
const MethodBatch = "batch"

const (
	maxBatchOps      = 4096
	maxBatchParallel = 64
)

// batchTarget is where the batch as a whole goes: to the one target of all its
// operations, so that it can be relayed whole, or to the server that is asked.
func batchTarget(b *msg.Batch) string {
	if len(b.Ops) == 0 {
		return ""
	}
	target := b.Ops[0].Target
	for _, op := range b.Ops {
		if op.Target != target {
			return ""
		}
	}
	return target
}

// batch is the handler of MethodBatch.
func (s *Server) batch(ctx context.Context, st *Stream) (Message, error) {
	if st.c == nil {
		return nil, errs.New(errs.NotSupported, MethodBatch, "a batch cannot hold a batch")
	}
	var b msg.Batch
	if err := st.Parse(&b); err != nil {
		return nil, err
	}
	if len(b.Ops) > maxBatchOps {
		return nil, errs.New(errs.BodyTooLarge, MethodBatch, itoa(len(b.Ops))+" operations, the limit is "+itoa(maxBatchOps))
	}
	r := batchRun{server: s, stream: st, batch: &b, items: make([]*msg.End, len(b.Ops))}
	if n := min(int(b.Parallel), len(b.Ops), maxBatchParallel); n > 1 {
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() { r.work(ctx) })
		}
		wg.Wait()
	} else {
		r.work(ctx)
	}
	return &msg.BatchResult{Items: r.items}, nil
}

// batchRun is one batch at work.
type batchRun struct {
	server *Server
	stream *Stream
	batch  *msg.Batch
	items  []*msg.End
	next   atomic.Int64
	failed atomic.Bool
	size   atomic.Int64 // of the results so far
}

func (r *batchRun) work(ctx context.Context) {
	for {
		i := int(r.next.Add(1)) - 1
		if i >= len(r.items) {
			return
		}
		end := r.do(ctx, r.batch.Ops[i])
		if end.Error != nil {
			r.failed.Store(true)
		}
		// All results share one frame: what does not fit is an error of its operation.
		if n := int64(len(end.Body)) + 16; r.size.Add(n) > MaxPayload-int64(len(r.items))*256-4096 && end.Error == nil {
			r.size.Add(-n)
			end = &msg.End{Error: ToStatus(errs.New(errs.BodyTooLarge, MethodBatch, "the results of the batch exceed one frame"))}
			r.failed.Store(true)
		}
		r.items[i] = end
	}
}

func (r *batchRun) do(ctx context.Context, op *msg.BatchOp) *msg.End {
	switch {
	case ctx.Err() != nil:
		return &msg.End{Error: ToStatus(ctxError(ctx, op.Method))}
	case r.batch.StopOnError && r.failed.Load():
		return &msg.End{Error: ToStatus(errs.New(errs.RequestCanceled, MethodBatch, "an operation of the batch failed before"))}
	}
	open := &msg.Open{Method: op.Method, Target: op.Target, Body: op.Body, RequestId: r.stream.requestID}
	if open.Target == "" {
		open.Target = r.stream.target
	}
	to, err := r.server.route(ctx, r.stream.principal, open)
	if err == nil && to.Conn != nil {
		defer to.done()
		// A stream of its own at the next hop, so it counts as one here too.
		if q := r.stream.c.quota; q != nil {
			if err := q.Take(); err != nil {
				return &msg.End{Error: ToStatus(err)}
			}
			defer q.Release()
		}
		end := new(msg.End)
		if err := to.Conn.Call(ctx, to.Target, op.Method, rawMessage(op.Body), (*rawBody)(end)); err != nil {
			return &msg.End{Error: ToStatus(err)}
		}
		return end
	}
	var m Message
	if err == nil {
		s := &Stream{method: op.Method, target: open.Target, requestID: open.RequestId, body: op.Body, principal: r.stream.principal}
		m, err = r.server.dispatch(ctx, s)
	}
	if err != nil {
		return &msg.End{Error: ToStatus(err)}
	}
	end := new(msg.End)
	if m != nil {
		end.Body = m.AppendWire(nil)
	}
	return end
}

// rawMessage sends bytes that are already encoded.
type rawMessage []byte

func (m rawMessage) AppendWire(b []byte) []byte { return append(b, m...) }
func (m rawMessage) ParseWire([]byte) error     { return nil }

// rawBody receives a response as it is.
type rawBody msg.End

func (m *rawBody) AppendWire(b []byte) []byte { return append(b, m.Body...) }
func (m *rawBody) ParseWire(b []byte) error {
	m.Body = append([]byte(nil), b...)
	return nil
}
