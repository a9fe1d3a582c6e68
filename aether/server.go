package aether

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"sync"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// Handler does one operation and returns its response. ctx ends at the deadline, when the
// client cancels, and when the connection is lost; s must not be used after the return.
type Handler func(ctx context.Context, s *Stream) (Message, error)

// ServerConfig configures a Server. The zero value serves no method.
type ServerConfig struct {
	Handlers map[string]Handler
	Fallback Handler // for methods not in Handlers; nil: unknown_method

	// Auth checks the client's HELLO; its result is Stream.Principal. Nil lets everybody in.
	Auth func(ctx context.Context, hello *msg.Hello) (principal any, err error)

	// Route may hand a stream to another server: when it returns a Relay with a Conn, the
	// stream goes on there under the new target, frame by frame. Without: serve it here. It runs on a
	// goroutine of its own and may wait (for a sandbox to resume, say) until ctx ends.
	Route func(ctx context.Context, principal any, open *msg.Open) (Relay, error)

	// Quota bounds the operations that one principal has open over all its connections;
	// nil, or a nil result: no bound but MaxStreams.
	Quota func(principal any) Quota

	Node         string
	Generation   uint64
	Capabilities []string
	Window       int           // credit of a new stream towards us; 0: DefaultWindow
	MaxStreams   int           // per connection; 0: DefaultMaxStreams
	KeepAlive    time.Duration // at most this ping period; 0: 30 s; negative: no pings
	WriteTimeout time.Duration // for the peer to take some data; 0: 30 s; negative: no limit
	Handshake    time.Duration // 0: 10 s

	// Log is told of panics in handlers and of connections that ended with an error.
	Log func(event string, err error)
}

// Quota counts open operations. Its methods are called by the goroutines that read
// connections and must not wait.
type Quota interface {
	// Take counts one operation in, or says why it may not begin.
	Take() error
	// Release counts one out.
	Release()
}

// Server serves connections.
type Server struct {
	cfg     ServerConfig
	workers workers

	mu        sync.Mutex
	conns     map[*Conn]struct{}
	listeners map[net.Listener]struct{}
	stopping  bool
	wg        sync.WaitGroup // connections
}

// NewServer returns a server; it panics on a window out of range, a programming error.
func NewServer(cfg ServerConfig) *Server {
	window, err := checkWindow(cfg.Window)
	if err != nil {
		panic(err)
	}
	cfg.Window = window
	if cfg.MaxStreams <= 0 {
		cfg.MaxStreams = DefaultMaxStreams
	}
	if cfg.Log == nil {
		cfg.Log = func(string, error) {}
	}
	return &Server{cfg: cfg, conns: map[*Conn]struct{}{}, listeners: map[net.Listener]struct{}{}}
}

// Serve accepts connections until ctx ends or the server is shut down, then returns nil.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	s.mu.Lock()
	if s.stopping {
		s.mu.Unlock()
		l.Close()
		return nil
	}
	s.listeners[l] = struct{}{}
	s.mu.Unlock()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	defer func() {
		s.mu.Lock()
		delete(s.listeners, l)
		s.mu.Unlock()
		l.Close()
	}()
	pause := time.Millisecond
	for {
		conn, err := l.Accept()
		if err == nil {
			pause = time.Millisecond
			go func() {
				if err := s.ServeConn(ctx, conn); err != nil {
					s.cfg.Log("connection ended", err)
				}
			}()
			continue
		}
		s.mu.Lock()
		stopping := s.stopping
		s.mu.Unlock()
		if ctx.Err() != nil || stopping {
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("accept: %w", err)
		}
		s.cfg.Log("accept", err) // out of descriptors, say: it may pass
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
		pause = min(2*pause, time.Second)
	}
}

// ServeConn serves one connection until it ends. It returns nil if the client closed it
// or the server was shut down, and closes conn in any case.
func (s *Server) ServeConn(ctx context.Context, conn net.Conn) error {
	c := newConn(conn, s, s.cfg.Window, orDefault(s.cfg.WriteTimeout, defaultWriteTimeout))
	c.maxStreams = s.cfg.MaxStreams
	c.ctx, c.cancel = context.WithCancel(ctx)
	defer c.cancel()
	s.mu.Lock()
	if s.stopping {
		s.mu.Unlock()
		conn.Close()
		return errs.New(errs.ShuttingDown, "aether.serve", "the server is stopping")
	}
	s.conns[c] = struct{}{}
	s.wg.Add(1)
	s.mu.Unlock()
	s.workers.join()
	defer func() {
		s.workers.leave()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		s.wg.Done()
	}()
	err := c.handshake(ctx, orDefault(s.cfg.Handshake, defaultHandshake), func() error { return c.welcomeClient(ctx) })
	if err != nil {
		if errors.Is(err, errs.ShuttingDown) {
			return nil
		}
		return err
	}
	defer context.AfterFunc(ctx, func() {
		c.fatal(errs.New(errs.ShuttingDown, "aether.serve", "the server is stopping"))
	})()
	c.startKeepAlive(serverKeepAlive(s.cfg.KeepAlive, c.hello))
	c.run()
	if err := c.Err(); err != nil && !errors.Is(err, errPeerClosed) && !errors.Is(err, errs.ShuttingDown) {
		return err
	}
	return nil
}

// Shutdown stops accepting, tells every client to open no new streams, and waits for the
// open ones until ctx ends; then it closes the connections.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.stopping = true
	for l := range s.listeners {
		l.Close()
	}
	conns := make([]*Conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	bye := errs.New(errs.ShuttingDown, "aether.serve", "the server is stopping")
	for _, c := range conns {
		go c.drain(ctx, bye)
	}
	done := make(chan struct{})
	go func() { s.wg.Wait(); close(done) }()
	<-done // every drain ends with ctx
	return ctx.Err()
}

// drain lets the open streams end until ctx does, then closes the connection.
func (c *Conn) drain(ctx context.Context, bye *errs.Error) {
	idle := make(chan struct{})
	c.mu.Lock()
	c.draining = bye
	c.idle = idle
	if c.active.Load() == 0 {
		c.idle = nil
		close(idle)
	}
	c.mu.Unlock()
	c.goAway(nil, goodbye)
	select {
	case <-idle:
		c.w.settle(goodbye)
		c.end(bye)
	case <-c.done:
	case <-ctx.Done():
		c.fatal(bye)
	}
}

// Close ends every connection at once.
func (s *Server) Close() error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	s.Shutdown(ctx)
	return nil
}

func (c *Conn) handleOpen(h *header, payload []byte) error {
	c.mu.Lock()
	last, draining, n := c.lastID, c.draining, c.active.Load()
	c.mu.Unlock()
	switch {
	case h.stream%2 == 0 || h.stream <= last:
		return broken("OPEN of stream %d after %d", h.stream, last)
	case h.seq != 0:
		return broken("OPEN of stream %d with sequence %d", h.stream, h.seq)
	}
	buf := copyBuffer(payload)
	open, err := msg.ParseOpen(buf.b)
	if err != nil {
		return broken("OPEN of stream %d: %v", h.stream, err)
	}
	s := newStream(c)
	s.id, s.recvSeq, s.recvFin = h.stream, 1, h.flags&flagFin != 0
	s.method, s.target, s.requestID, s.principal = open.Method, open.Target, open.RequestId, c.principal
	s.body, s.bodyBuf = open.Body, buf
	c.mu.Lock()
	c.lastID = s.id
	refused := draining
	if refused == nil && n >= int64(c.maxStreams) {
		refused = tooManyStreams(c.maxStreams)
	}
	if refused == nil && c.quota != nil {
		refused = errs.Of(c.quota.Take())
	}
	if refused == nil {
		c.streams[s.id] = s
		c.active.Add(1)
	}
	c.mu.Unlock()
	if refused != nil {
		m := msg.End{Error: ToStatus(refused)}
		payload := m.AppendWire(nil)
		var h rawHeader
		h.encode(typeEnd, flagFin, s.id, 0, payload)
		return c.queued(c, c.w.add(&h, payload))
	}
	ctx, cancel := streamContext(c.ctx, open)
	s.cancel = cancel
	c.server.workers.run(job{ctx, c, s, open})
	return nil
}

// streamContext derives a stream's context from its connection's.
func streamContext(parent context.Context, open *msg.Open) (context.Context, context.CancelFunc) {
	if open.RequestId != "" {
		parent = WithRequestID(parent, open.RequestId)
	}
	const most = uint64(1<<63-1) / uint64(time.Microsecond)
	if open.TimeoutUs == 0 || open.TimeoutUs > most {
		return context.WithCancel(parent)
	}
	return context.WithTimeout(parent, time.Duration(open.TimeoutUs)*time.Microsecond)
}

// serve runs one stream to its end.
func (c *Conn) serve(ctx context.Context, s *Stream, open *msg.Open) {
	to, err := c.server.route(ctx, s.principal, open)
	if err == nil && to.Conn != nil {
		if err = c.splice(ctx, s, to); err == nil {
			s.cancel() // the readers forward it from here on, to who keeps the deadline
			return
		}
		to.done()
	}
	var m Message
	if err == nil {
		m, err = c.server.dispatch(ctx, s)
	}
	s.finish(m, err)
	s.cancel()
	c.release()
}

func (s *Server) route(ctx context.Context, principal any, open *msg.Open) (to Relay, err error) {
	if s.cfg.Route == nil {
		return Relay{}, nil
	}
	defer s.recovered(open.Method, &err)
	return s.cfg.Route(ctx, principal, open)
}

// dispatch runs the handler of a stream or of an operation in a batch.
func (s *Server) dispatch(ctx context.Context, st *Stream) (m Message, err error) {
	h := s.cfg.Handlers[st.method]
	switch {
	case h != nil:
	case st.method == MethodBatch:
		h = s.batch
	case s.cfg.Fallback != nil:
		h = s.cfg.Fallback
	default:
		return nil, errs.New(errs.UnknownMethod, "aether", "no method "+quote(st.method))
	}
	defer s.recovered(st.method, &err)
	return h(ctx, st)
}

// recovered turns a panic of a handler into its error: one bad request must not end the
// other operations of the process.
func (s *Server) recovered(method string, err *error) {
	if v := recover(); v != nil {
		*err = errs.New(errs.InternalError, method, fmt.Sprintf("panic: %v", v))
		s.cfg.Log("panic in "+method, fmt.Errorf("%v\n%s", v, debug.Stack()))
	}
}

func quote(s string) string { return fmt.Sprintf("%.100q", s) }

// encodeEnd returns the END of an operation, which may fail for its size.
func encodeEnd(method string, m Message, err error) *buffer {
	b := getBuffer(256)
	if err == nil {
		body := getBuffer(256)
		if m != nil {
			body.b = m.AppendWire(body.b)
		}
		if len(body.b) <= MaxPayload-16 {
			b = b.grow(len(body.b) + 16)
			b.b = (&msg.End{Body: body.b}).AppendWire(b.b)
			body.put()
			return b
		}
		err = tooLarge(method, len(body.b))
		body.put()
	}
	b.b = (&msg.End{Error: ToStatus(err)}).AppendWire(b.b)
	if len(b.b) > MaxPayload {
		e := *errs.Of(err)
		e.Message, e.Cause, e.Details = "an error too long to send", nil, nil
		b.b = (&msg.End{Error: ToStatus(&e)}).AppendWire(b.b[:0])
	}
	return b
}

// finish ends a stream at the server.
func (s *Stream) finish(m Message, err error) {
	live := s.c.remove(s)
	s.fail(errs.New(errs.StateConflict, s.method, "the operation has ended"))
	if live {
		b := encodeEnd(s.method, m, err)
		s.frame(typeEnd, flagFin, b.b, true)
		b.put()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range s.queue[s.head:] {
		it.buf.put()
	}
	s.queue, s.head = nil, 0
	s.held.buf.put()
	s.held = item{}
	s.body = nil
	s.bodyBuf.put()
	s.bodyBuf = nil
}

// Unary makes a Handler of a function from request to response.
func Unary[Req, Resp any, PReq interface {
	*Req
	Message
}, PResp interface {
	*Resp
	Message
}](f func(context.Context, *Stream, *Req) (*Resp, error)) Handler {
	return func(ctx context.Context, s *Stream) (Message, error) {
		req := new(Req)
		if err := s.Parse(PReq(req)); err != nil {
			return nil, err
		}
		resp, err := f(ctx, s, req)
		if err != nil {
			return nil, err
		}
		return PResp(resp), nil
	}
}
