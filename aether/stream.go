package aether

import (
	"context"
	"encoding/binary"
	"io"
	"strconv"
	"sync"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// Message is a protobuf message of aether/msg.
type Message = msg.Message

// Frame is what Recv returns: raw data or one message.
type Frame struct {
	IsMessage bool
	Kind      Kind
	Payload   []byte // valid until the next Recv on the stream
	Last      bool   // the peer sends nothing after it
}

// chunk is the size that Send splits data into: large enough for throughput, small
// enough that streams take turns.
const chunk = 64 << 10

// Stream is one operation. Send and SendMessage may be called from several goroutines,
// Recv from one at a time.
type Stream struct {
	c         *Conn // nil inside a batch
	id        uint64
	method    string
	target    string
	requestID string
	body      []byte
	bodyBuf   *buffer
	principal any
	cancel    context.CancelFunc // server: ends the handler's ctx
	stop      func() bool        // client: unhooks the ctx given to Open

	sendMu   sync.Mutex // orders the frames of this end
	sendSeq  uint32
	sendFin  bool      // nothing may follow
	sendHead rawHeader // of the frame being sent: here, because a local one would escape

	recvSeq uint32 // reader only
	mu      sync.Mutex
	queue   []item // received, not yet taken; from head on
	head    int
	held    item  // what Recv returned last
	credit  int64 // what we may send
	balance int64 // what the peer may send
	owed    int   // consumed and not yet returned to the peer
	recvFin bool  // the peer has sent its last frame
	end     *item // client: the END frame
	err     *errs.Error
	peer    *Stream // the other half of a relayed stream
	ready   chan struct{}
	funded  chan struct{} // closed when credit arrives; nil when nobody waits
}

// item is one received frame.
type item struct {
	buf   *buffer
	typ   frameType
	flags uint8
}

func (it *item) cost() int {
	h := header{typ: it.typ, length: uint32(len(it.buf.b))}
	return h.cost()
}

func newStream(c *Conn) *Stream {
	return &Stream{c: c, credit: int64(c.sendWindow), balance: int64(c.recvWindow), ready: make(chan struct{}, 1)}
}

// Target returns the sandbox that the operation is for.
func (s *Stream) Target() string { return s.target }

// Method returns the operation's name.
func (s *Stream) Method() string { return s.method }

// RequestID returns the id that names the request in the logs of every hop.
func (s *Stream) RequestID() string { return s.requestID }

// Body returns the encoded request; valid until the handler returns.
func (s *Stream) Body() []byte { return s.body }

// Principal returns what the server's Auth made of the client's token.
func (s *Stream) Principal() any { return s.principal }

// Parse decodes the request.
func (s *Stream) Parse(req Message) error {
	if err := req.ParseWire(s.body); err != nil {
		return errs.New(errs.BadRequest, s.method, "request body").Because(err)
	}
	return nil
}

func (s *Stream) wake() {
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

// fail ends the stream at this end with err, unless it has already ended.
func (s *Stream) fail(err *errs.Error) {
	s.mu.Lock()
	if s.err == nil && s.end == nil {
		s.err = err
	}
	funded := s.funded
	s.funded = nil
	s.mu.Unlock()
	if funded != nil {
		close(funded)
	}
	if s.cancel != nil {
		s.cancel()
	}
	s.wake()
}

func (s *Stream) failure() error {
	if s.err == nil {
		return nil
	}
	e := *s.err
	return &e
}

// frame sends one frame of this stream; it does not wait for credit. last marks the end
// of what this end sends. Reports false if the stream has ended before.
func (s *Stream) frame(typ frameType, flags uint8, payload []byte, last bool) bool {
	s.sendMu.Lock()
	if s.sendFin && typ != typeCredit && typ != typeCancel {
		s.sendMu.Unlock()
		return false
	}
	s.sendHead.encode(typ, flags, s.id, s.sendSeq, payload)
	s.sendSeq++
	s.sendFin = s.sendFin || last
	direct := len(payload) >= directSize
	var lead bool
	if direct {
		lead = s.c.w.addDirect(&s.sendHead, payload)
	} else {
		lead = s.c.w.add(&s.sendHead, payload)
	}
	s.sendMu.Unlock()
	switch {
	case lead && direct:
		s.c.w.flushDirect(payload)
	case lead:
		yield(s.c.active.Load())
		s.c.w.flush()
	}
	return true
}

// Send sends p as DATA of a kind, split as needed, and waits for credit. When it returns,
// p may be used again.
func (s *Stream) Send(ctx context.Context, kind Kind, p []byte) error {
	if kind > flagKind {
		return errs.New(errs.BadRequest, "aether.send", "kind out of range")
	}
	for len(p) > 0 {
		n := min(len(p), chunk)
		if err := s.send(ctx, typeData, uint8(kind), p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// SendMessage sends one message and waits for credit.
func (s *Stream) SendMessage(ctx context.Context, m Message) error {
	b := getBuffer(256)
	defer func() { b.put() }()
	b.b = m.AppendWire(b.b)
	if len(b.b) > MaxPayload {
		return tooLarge("aether.send", len(b.b))
	}
	return s.send(ctx, typeMessage, 0, b.b)
}

func tooLarge(phase string, n int) *errs.Error {
	return errs.New(errs.BodyTooLarge, phase, "a message of "+itoa(n)+" bytes, the limit is "+itoa(MaxPayload))
}

func itoa(n int) string { return strconv.Itoa(n) }

func (s *Stream) send(ctx context.Context, typ frameType, flags uint8, p []byte) error {
	if s.c == nil {
		return errs.New(errs.NotSupported, "batch", "an operation inside a batch cannot send data; call it on a stream of its own")
	}
	h := header{typ: typ, length: uint32(len(p))}
	if err := s.takeCredit(ctx, h.cost()); err != nil {
		return err
	}
	if err := s.c.w.wait(ctx); err != nil {
		s.addCredit(int64(h.cost()))
		return err
	}
	if !s.frame(typ, flags, p, false) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.err != nil {
			return s.failure()
		}
		return errs.New(errs.StateConflict, "aether.send", "the sending side of the stream is closed")
	}
	return nil
}

// takeCredit waits until the balance is positive and takes n from it; it may become negative.
func (s *Stream) takeCredit(ctx context.Context, n int) error {
	for {
		s.mu.Lock()
		switch {
		case s.err != nil:
			defer s.mu.Unlock()
			return s.failure()
		case s.end != nil:
			defer s.mu.Unlock()
			return errs.New(errs.StateConflict, "aether.send", "the server has ended the stream")
		case s.credit > 0:
			s.credit -= int64(n)
			s.mu.Unlock()
			return nil
		}
		if s.funded == nil {
			s.funded = make(chan struct{})
		}
		funded := s.funded
		s.mu.Unlock()
		select {
		case <-funded:
		case <-ctx.Done():
			return ctxError(ctx, "aether.send")
		}
	}
}

// addCredit reports false if the peer grants more than maxCredit. It also returns the
// other half of a relayed stream, to which the credit must then be passed on: read in the
// same critical section, so that a splice at this moment counts the credit once.
func (s *Stream) addCredit(n int64) (peer *Stream, ok bool) {
	s.mu.Lock()
	s.credit += n
	peer, ok = s.peer, s.credit <= maxCredit
	funded := s.funded
	if s.credit > 0 {
		s.funded = nil
	} else {
		funded = nil
	}
	s.mu.Unlock()
	if funded != nil {
		close(funded)
	}
	return peer, ok
}

// CloseSend tells the server that no more data comes.
func (s *Stream) CloseSend() error {
	if s.c == nil || s.c.server != nil {
		return errs.New(errs.NotSupported, "aether.send", "a server ends its side by returning from the handler")
	}
	s.frame(typeData, flagFin, nil, true)
	return nil
}

// Recv returns the next frame. It returns io.EOF at the peer's FIN (server end) or after
// the END of a successful operation (client end), else the operation's error.
func (s *Stream) Recv(ctx context.Context) (Frame, error) {
	if s.c == nil {
		return Frame{}, io.EOF
	}
	for {
		s.mu.Lock()
		credit := s.settle(s.held)
		s.held = item{}
		it, ok, err := s.pop()
		if ok {
			s.held = it
		}
		s.mu.Unlock()
		if credit > 0 {
			s.sendCredit(credit)
		}
		if err != nil {
			return Frame{}, err
		}
		if ok && len(it.buf.b) == 0 && it.typ == typeData {
			continue // a bare FIN
		}
		if ok {
			return Frame{IsMessage: it.typ == typeMessage, Kind: Kind(it.flags & flagKind),
				Payload: it.buf.b, Last: it.flags&flagFin != 0}, nil
		}
		select {
		case <-s.ready:
		case <-ctx.Done():
			return Frame{}, ctxError(ctx, "aether.recv")
		}
	}
}

// pop takes the next frame off the queue, or says how the stream ended. Data that came
// before the end is delivered first, except after a failure of this end.
func (s *Stream) pop() (item, bool, error) {
	if s.head < len(s.queue) {
		it := s.queue[s.head]
		s.queue[s.head] = item{}
		if s.head++; s.head == len(s.queue) {
			s.queue, s.head = s.queue[:0], 0
		}
		return it, true, nil
	}
	switch {
	case s.end != nil:
		if e := s.endError(); e != nil {
			return item{}, false, e
		}
		return item{}, false, io.EOF
	case s.err != nil:
		return item{}, false, s.failure()
	case s.recvFin:
		return item{}, false, io.EOF
	}
	return item{}, false, nil
}

// settle accounts for a consumed frame and returns the credit to send, if any: it is
// returned by half windows.
func (s *Stream) settle(it item) uint32 {
	if it.buf == nil {
		return 0
	}
	s.owed += it.cost()
	it.buf.put()
	if s.owed < s.c.recvWindow/2 || s.recvFin || s.end != nil || s.err != nil {
		return 0
	}
	n := s.owed
	s.owed = 0
	s.balance += int64(n)
	return uint32(n)
}

func (s *Stream) sendCredit(n uint32) {
	var p [4]byte
	binary.BigEndian.PutUint32(p[:], n)
	s.frame(typeCredit, 0, p[:], false)
}

// endError returns the error that END carries.
func (s *Stream) endError() error {
	status, _, err := msg.ParseEnd(s.end.buf.b)
	if err != nil {
		return errs.New(errs.ProtocolError, s.method, "END of the operation").Because(err)
	}
	return FromStatus(status)
}

// Result decodes the response after Recv has returned io.EOF; resp may be nil.
func (s *Stream) Result(resp Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.end == nil && s.err != nil:
		return s.failure()
	case s.end == nil:
		return errs.New(errs.StateConflict, "aether.result", "the operation has not ended")
	}
	status, body, err := msg.ParseEnd(s.end.buf.b)
	if err == nil && status != nil {
		return FromStatus(status)
	}
	if err == nil && resp != nil {
		err = resp.ParseWire(body)
	}
	if err != nil {
		return errs.New(errs.ProtocolError, s.method, "response of the operation").Because(err)
	}
	return nil
}

// Cancel ends the operation: the server's ctx ends, and so does this end. It does nothing
// after the end of the stream and at the server end.
func (s *Stream) Cancel() {
	s.abort(errs.New(errs.RequestCanceled, s.method, "the request was canceled").Because(context.Canceled))
}

func (s *Stream) abort(e *errs.Error) {
	if s.c == nil || s.c.server != nil || !s.c.remove(s) {
		return
	}
	s.fail(e)
	s.unhook()
	s.frame(typeCancel, 0, nil, true)
	s.c.release()
}

// connLost ends the stream after its connection.
func (s *Stream) connLost() {
	s.mu.Lock()
	peer := s.peer
	s.mu.Unlock()
	if peer != nil {
		s.relayLost(peer)
		s.c.release()
		return
	}
	s.fail(s.c.lost())
	if s.c.server == nil {
		s.unhook()
		s.c.release()
	}
}

// unhook detaches the stream from the ctx given to Open.
func (s *Stream) unhook() {
	s.mu.Lock()
	stop := s.stop
	s.mu.Unlock()
	if stop != nil {
		stop()
	}
}

// handle takes one frame from the reader.
func (s *Stream) handle(h *header, payload []byte) error {
	if h.seq != s.recvSeq {
		return broken("%s on stream %d: sequence %d, want %d", h.typ, h.stream, h.seq, s.recvSeq)
	}
	s.recvSeq++
	switch h.typ {
	case typeData, typeMessage:
		return s.handleData(h, payload)
	case typeCredit:
		return s.handleCredit(h, payload)
	case typeCancel:
		if s.c.server == nil {
			return broken("CANCEL from the server on stream %d", h.stream)
		}
		s.handleCancel()
	case typeEnd:
		if s.c.server != nil {
			return broken("END from the client on stream %d", h.stream)
		}
		return s.handleEnd(payload)
	}
	return nil
}

func (s *Stream) handleData(h *header, payload []byte) error {
	fin := h.flags&flagFin != 0
	s.mu.Lock()
	switch cost := int64(h.cost()); {
	case s.recvFin:
		s.mu.Unlock()
		return broken("%s after FIN on stream %d", h.typ, h.stream)
	case fin && s.c.server == nil:
		s.mu.Unlock()
		return broken("%s with FIN from the server on stream %d", h.typ, h.stream)
	case cost > 0 && s.balance <= 0:
		s.mu.Unlock()
		return broken("%s without credit on stream %d", h.typ, h.stream)
	default:
		s.balance -= cost
	}
	s.recvFin = fin
	if peer := s.peer; peer != nil {
		s.mu.Unlock()
		return s.c.forward(peer, h.typ, h.flags, payload)
	}
	if s.err == nil {
		s.queue = append(s.queue, item{buf: copyBuffer(payload), typ: h.typ, flags: h.flags})
	}
	s.mu.Unlock()
	s.wake()
	return nil
}

func (s *Stream) handleCredit(h *header, payload []byte) error {
	n := binary.BigEndian.Uint32(payload)
	peer, ok := s.addCredit(int64(n))
	if n == 0 || !ok {
		return broken("CREDIT of %d on stream %d", n, h.stream)
	}
	if peer == nil {
		return nil
	}
	peer.mu.Lock()
	peer.balance += int64(n)
	peer.mu.Unlock()
	return s.c.forward(peer, typeCredit, 0, payload)
}

func (s *Stream) handleCancel() {
	s.c.remove(s)
	s.mu.Lock()
	peer := s.peer
	s.mu.Unlock()
	if peer != nil {
		s.relayCanceled(peer)
		s.c.release()
		return
	}
	s.fail(errs.New(errs.RequestCanceled, s.method, "the client canceled the request").Because(context.Canceled))
}

func (s *Stream) handleEnd(payload []byte) error {
	if !s.c.remove(s) {
		return nil
	}
	if s.peer != nil { // set before the stream was registered
		err := s.c.forwardEnd(s.peer, payload)
		s.c.release()
		return err
	}
	s.c.release()
	s.mu.Lock()
	s.end = &item{buf: copyBuffer(payload), typ: typeEnd}
	funded := s.funded
	s.funded = nil
	s.mu.Unlock()
	if funded != nil {
		close(funded)
	}
	s.unhook()
	s.wake()
	return nil
}
