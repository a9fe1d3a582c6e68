package aether

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// handshake runs f under a time limit and ctx; on error it closes the connection.
func (c *Conn) handshake(ctx context.Context, limit time.Duration, f func() error) error {
	deadline := time.Now().Add(limit)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	c.conn.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { c.conn.SetDeadline(time.Unix(1, 0)) })
	err := f()
	if !stop() && err == nil {
		err = os.ErrDeadlineExceeded // ctx ended just now and has spoilt the deadline
	}
	if err == nil {
		err = c.conn.SetDeadline(time.Time{})
	}
	if err == nil {
		c.r.maxPayload = MaxPayload
		return nil
	}
	var e *errs.Error
	var told *peerError
	switch {
	case errors.As(err, &told):
		e = told.e
	case ctx.Err() != nil && c.server != nil:
		e = errs.New(errs.ShuttingDown, "aether.serve", "the server is stopping")
		c.conn.SetDeadline(time.Now().Add(goodbye))
		c.goAway(ToStatus(e), goodbye)
	case ctx.Err() != nil:
		e = ctxError(ctx, "aether.handshake")
	case errors.As(err, &e):
		c.conn.SetDeadline(time.Now().Add(goodbye))
		c.goAway(ToStatus(e), goodbye)
	case errors.Is(err, os.ErrDeadlineExceeded):
		e = errs.New(errs.DeadlineExceeded, "aether.handshake", "the peer did not finish the handshake within "+limit.String())
		c.conn.SetDeadline(time.Now().Add(goodbye))
		c.goAway(ToStatus(e), goodbye)
	case errors.Is(err, io.EOF):
		e = errs.New(errs.ConnectionLost, "aether.handshake", "the peer closed the connection").Because(errPeerClosed)
	default:
		e = errs.New(errs.ConnectionLost, "aether.handshake", "the connection broke").Because(err)
	}
	c.end(e)
	c.r.release()
	return e
}

// sendFirst writes a handshake frame at once.
func (c *Conn) sendFirst(typ frameType, m Message) error {
	payload := m.AppendWire(nil)
	if len(payload) > maxHandshake {
		return errs.New(errs.BodyTooLarge, "aether.handshake", typ.String()+" of "+itoa(len(payload))+" bytes")
	}
	var h rawHeader
	h.encode(typ, 0, 0, 0, payload)
	_, err := c.conn.Write(append(h[:], payload...))
	return err
}

// welcomeClient is the server's half of the handshake.
func (c *Conn) welcomeClient(ctx context.Context) error {
	cfg := &c.server.cfg
	h, payload, err := c.r.next()
	if err != nil {
		return err
	}
	if h.typ != typeHello {
		return broken("%s instead of HELLO", h.typ)
	}
	hello := new(msg.Hello)
	if err := hello.ParseWire(payload); err != nil {
		return broken("HELLO: %v", err)
	}
	if hello.MinVersion > Version || hello.MaxVersion < Version {
		return errs.New(errs.NotSupported, "aether.handshake", "no common protocol version").
			With("client", itoa(int(hello.MinVersion))+"-"+itoa(int(hello.MaxVersion))).With("server", itoa(Version))
	}
	if hello.InitialCredit < MinWindow || hello.InitialCredit > MaxWindow {
		return errs.New(errs.BadRequest, "aether.handshake", "initial_credit out of range").
			With("min", itoa(MinWindow)).With("max", itoa(MaxWindow))
	}
	if cfg.Auth != nil {
		if c.principal, err = cfg.Auth(ctx, hello); err != nil {
			return errs.Of(errs.Wrap(errs.BadToken, "aether.auth", "the token was refused", err))
		}
	}
	if cfg.Quota != nil {
		c.quota = cfg.Quota(c.principal)
	}
	hello.Token = ""
	c.hello = hello
	c.sendWindow = int(hello.InitialCredit)
	c.welcome = &msg.Welcome{Version: Version, Capabilities: cfg.Capabilities, Node: cfg.Node, Generation: cfg.Generation,
		InitialCredit: uint32(c.recvWindow), MaxStreams: uint32(c.maxStreams), MaxPayload: MaxPayload}
	return c.sendFirst(typeWelcome, c.welcome)
}

// serverKeepAlive is the period of a server's pings: what the client asked for, unless the
// server wants them more often.
func serverKeepAlive(cfg time.Duration, hello *msg.Hello) time.Duration {
	wanted := time.Duration(hello.KeepaliveMs) * time.Millisecond
	cfg = orDefault(cfg, defaultKeepAlive)
	if wanted == 0 || cfg < 0 {
		return 0
	}
	return max(min(wanted, cfg), 10*time.Millisecond)
}
