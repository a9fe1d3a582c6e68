package client

import (
	"context"
	"sync"
	"time"

	"dsec/aether"
)

// dialTimeout bounds a dial whose callers have more patience; they all get its error.
const dialTimeout = 15 * time.Second

// link is one Aether connection: dialled when it is first needed, and again by the
// first call after it broke. Callers that come during a dial share it.
type link struct {
	mu     sync.Mutex
	conn   *aether.Conn
	dial   *dialling
	closed bool
}

type dialling struct {
	done chan struct{}
	conn *aether.Conn
	err  error
}

func (l *link) get(ctx context.Context, c *Client) (*aether.Conn, error) {
	l.mu.Lock()
	if l.conn != nil {
		select {
		case <-l.conn.Done():
			l.conn = nil
		default:
			conn := l.conn
			l.mu.Unlock()
			return conn, nil
		}
	}
	d := l.dial
	if d == nil {
		d = &dialling{done: make(chan struct{})}
		l.dial = d
		// Not bound to this caller's context: others may wait for it too.
		go l.run(context.WithoutCancel(ctx), c, d)
	}
	l.mu.Unlock()
	select {
	case <-d.done:
		return d.conn, d.err
	case <-ctx.Done():
		return nil, c.unreachable(ctx, ctx.Err())
	}
}

func (l *link) run(ctx context.Context, c *Client, d *dialling) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := c.upgrade(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dial = nil
	if err == nil && l.closed {
		conn.Close()
		conn, err = nil, errClosed()
	}
	d.conn, d.err = conn, err
	l.conn = conn
	close(d.done)
}

// drop makes the next get dial; streams that run on conn go on.
func (l *link) drop(conn *aether.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == conn {
		l.conn = nil
	}
}

func (l *link) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.conn != nil {
		l.conn.Close()
		l.conn = nil
	}
}
