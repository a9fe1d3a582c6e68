package aether

import (
	"context"
	"strconv"

	"dsec/api/v1/errs"
)

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

// addCredit reports false if the peer grants more than maxCredit. On a relayed stream it
// counts nothing and returns the other half, to which the credit belongs: decided in the
// same critical section, so that a splice at this moment counts the credit once.
func (s *Stream) addCredit(n int64) (peer *Stream, ok bool) {
	s.mu.Lock()
	if s.peer != nil {
		defer s.mu.Unlock()
		return s.peer, true
	}
	s.credit += n
	ok = s.credit <= maxCredit
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
	return nil, ok
}

// CloseSend tells the server that no more data comes.
func (s *Stream) CloseSend() error {
	if s.c == nil || s.c.server != nil {
		return errs.New(errs.NotSupported, "aether.send", "a server ends its side by returning from the handler")
	}
	s.frame(typeData, flagFin, nil, true)
	return nil
}
