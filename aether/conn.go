package aether

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// Defaults and limits of a connection; the configurations can change the defaults.
const (
	DefaultWindow     = 256 << 10 // bytes of credit of a new stream, each way
	MinWindow         = 64 << 10
	MaxWindow         = 16 << 20
	DefaultMaxStreams = 4096

	defaultKeepAlive    = 30 * time.Second
	defaultWriteTimeout = 30 * time.Second
	defaultHandshake    = 10 * time.Second
	// missedPings is how many silent keep-alive periods mean that the peer is dead.
	missedPings = 3
	// goodbye bounds the wait for a last GOAWAY to be taken.
	goodbye = time.Second
	// maxCredit bounds the credit that a peer may pile up on one stream.
	maxCredit = 1 << 31
)

// Conn is one end of a connection. All methods are safe for concurrent use.
type Conn struct {
	conn   net.Conn
	w      writer
	r      frameReader
	server *Server // nil at the client end

	ctx       context.Context // ends with the connection; parent of the handlers'
	cancel    context.CancelFunc
	principal any
	quota     Quota // server; nil: no bound
	hello     *msg.Hello
	welcome   *msg.Welcome

	sendWindow int // what the peer grants to a new stream
	recvWindow int // what this end grants
	maxStreams int

	openMu sync.Mutex // orders stream ids as their OPEN frames

	mu       sync.Mutex
	streams  map[uint64]*Stream
	lastID   uint64
	draining *errs.Error // set by GOAWAY, sent or received: no new streams
	err      *errs.Error
	closed   bool
	active   atomic.Int64 // streams open, and handlers not yet returned
	done     chan struct{}
	idle     chan struct{} // server: closed when draining and the last stream has ended

	dirty  []*Conn // reader only: connections that wait for its flush
	ticker *time.Timer
	missed int // ticker only
}

func newConn(conn net.Conn, server *Server, window int, writeTimeout time.Duration) *Conn {
	c := &Conn{conn: conn, server: server, streams: map[uint64]*Stream{}, done: make(chan struct{}),
		recvWindow: window, maxStreams: DefaultMaxStreams}
	c.w.init(conn, writeTimeout, c.writeFailed)
	c.r = frameReader{conn: conn, maxPayload: maxHandshake, beforeWait: c.flushDirty, relayed: c.isRelayed}
	return c
}

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err says why the connection ended; nil before that and after Close.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		return nil
	}
	return c.err
}

// Welcome returns the server's half of the handshake; nil at the server end.
func (c *Conn) Welcome() *msg.Welcome { return c.welcome }

// Hello returns the client's half of the handshake, without the token.
func (c *Conn) Hello() *msg.Hello { return c.hello }

// Streams returns the number of open streams.
func (c *Conn) Streams() int { return int(c.active.Load()) }

// RemoteAddr returns the peer's address.
func (c *Conn) RemoteAddr() net.Addr { return c.conn.RemoteAddr() }

// Close ends the connection and every stream on it.
func (c *Conn) Close() error {
	c.end(nil)
	return nil
}

// Fail is Close with a reason: every stream that the connection's end cuts off ends with
// err, whose code travels to where a relayed one came from.
func (c *Conn) Fail(err error) { c.end(errs.Of(err)) }

// lost returns the error of a stream that ended with its connection.
func (c *Conn) lost() *errs.Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		return errs.New(errs.ConnectionLost, "aether", "the connection is closed")
	}
	e := *c.err
	return &e
}

// run reads until the connection ends.
func (c *Conn) run() {
	err := c.readFrames()
	c.flushDirty()
	var e *errs.Error
	var told *peerError
	switch {
	case errors.As(err, &told):
		c.end(told.e)
	case errors.As(err, &e) && e.Code == errs.ProtocolError:
		c.fatal(e)
	case errors.As(err, &e):
		c.end(e)
	default:
		c.end(c.explain(err))
	}
	c.r.release()
}

// errPeerClosed marks a close between frames. It is not io.EOF, which means success to
// the callers of Recv.
var errPeerClosed = errors.New("end of connection")

// explain makes an error out of a failed read.
func (c *Conn) explain(err error) *errs.Error {
	c.w.mu.Lock()
	werr := c.w.err
	c.w.mu.Unlock()
	if werr != nil && !errors.Is(err, io.EOF) {
		err = werr
	}
	c.mu.Lock()
	draining := c.draining
	c.mu.Unlock()
	var e *errs.Error
	switch {
	case errors.As(err, &e):
		return e
	case draining != nil:
		return errs.New(errs.ShuttingDown, "aether.read", "the peer closed the connection after GOAWAY")
	case errors.Is(err, io.EOF):
		return errs.New(errs.ConnectionLost, "aether.read", "the peer closed the connection").Because(errPeerClosed)
	}
	return errs.New(errs.ConnectionLost, "aether.read", "the connection broke").Because(err)
}

func (c *Conn) readFrames() error {
	for {
		h, payload, err := c.r.next()
		if err != nil {
			return err
		}
		if err := c.handle(&h, payload); err != nil {
			return err
		}
	}
}

// handle acts on one frame. It runs on the reader's goroutine and never waits.
func (c *Conn) handle(h *header, payload []byte) error {
	switch h.typ {
	case typePing:
		return c.control(c, typePong, payload)
	case typePong:
		return nil
	case typeGoAway:
		return c.handleGoAway(payload)
	case typeHello, typeWelcome:
		return broken("%s after the handshake", h.typ)
	case typeOpen:
		if c.server == nil {
			return broken("OPEN from the server")
		}
		return c.handleOpen(h, payload)
	}
	c.mu.Lock()
	s := c.streams[h.stream]
	last := c.lastID
	c.mu.Unlock()
	if s == nil {
		if h.stream > last || h.stream%2 == 0 {
			return broken("%s on stream %d, which was never opened", h.typ, h.stream)
		}
		return nil // it crossed the end of the stream on the way
	}
	return s.handle(h, payload)
}

// control queues a frame of the connection itself, to be flushed before the next read.
func (c *Conn) control(to *Conn, typ frameType, payload []byte) error {
	var h rawHeader
	h.encode(typ, 0, 0, 0, payload)
	return c.queued(to, to.w.add(&h, payload))
}

// queued notes that the reader of c has added to the writer of to.
func (c *Conn) queued(to *Conn, lead bool) error {
	if lead {
		c.dirty = append(c.dirty, to)
		return nil
	}
	if to.w.pending() <= queueMax {
		return nil
	}
	if to != c && to.server != nil { // a client that does not read must not end the shared upstream
		to.end(errs.New(errs.ConnectionLost, "aether.relay", "the client takes no data"))
		return nil
	}
	return broken("the peer makes this end queue more than %d bytes", queueMax)
}

func (c *Conn) flushDirty() {
	for i, to := range c.dirty {
		c.dirty[i] = nil
		to.w.flushOrHandOver()
	}
	c.dirty = c.dirty[:0]
}

func (c *Conn) handleGoAway(payload []byte) error {
	var m msg.GoAway
	if err := m.ParseWire(payload); err != nil {
		return broken("GOAWAY: %v", err)
	}
	if m.Error != nil {
		return &peerError{fromStatus(m.Error)}
	}
	c.mu.Lock()
	if c.draining == nil {
		c.draining = errs.New(errs.ShuttingDown, "aether.open", "the peer takes no new streams")
	}
	c.mu.Unlock()
	return nil
}

// peerError is what the peer has told in its GOAWAY: it is not answered.
type peerError struct{ e *errs.Error }

func (p *peerError) Error() string { return p.e.Error() }

// add registers a stream under the next id. The caller holds openMu.
func (c *Conn) add(s *Stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed && c.err == nil:
		return errs.New(errs.ConnectionLost, "aether.open", "the connection is closed")
	case c.closed:
		e := *c.err
		return &e
	case c.draining != nil:
		e := *c.draining
		return &e
	case len(c.streams) >= c.maxStreams:
		return tooManyStreams(c.maxStreams)
	}
	if c.lastID == 0 {
		c.lastID = 1
	} else {
		c.lastID += 2
	}
	s.id = c.lastID
	c.streams[s.id] = s
	c.active.Add(1)
	return nil
}

func tooManyStreams(limit int) *errs.Error {
	return errs.New(errs.NodeFull, "aether.open", "too many streams on one connection").With("max_streams", itoa(limit))
}

// remove forgets a stream; false if it was already gone.
func (c *Conn) remove(s *Stream) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.streams[s.id] != s {
		return false
	}
	delete(c.streams, s.id)
	return true
}

// release takes a stream or a handler off the count and ends a drained connection.
func (c *Conn) release() {
	if c.quota != nil {
		c.quota.Release()
	}
	if c.active.Add(-1) > 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle != nil && c.active.Load() == 0 {
		close(c.idle)
		c.idle = nil
	}
}

// fatal tells the peer why and ends the connection.
func (c *Conn) fatal(e *errs.Error) {
	c.goAway(ToStatus(e), goodbye)
	c.end(e)
}

// goAway sends GOAWAY, which the peer must take within timeout. With a status it is the
// last frame.
func (c *Conn) goAway(status *msg.Status, timeout time.Duration) {
	m := msg.GoAway{Error: status}
	payload := m.AppendWire(nil)
	var h rawHeader
	h.encode(typeGoAway, 0, 0, 0, payload)
	timer := time.AfterFunc(timeout, func() { c.conn.SetWriteDeadline(time.Now()) })
	defer timer.Stop()
	add := c.w.add
	if status != nil {
		add = c.w.addLast
	}
	if add(&h, payload) {
		c.w.flushAll()
		return
	}
	c.w.settle(timeout)
}

// writeFailed lets the reader find out first: the peer's last words may be in the socket.
func (c *Conn) writeFailed(err error) {
	var e *errs.Error
	if errors.As(err, &e) {
		c.end(e)
		return
	}
	c.conn.SetReadDeadline(time.Now().Add(goodbye))
}

// end closes the connection and fails every stream; the first call decides why.
func (c *Conn) end(e *errs.Error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return
	}
	c.closed = true
	c.err = e
	streams := make([]*Stream, 0, len(c.streams))
	for _, s := range c.streams {
		streams = append(streams, s)
	}
	clear(c.streams)
	ticker := c.ticker
	c.mu.Unlock()
	if ticker != nil {
		ticker.Stop()
	}
	c.w.stop(net.ErrClosed)
	c.conn.Close()
	if c.cancel != nil {
		c.cancel()
	}
	// First of all: who learns from a stream that it is lost must not take it for usable.
	close(c.done)
	slices.SortFunc(streams, func(a, b *Stream) int { return int(int64(a.id) - int64(b.id)) })
	for _, s := range streams {
		s.connLost()
	}
}

// startKeepAlive pings a silent peer every period and ends the connection of a dead one.
func (c *Conn) startKeepAlive(period time.Duration) {
	if period <= 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.ticker = time.AfterFunc(period, func() { c.tick(period) })
}

func (c *Conn) tick(period time.Duration) {
	if c.r.heard.Swap(false) {
		c.missed = 0
	} else if c.missed++; c.missed >= missedPings {
		c.end(errs.New(errs.ConnectionLost, "aether.keepalive", "the peer has been silent for "+(period*missedPings).String()))
		return
	}
	if c.missed > 0 {
		var token [8]byte
		binary.BigEndian.PutUint64(token[:], uint64(c.missed))
		var h rawHeader
		h.encode(typePing, 0, 0, 0, token[:])
		if c.w.add(&h, token[:]) {
			c.w.flushOrHandOver()
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.ticker.Reset(period)
	}
}
