package aether

import (
	"context"
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
	touch   func()  // those of the Relay; of the client's half
	done    func()
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

// Batched tells whether the operation is one of a batch: then it has a request and a
// response, and nothing else.
func (s *Stream) Batched() bool { return s.c == nil }

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
