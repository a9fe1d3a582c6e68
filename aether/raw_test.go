package aether

import (
	"context"
	"net"
	"testing"
	"time"

	"dsec/aether/msg"
)

// rawPeer speaks frames by hand, right or wrong.
type rawPeer struct {
	t    testing.TB
	conn net.Conn
	r    frameReader
}

func newRawPeer(t testing.TB, conn net.Conn) *rawPeer {
	conn.SetDeadline(time.Now().Add(20 * time.Second)) // a hang fails instead of hanging
	p := &rawPeer{t: t, conn: conn}
	p.r = frameReader{conn: conn, maxPayload: MaxPayload, beforeWait: func() {}}
	return p
}

func rawFrame(typ frameType, flags uint8, stream uint64, seq uint32, payload []byte) []byte {
	var h rawHeader
	h.encode(typ, flags, stream, seq, payload)
	return append(h[:], payload...)
}

func (p *rawPeer) write(frames ...[]byte) {
	p.t.Helper()
	var all []byte
	for _, f := range frames {
		all = append(all, f...)
	}
	if _, err := p.conn.Write(all); err != nil {
		p.t.Fatal(err)
	}
}

// read returns the next frame that is not a PING.
func (p *rawPeer) read() (header, []byte, error) {
	for {
		h, payload, err := p.r.next()
		if err != nil || h.typ != typePing {
			return h, payload, err
		}
	}
}

func (p *rawPeer) expect(typ frameType) (header, []byte) {
	p.t.Helper()
	h, payload, err := p.read()
	if err != nil || h.typ != typ {
		p.t.Fatalf("got %s, %v, want %s", h.typ, err, typ)
	}
	return h, payload
}

// expectGoAway returns the error of the GOAWAY that must come, and checks that the
// connection closes after it. Other frames before it are passed over.
func (p *rawPeer) expectGoAway() error {
	p.t.Helper()
	for {
		h, payload, err := p.read()
		if err != nil {
			p.t.Fatalf("no GOAWAY before %v", err)
		}
		if h.typ != typeGoAway {
			continue
		}
		var m msg.GoAway
		if err := m.ParseWire(payload); err != nil {
			p.t.Fatal(err)
		}
		if _, _, err := p.read(); err == nil {
			p.t.Fatal("a frame after GOAWAY")
		}
		return FromStatus(m.Error)
	}
}

func helloFrame(change func(*msg.Hello)) []byte {
	m := &msg.Hello{MinVersion: 1, MaxVersion: 1, InitialCredit: DefaultWindow}
	if change != nil {
		change(m)
	}
	return rawFrame(typeHello, 0, 0, 0, m.AppendWire(nil))
}

func openFrame(stream uint64, flags uint8, method string, body []byte) []byte {
	return rawFrame(typeOpen, flags, stream, 0, (&msg.Open{Method: method, Body: body}).AppendWire(nil))
}

// rawClient connects by hand to a server and does the handshake.
func rawClient(t testing.TB, cfg ServerConfig) *rawPeer {
	t.Helper()
	p, _ := rawUnwelcomed(t, cfg)
	p.write(helloFrame(nil))
	p.expect(typeWelcome)
	return p
}

func rawUnwelcomed(t testing.TB, cfg ServerConfig) (*rawPeer, *Server) {
	t.Helper()
	if cfg.Handlers == nil {
		cfg.Handlers = testHandlers()
	}
	cs, ss := socketPair(t)
	srv := NewServer(cfg)
	done := make(chan struct{})
	go func() { defer close(done); srv.ServeConn(context.Background(), ss) }()
	t.Cleanup(func() { cs.Close(); srv.Close(); <-done })
	return newRawPeer(t, cs), srv
}

// rawServer gives a client whose server is played by hand.
func rawServer(t testing.TB, cfg ClientConfig) (*Conn, *rawPeer) {
	t.Helper()
	cs, ss := socketPair(t)
	p := newRawPeer(t, ss)
	type result struct {
		c   *Conn
		err error
	}
	got := make(chan result, 1)
	go func() {
		c, err := NewClient(context.Background(), cs, cfg)
		got <- result{c, err}
	}()
	p.expect(typeHello)
	p.write(welcomeFrame(nil))
	r := <-got
	if r.err != nil {
		t.Fatal(r.err)
	}
	t.Cleanup(func() { r.c.Close(); ss.Close() })
	return r.c, p
}

func welcomeFrame(change func(*msg.Welcome)) []byte {
	m := &msg.Welcome{Version: 1, InitialCredit: DefaultWindow, MaxStreams: 100, MaxPayload: MaxPayload}
	if change != nil {
		change(m)
	}
	return rawFrame(typeWelcome, 0, 0, 0, m.AppendWire(nil))
}

func endFrame(stream uint64, seq uint32, end *msg.End) []byte {
	return rawFrame(typeEnd, flagFin, stream, seq, end.AppendWire(nil))
}
