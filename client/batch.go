package client

import (
	"context"
	"fmt"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// Batch carries many operations, on any sandboxes, in one round trip and under one
// deadline. Build it, Do it once, then read the Pending results.
type Batch struct {
	// Timeout bounds Do, as does the deadline of its context. 0: ten minutes for each
	// operation, or a command's own timeout where it has one, shared by those that run
	// at once, and an hour at most.
	Timeout time.Duration

	c    *Client
	req  msg.Batch
	take []func(*msg.End)
	sum  time.Duration // of the operations' times
	most time.Duration // the longest of them
}

const (
	batchOpTime  = 10 * time.Minute // for an operation that has no time limit
	maxBatchTime = time.Hour
	batchAtOnce  = 64 // operations of a batch that a server does at a time, at most
)

// Batch starts a batch. parallel operations run at once (0 or 1: in order); with
// stopOnError those after a failure are not done.
func (c *Client) Batch(parallel int, stopOnError bool) *Batch {
	return &Batch{c: c, req: msg.Batch{Parallel: uint32(max(parallel, 0)), StopOnError: stopOnError}}
}

// Pending is the result of one operation, once its batch is done.
type Pending[T any] struct {
	val T
	err error
}

// Get returns the outcome; before Do it is an error.
func (p *Pending[T]) Get() (T, error) { return p.val, p.err }

// Exec adds a command, as [Sandbox.Exec].
func (b *Batch) Exec(s *Sandbox, cmd Cmd, opts ...ExecOption) *Pending[*Result] {
	m := new(msg.ExecResult)
	b.allow(cmd.Timeout)
	return add(b, s, "process.exec", execRequest(cmd, opts), m, func() *Result { return resultOf(m) })
}

// ReadFile adds the reading of a file of at most 1 MiB.
func (b *Batch) ReadFile(s *Sandbox, path string) *Pending[[]byte] {
	m := new(msg.FileContent)
	b.allow(0)
	return add(b, s, "file.get", &msg.ReadRequest{Path: path}, m, func() []byte { return m.Data })
}

// WriteFile adds the writing of a file of at most 1 MiB.
func (b *Batch) WriteFile(s *Sandbox, path string, data []byte, o WriteOptions) *Pending[*Entry] {
	m := new(msg.WriteResult)
	req := s.Files().write(path, o)
	req.Data = data
	b.allow(0)
	return add(b, s, "file.put", req, m, func() *Entry { return m.Entry })
}

// Stat adds a stat.
func (b *Batch) Stat(s *Sandbox, path string) *Pending[*Entry] {
	m := new(Entry)
	b.allow(0)
	return add(b, s, "file.stat", &msg.PathRequest{Path: path}, m, func() *Entry { return m })
}

// SessionExec adds a command of a session.
func (b *Batch) SessionExec(s *Session, cmd SessionCommand) *Pending[*SessionResult] {
	m := new(msg.SessionResult)
	req := &msg.SessionRunRequest{Id: s.info.Id, Command: cmd.Line, TimeoutMs: millis(cmd.Timeout), MaxOutput: cmd.MaxOutput}
	b.allow(cmd.Timeout)
	return add(b, s.sb, "session.exec", req, m, func() *SessionResult { return sessionResult(m) })
}

// allow counts the time that one more operation may take.
func (b *Batch) allow(limit time.Duration) {
	if limit <= 0 {
		limit = batchOpTime
	}
	limit = min(limit, maxBatchTime)
	b.sum, b.most = min(b.sum+limit, batchAtOnce*maxBatchTime), max(b.most, limit)
}

// timeout is how long Do may take.
func (b *Batch) timeout() time.Duration {
	if b.Timeout > 0 {
		return b.Timeout
	}
	// With several at once, the longest may be the last to begin.
	atOnce := time.Duration(min(max(b.req.Parallel, 1), batchAtOnce))
	return min(min(b.sum, b.sum/atOnce+b.most)+guestGrace, maxBatchTime)
}

func add[T any](b *Batch, s *Sandbox, method string, req, resp aether.Message, val func() T) *Pending[T] {
	p := &Pending[T]{err: errs.New(errs.BadRequest, "client.batch", "the batch was not done")}
	b.req.Ops = append(b.req.Ops, &msg.BatchOp{Method: method, Target: s.id, Body: req.AppendWire(nil)})
	b.take = append(b.take, func(e *msg.End) {
		switch {
		case e.Error != nil:
			p.err = aether.FromStatus(e.Error)
		default:
			if p.err = resp.ParseWire(e.Body); p.err == nil {
				p.val = val()
			}
		}
	})
	return p
}

// Do sends the batch and waits for all results until ctx or the batch's timeout ends it,
// which ends what still runs. Its error is the batch's own; those of operations are in
// their Pending results.
func (b *Batch) Do(ctx context.Context) error {
	if len(b.req.Ops) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, b.timeout())
	defer cancel()
	conn, err := b.c.conns[0].get(ctx, b.c)
	if err != nil {
		return err
	}
	res, err := conn.Batch(ctx, &b.req)
	if err != nil {
		return fmt.Errorf("batch of %d: %w", len(b.req.Ops), err)
	}
	if len(res.Items) != len(b.take) {
		return errs.New(errs.ProtocolError, "client.batch", fmt.Sprintf("%d results for %d operations", len(res.Items), len(b.take)))
	}
	for i, take := range b.take {
		take(res.Items[i])
	}
	return nil
}
