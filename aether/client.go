package aether

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// ClientConfig configures the client end; the zero value works.
type ClientConfig struct {
	Token        string
	Agent        string // program and version, for logs
	Capabilities []string
	Window       int           // credit of a new stream towards us; 0: DefaultWindow
	KeepAlive    time.Duration // ping period when silent, both ways; 0: 30 s; negative: none
	WriteTimeout time.Duration // for the peer to take some data; 0: 30 s; negative: no limit
	Handshake    time.Duration // for the whole handshake; 0: 10 s
}

// NewClient does the handshake on conn and returns the client end. On error conn is closed.
func NewClient(ctx context.Context, conn net.Conn, cfg ClientConfig) (*Conn, error) {
	window, err := checkWindow(cfg.Window)
	if err != nil {
		conn.Close()
		return nil, err
	}
	keepAlive := orDefault(cfg.KeepAlive, defaultKeepAlive)
	c := newConn(conn, nil, window, orDefault(cfg.WriteTimeout, defaultWriteTimeout))
	c.ctx = context.Background()
	c.hello = &msg.Hello{MinVersion: Version, MaxVersion: Version, Capabilities: cfg.Capabilities, Agent: cfg.Agent,
		InitialCredit: uint32(window), KeepaliveMs: uint32(max(0, keepAlive.Milliseconds()))}
	hello := *c.hello
	hello.Token = cfg.Token
	err = c.handshake(ctx, orDefault(cfg.Handshake, defaultHandshake), func() error {
		if err := c.sendFirst(typeHello, &hello); err != nil {
			return err
		}
		return c.readWelcome()
	})
	if err != nil {
		return nil, err
	}
	go c.run()
	c.startKeepAlive(keepAlive)
	return c, nil
}

func orDefault(d, def time.Duration) time.Duration {
	if d == 0 {
		return def
	}
	return d
}

func checkWindow(n int) (int, error) {
	if n == 0 {
		return DefaultWindow, nil
	}
	if n < MinWindow || n > MaxWindow {
		return 0, errs.New(errs.BadRequest, "aether", "window out of range").With("window", itoa(n)).
			With("min", itoa(MinWindow)).With("max", itoa(MaxWindow))
	}
	return n, nil
}

func (c *Conn) readWelcome() error {
	h, payload, err := c.r.next()
	if err != nil {
		return err
	}
	if h.typ == typeGoAway {
		if err := c.handleGoAway(payload); err != nil {
			return err
		}
		return errs.New(errs.ShuttingDown, "aether.handshake", "the server is stopping")
	}
	if h.typ != typeWelcome {
		return broken("%s instead of WELCOME", h.typ)
	}
	w := new(msg.Welcome)
	if err := w.ParseWire(payload); err != nil {
		return broken("WELCOME: %v", err)
	}
	if w.Version != Version {
		return broken("the server chose version %d, which was not offered", w.Version)
	}
	if w.InitialCredit < MinWindow || w.InitialCredit > MaxWindow || w.MaxPayload != MaxPayload || w.MaxStreams == 0 {
		return broken("WELCOME with credit %d, payload %d, streams %d", w.InitialCredit, w.MaxPayload, w.MaxStreams)
	}
	c.welcome = w
	c.sendWindow = int(w.InitialCredit)
	c.maxStreams = int(w.MaxStreams)
	return nil
}

type requestIDKey struct{}

// WithRequestID makes the streams opened with ctx carry an id for the logs of every hop.
func WithRequestID(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, requestIDKey{}, id)
}

// open sends OPEN for s, whose method, target, requestID and peer are set.
func (c *Conn) open(s *Stream, flags uint8, timeout time.Duration, body []byte) (lead bool, err error) {
	m := msg.Open{Method: s.method, Target: s.target, TimeoutUs: uint64(timeout.Microseconds()), Body: body, RequestId: s.requestID}
	b := getBuffer(len(body) + len(s.method) + len(s.target) + len(s.requestID) + 64)
	b.b = m.AppendWire(b.b)
	defer b.put()
	if len(b.b) > MaxPayload {
		return false, tooLarge(s.method, len(b.b))
	}
	c.openMu.Lock()
	defer c.openMu.Unlock()
	if err := c.add(s); err != nil {
		return false, err
	}
	s.sendMu.Lock() // a relayed stream is already known to the other side's reader
	defer s.sendMu.Unlock()
	s.sendHead.encode(typeOpen, flags, s.id, 0, b.b)
	s.sendSeq = 1
	return c.w.add(&s.sendHead, b.b), nil
}

func (c *Conn) start(ctx context.Context, target, method string, req Message, flags uint8) (*Stream, error) {
	var timeout time.Duration
	if d, ok := ctx.Deadline(); ok {
		timeout = max(time.Until(d), time.Microsecond)
	}
	if ctx.Err() != nil {
		return nil, ctxError(ctx, method)
	}
	if err := c.w.wait(ctx); err != nil {
		return nil, err
	}
	s := newStream(c)
	s.target, s.method = target, method
	s.requestID, _ = ctx.Value(requestIDKey{}).(string)
	s.sendFin = flags&flagFin != 0
	var body *buffer
	if req != nil {
		body = getBuffer(256)
		body.b = req.AppendWire(body.b)
		defer func() { body.put() }()
	}
	var b []byte
	if body != nil {
		b = body.b
	}
	lead, err := c.open(s, flags, timeout, b)
	if err != nil {
		return nil, err
	}
	if lead {
		yield(c.active.Load())
		c.w.flush()
	}
	return s, nil
}

// Open starts an operation. The end of ctx cancels it, at any time in the stream's life.
func (c *Conn) Open(ctx context.Context, target, method string, req Message) (*Stream, error) {
	s, err := c.start(ctx, target, method, req, 0)
	if err != nil {
		return nil, err
	}
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, func() { s.abort(ctxError(ctx, s.method)) })
		s.mu.Lock()
		s.stop = stop
		ended := s.end != nil || s.err != nil
		s.mu.Unlock()
		if ended {
			stop()
		}
	}
	return s, nil
}

// Call does an operation without input and decodes its response into resp, which may be
// nil. Data and messages that the operation sends before its end are dropped.
func (c *Conn) Call(ctx context.Context, target, method string, req, resp Message) error {
	s, err := c.start(ctx, target, method, req, flagFin)
	if err != nil {
		return err
	}
	for {
		if _, err = s.Recv(ctx); err != nil {
			break
		}
	}
	s.mu.Lock()
	end := s.end
	s.mu.Unlock()
	if end == nil {
		if ctx.Err() != nil {
			s.abort(ctxError(ctx, method))
		}
		return err
	}
	if errors.Is(err, io.EOF) {
		err = s.Result(resp)
	}
	end.buf.put()
	return err
}

// Batch does many operations with one request, under the deadline of ctx. The error is of
// the batch as a whole; each operation's own is in its item.
func (c *Conn) Batch(ctx context.Context, b *msg.Batch) (*msg.BatchResult, error) {
	r := new(msg.BatchResult)
	if err := c.Call(ctx, batchTarget(b), MethodBatch, b, r); err != nil {
		return nil, err
	}
	if len(r.Items) != len(b.Ops) {
		return nil, errs.New(errs.ProtocolError, MethodBatch, "the server answered "+itoa(len(r.Items))+" of "+itoa(len(b.Ops))+" operations")
	}
	return r, nil
}
