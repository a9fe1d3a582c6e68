package client

import (
	"context"
	"errors"
	"hash/fnv"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Sandbox is a handle on one sandbox: cheap, stateless, for any number of goroutines.
type Sandbox struct {
	c    *Client
	id   string
	info v1.Sandbox
}

// Sandbox returns a handle on the sandbox with this id, without asking the server.
func (c *Client) Sandbox(id string) *Sandbox { return c.handle(v1.Sandbox{ID: id}) }

func (c *Client) handle(info v1.Sandbox) *Sandbox { return &Sandbox{c: c, id: info.ID, info: info} }

// ID returns the sandbox's id.
func (s *Sandbox) ID() string { return s.id }

// Info returns what the create answered; of a handle made by [Client.Sandbox], the id only.
func (s *Sandbox) Info() v1.Sandbox { return s.info }

// Get returns the sandbox as it is now, with its usage.
func (s *Sandbox) Get(ctx context.Context) (*v1.Sandbox, error) { return s.c.Get(ctx, s.id) }

// Delete removes the sandbox and returns when nothing of it is left.
func (s *Sandbox) Delete(ctx context.Context) error { return s.c.Delete(ctx, s.id) }

// Guest returns what the agent inside says of itself.
func (s *Sandbox) Guest(ctx context.Context) (*msg.GuestInfo, error) {
	info := new(msg.GuestInfo)
	if err := s.read(ctx, "guest.info", &msg.Empty{}, info); err != nil {
		return nil, err
	}
	return info, nil
}

// link picks the connection; one sandbox always uses the same one.
func (s *Sandbox) link() *link {
	if len(s.c.conns) == 1 {
		return &s.c.conns[0]
	}
	h := fnv.New32a()
	h.Write([]byte(s.id))
	return &s.c.conns[h.Sum32()%uint32(len(s.c.conns))]
}

// on runs f with the sandbox's connection, and once more with a new one if the old one
// takes no more streams.
func (s *Sandbox) on(ctx context.Context, f func(*aether.Conn) error) error {
	l := s.link()
	conn, err := l.get(ctx, s.c)
	if err != nil {
		return err
	}
	if err = f(conn); !refused(err) {
		return err
	}
	l.drop(conn)
	if conn, err = l.get(ctx, s.c); err != nil {
		return err
	}
	return f(conn)
}

// call does one unary operation. It is not repeated when the connection breaks: the
// operation may have been done.
func (s *Sandbox) call(ctx context.Context, method string, req, resp aether.Message) error {
	return s.on(ctx, func(conn *aether.Conn) error { return conn.Call(ctx, s.id, method, req, resp) })
}

// read is call for what changes nothing: it is tried once more on a new connection.
func (s *Sandbox) read(ctx context.Context, method string, req, resp aether.Message) error {
	var used *aether.Conn
	err := s.on(ctx, func(conn *aether.Conn) error {
		used = conn
		return conn.Call(ctx, s.id, method, req, resp)
	})
	if errors.Is(err, errs.ConnectionLost) && ctx.Err() == nil {
		if used != nil {
			settle(ctx, used)
		}
		err = s.call(ctx, method, req, resp)
	}
	return err
}

// lostSettles is how long a connection that a call has lost may take to end: a write can
// fail before the reader has learnt why. One that was lost further on does not end.
const lostSettles = 200 * time.Millisecond

func settle(ctx context.Context, conn *aether.Conn) {
	ctx, cancel := context.WithTimeout(ctx, lostSettles)
	defer cancel()
	select {
	case <-conn.Done():
	case <-ctx.Done():
	}
}

func (s *Sandbox) open(ctx context.Context, method string, req aether.Message) (st *aether.Stream, err error) {
	err = s.on(ctx, func(conn *aether.Conn) (err error) {
		st, err = conn.Open(ctx, s.id, method, req)
		return err
	})
	return st, err
}

// discard receives what is left of a stream and parses its result.
func discard(ctx context.Context, st *aether.Stream, resp aether.Message) error {
	for {
		if _, err := st.Recv(ctx); err != nil {
			return finish(st, err, resp)
		}
	}
}

// finish turns the error that ended a stream into its outcome.
func finish(st *aether.Stream, err error, resp aether.Message) error {
	if !isEOF(err) {
		return err
	}
	return st.Result(resp)
}

// Client returns the client that the handle was made from.
func (s *Sandbox) Client() *Client { return s.c }
