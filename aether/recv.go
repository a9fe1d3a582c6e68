package aether

import (
	"context"
	"encoding/binary"
	"io"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

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
		touch := s.touch
		s.mu.Unlock()
		if touch != nil {
			touch()
		}
		return s.c.pass(peer, h, payload)
	}
	if s.err == nil {
		s.queue = append(s.queue, item{buf: copyBuffer(payload), typ: h.typ, flags: h.flags})
	}
	s.mu.Unlock()
	s.wake()
	return nil
}

func (s *Stream) handleCredit(h *header, payload []byte) error {
	n := int64(binary.BigEndian.Uint32(payload))
	peer, ok := s.addCredit(n)
	if peer != nil {
		// The credit of a relayed stream is what the other end may still send: that half
		// counts down with each frame, this one never sends by itself.
		peer.mu.Lock()
		peer.balance += n
		ok = peer.balance <= maxCredit
		peer.mu.Unlock()
	}
	if n == 0 || !ok {
		return broken("CREDIT of %d on stream %d", n, h.stream)
	}
	if peer == nil {
		return nil
	}
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
