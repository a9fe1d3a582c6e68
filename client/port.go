package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// Dial connects to a TCP port inside the sandbox, on its loopback unless host names
// another address. errs.PortClosed says that nothing listens.
func (s *Sandbox) Dial(ctx context.Context, host string, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, errs.New(errs.BadRequest, "port.dial", fmt.Sprintf("%d is not a port", port)).With("field", "port")
	}
	return s.dial(ctx, &msg.DialRequest{Port: uint32(port), Host: host}, fmt.Sprintf("port %d", port))
}

// DialUnix connects to a Unix socket inside the sandbox.
func (s *Sandbox) DialUnix(ctx context.Context, path string) (net.Conn, error) {
	return s.dial(ctx, &msg.DialRequest{UnixPath: path}, path)
}

func (s *Sandbox) dial(ctx context.Context, req *msg.DialRequest, what string) (net.Conn, error) {
	// The connection outlives the context of the dial, as with net.Dialer.
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	st, err := s.open(life, "port.dial", req)
	if err == nil {
		err = connected(life, st)
	}
	if !stop() && st != nil {
		st.Cancel()
		err = s.c.unreachable(ctx, ctx.Err())
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("dial %s: %w", what, err)
	}
	c := &portConn{st: st, life: life, cancel: cancel, addr: portAddr(s.id + "/" + what)}
	c.read.init(life)
	c.write.init(life)
	return c, nil
}

// connected waits for the first message, which says that something listens.
func connected(ctx context.Context, st *aether.Stream) error {
	f, err := st.Recv(ctx)
	if isEOF(err) {
		err = st.Result(nil)
	}
	if err == nil && !f.IsMessage {
		err = errs.New(errs.ProtocolError, "port.dial", "the stream began without the word that the connection is made")
	}
	if err != nil {
		st.Cancel()
	}
	return err
}

// Ports lists what listens inside the sandbox.
func (s *Sandbox) Ports(ctx context.Context) ([]*msg.PortInfo, error) {
	var l msg.PortList
	if err := s.read(ctx, "port.list", &msg.Empty{}, &l); err != nil {
		return nil, fmt.Errorf("list ports: %w", err)
	}
	return l.Ports, nil
}

type portAddr string

func (portAddr) Network() string  { return "dsec" }
func (a portAddr) String() string { return string(a) }

// portConn is a net.Conn over a stream.
type portConn struct {
	st          *aether.Stream
	life        context.Context // ends with Close
	cancel      context.CancelFunc
	addr        portAddr
	read, write deadline
	readMu      sync.Mutex
	rest        []byte
	ended       bool // the other side has sent all it had
	closeOnce   sync.Once
}

func (c *portConn) Read(p []byte) (int, error) {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	for len(c.rest) == 0 {
		if len(p) == 0 {
			return 0, nil
		}
		ctx := c.read.context()
		if c.life.Err() != nil {
			return 0, c.fault("read", ctx, net.ErrClosed)
		}
		if c.ended {
			return 0, io.EOF
		}
		f, err := c.st.Recv(ctx)
		if isEOF(err) {
			err = c.st.Result(nil)
			c.ended = err == nil
		}
		if err != nil {
			return 0, c.fault("read", ctx, err)
		}
		c.rest, c.ended = f.Payload, c.ended || f.IsMessage // the one message after the first
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

func (c *portConn) Write(p []byte) (int, error) {
	ctx := c.write.context()
	if err := c.st.Send(ctx, aether.KindInput, p); err != nil {
		return 0, c.fault("write", ctx, err)
	}
	return len(p), nil
}

func (c *portConn) fault(op string, ctx context.Context, err error) error {
	switch {
	case c.life.Err() != nil:
		err = net.ErrClosed
	case ctx.Err() != nil:
		err = os.ErrDeadlineExceeded
	}
	return &net.OpError{Op: op, Net: "dsec", Addr: c.addr, Err: err}
}

// CloseWrite tells the other side that no more comes; reading goes on.
func (c *portConn) CloseWrite() error { return c.st.CloseSend() }

func (c *portConn) Close() error {
	err := net.ErrClosed
	c.closeOnce.Do(func() {
		c.cancel()
		c.st.Cancel()
		err = nil
	})
	return err
}

func (c *portConn) LocalAddr() net.Addr  { return portAddr("client") }
func (c *portConn) RemoteAddr() net.Addr { return c.addr }

func (c *portConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *portConn) SetReadDeadline(t time.Time) error  { return c.read.set(c.life, t) }
func (c *portConn) SetWriteDeadline(t time.Time) error { return c.write.set(c.life, t) }

// deadline is one direction's: a context that calls in progress use, ended by a timer
// that a later set may move.
type deadline struct {
	mu     sync.Mutex
	ctx    context.Context
	cancel context.CancelFunc
	timer  *time.Timer
}

func (d *deadline) init(life context.Context) { d.ctx, d.cancel = context.WithCancel(life) }

func (d *deadline) context() context.Context {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ctx
}

func (d *deadline) set(life context.Context, t time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if life.Err() != nil {
		return net.ErrClosed
	}
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if d.ctx.Err() != nil { // passed: calls from now on get a new chance
		d.ctx, d.cancel = context.WithCancel(life)
	}
	if t.IsZero() {
		return nil
	}
	// The cancel of this moment's context: a timer that fires late must not end another's.
	cancel := d.cancel
	if left := time.Until(t); left > 0 {
		d.timer = time.AfterFunc(left, cancel)
	} else {
		cancel()
	}
	return nil
}
