package client

import (
	"context"
	"fmt"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// Batch carries many operations, on any sandboxes, in one round trip and under one
// deadline. Build it, Do it once, then read the Pending results.
type Batch struct {
	c    *Client
	req  msg.Batch
	take []func(*msg.End)
}

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
	return add(b, s, "process.exec", execRequest(cmd, opts), m, func() *Result { return resultOf(m) })
}

// ReadFile adds the reading of a file of at most 1 MiB.
func (b *Batch) ReadFile(s *Sandbox, path string) *Pending[[]byte] {
	m := new(msg.FileContent)
	return add(b, s, "file.get", &msg.ReadRequest{Path: path}, m, func() []byte { return m.Data })
}

// WriteFile adds the writing of a file of at most 1 MiB.
func (b *Batch) WriteFile(s *Sandbox, path string, data []byte, o WriteOptions) *Pending[*Entry] {
	m := new(msg.WriteResult)
	req := s.Files().write(path, o)
	req.Data = data
	return add(b, s, "file.put", req, m, func() *Entry { return m.Entry })
}

// Stat adds a stat.
func (b *Batch) Stat(s *Sandbox, path string) *Pending[*Entry] {
	m := new(Entry)
	return add(b, s, "file.stat", &msg.PathRequest{Path: path}, m, func() *Entry { return m })
}

// SessionExec adds a command of a session.
func (b *Batch) SessionExec(s *Session, cmd SessionCommand) *Pending[*SessionResult] {
	m := new(msg.SessionResult)
	req := &msg.SessionRunRequest{Id: s.info.Id, Command: cmd.Line, TimeoutMs: millis(cmd.Timeout), MaxOutput: cmd.MaxOutput}
	return add(b, s.sb, "session.exec", req, m, func() *SessionResult { return sessionResult(m) })
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

// Do sends the batch. Its error is the batch's own; those of operations are in their
// Pending results.
func (b *Batch) Do(ctx context.Context) error {
	if len(b.req.Ops) == 0 {
		return nil
	}
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
