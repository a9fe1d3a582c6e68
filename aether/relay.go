package aether

import (
	"context"
	"encoding/binary"
	"sync"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// relayOpenLimit refuses new streams to an upstream connection that does not drain.
const relayOpenLimit = 8 << 20

// Relay is where a stream goes on.
type Relay struct {
	Conn   *Conn // nil: it is served here
	Target string
	// Touch, if set, is called for each frame of input that the client sends after OPEN, before it is passed on;
	// by the goroutine that reads the client's connection, so it must not wait.
	Touch func()
	// Done, if set, is called once when the stream has ended, as Touch is.
	Done func()
}

func (r *Relay) done() {
	if r.Done != nil {
		r.Done()
	}
}

// splice joins a stream of a client (s, at this server) with a new stream of up. From
// then on the readers of both connections forward its frames without decoding them, and
// credit goes end to end, so a relay holds at most what the ends grant each other. It
// never blocks a reader: frames for a stuck client wait in that client's own queue.
func (c *Conn) splice(ctx context.Context, s *Stream, to Relay) error {
	up := to.Conn
	if up.server != nil {
		return errs.New(errs.InternalError, "aether.relay", "the route is not a client connection")
	}
	if up.w.pending() > relayOpenLimit {
		return errs.New(errs.EdgeUnreachable, "aether.relay", "the next hop does not take data")
	}
	// A window that the far end does not have cannot be promised away.
	if up.sendWindow < c.recvWindow || c.sendWindow < up.recvWindow {
		return errs.New(errs.NotSupported, "aether.relay", "the windows of the two ends do not fit").
			With("client", itoa(c.sendWindow)).With("server", itoa(up.sendWindow))
	}
	var timeout time.Duration
	if d, ok := ctx.Deadline(); ok {
		timeout = max(time.Until(d), time.Microsecond)
	}
	u := newStream(up)
	u.method, u.target, u.requestID, u.peer = s.method, to.Target, s.requestID, s
	leadUp, leadDown := false, false
	defer func() {
		if leadUp {
			up.w.flushOrHandOver()
		}
		if leadDown {
			c.w.flushOrHandOver()
		}
	}()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.failure()
	}
	flags := uint8(0)
	if s.recvFin && s.head == len(s.queue) {
		flags = flagFin
	}
	lead, err := up.open(u, flags, timeout, s.body)
	if err != nil {
		return err
	}
	leadUp = leadUp || lead
	s.body = nil
	s.bodyBuf.put()
	s.bodyBuf = nil
	// u sees no frame of s before peer is set below, but may answer at once.
	if n := s.credit - int64(up.recvWindow); n > 0 {
		u.mu.Lock()
		u.balance += n
		u.mu.Unlock()
		leadUp = u.relayCredit(n) || leadUp
	}
	if n := int64(up.sendWindow - c.recvWindow); n > 0 {
		s.balance += n
		leadDown = s.relayCredit(n) || leadDown
	}
	for _, it := range s.queue[s.head:] {
		leadUp = u.relayFrame(it.typ, it.flags, it.buf.b) || leadUp
		it.buf.put()
	}
	s.queue, s.head = nil, 0
	s.peer, s.touch, s.done = u, to.Touch, to.Done
	return nil
}

// relayFrame queues a frame of this stream and reports whether the caller must flush.
func (s *Stream) relayFrame(typ frameType, flags uint8, payload []byte) (lead bool) {
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	if s.sendFin && typ != typeCredit && typ != typeCancel {
		return false
	}
	s.sendHead.encode(typ, flags, s.id, s.sendSeq, payload)
	s.sendSeq++
	s.sendFin = s.sendFin || flags&flagFin != 0
	return s.c.w.add(&s.sendHead, payload)
}

// relayed tells whoever routed the stream that it has ended. s is the client's half.
func (s *Stream) relayed() {
	s.mu.Lock()
	done := s.done
	s.done = nil
	s.mu.Unlock()
	if done != nil {
		done()
	}
}

func (s *Stream) relayCredit(n int64) bool {
	var p [4]byte
	binary.BigEndian.PutUint32(p[:], uint32(n))
	return s.relayFrame(typeCredit, 0, p[:])
}

// forward passes a frame that the reader of c has got to the other half of its stream.
func (c *Conn) forward(to *Stream, typ frameType, flags uint8, payload []byte) error {
	return c.queued(to.c, to.relayFrame(typ, flags, payload))
}

// pass is forward for data, which may be on its way unverified.
func (c *Conn) pass(to *Stream, h *header, payload []byte) error {
	if !h.unverified {
		return c.forward(to, h.typ, h.flags, payload)
	}
	return c.queued(to.c, to.relayPassed(h, payload))
}

func (s *Stream) relayPassed(h *header, payload []byte) (lead bool) {
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	if s.sendFin {
		return false
	}
	s.sendHead.encodePassed(h, h.flags, s.id, s.sendSeq, relayShift())
	s.sendSeq++
	s.sendFin = h.flags&flagFin != 0
	return s.c.w.add(&s.sendHead, payload)
}

// relayShift is made when the first frame is passed on: a guest never does.
var relayShift = sync.OnceValue(newCRCShift)

// isRelayed tells whether a stream's frames are passed on.
func (c *Conn) isRelayed(stream uint64) bool {
	c.mu.Lock()
	s := c.streams[stream]
	c.mu.Unlock()
	if s == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.peer != nil
}

// forwardEnd passes the END from the upstream side on and forgets the client's half.
func (c *Conn) forwardEnd(to *Stream, payload []byte) error {
	lead := to.relayEnd(payload)
	return c.queued(to.c, lead)
}

func (s *Stream) relayEnd(payload []byte) (lead bool) {
	if !s.c.remove(s) {
		return false
	}
	s.fail(errs.New(errs.StateConflict, s.method, "the operation has ended"))
	lead = s.relayFrame(typeEnd, flagFin, payload)
	s.relayed()
	s.c.release()
	return lead
}

// relayCanceled passes the client's CANCEL on. s is the client's half, already forgotten.
func (s *Stream) relayCanceled(up *Stream) {
	if s.cancel != nil {
		s.cancel()
	}
	s.relayed()
	if !up.c.remove(up) {
		return
	}
	if err := s.c.forward(up, typeCancel, 0, nil); err != nil {
		s.c.end(errs.Of(err))
	}
	up.c.release()
}

// relayLost tells the other half that the connection of s is gone.
func (s *Stream) relayLost(peer *Stream) {
	if s.c.server != nil { // the client's side
		if s.cancel != nil {
			s.cancel()
		}
		s.relayed()
		if peer.c.remove(peer) {
			if peer.relayFrame(typeCancel, 0, nil) {
				peer.c.w.flushOrHandOver()
			}
			peer.c.release()
		}
		return
	}
	end := msg.End{Error: ToStatus(s.c.lost())}
	if peer.relayEnd(end.AppendWire(nil)) {
		peer.c.w.flushOrHandOver()
	}
}
