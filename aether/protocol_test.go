package aether

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

func creditBytes(n uint32) []byte { return binary.BigEndian.AppendUint32(nil, n) }

// Each way to break the protocol closes the connection with one error that says what it was.
func TestViolationsByTheClient(t *testing.T) {
	t.Parallel()
	broken := func(change func(b []byte)) []byte {
		b := openFrame(1, flagFin, "echo", nil)
		change(b)
		return b
	}
	sealed := func(typ frameType, flags uint8, stream uint64, seq uint32, n int) []byte {
		return rawFrame(typ, flags, stream, seq, make([]byte, n))
	}
	window := make([][]byte, 0, 8)
	for i := range 6 {
		window = append(window, sealed(typeData, 0, 1, uint32(i+1), 60<<10))
	}
	hang := openFrame(1, 0, "hang", nil)
	for name, c := range map[string]struct {
		frames [][]byte
		want   string
	}{
		"magic":            {[][]byte{broken(func(b []byte) { b[0] = 'G' })}, "magic"},
		"version":          {[][]byte{broken(func(b []byte) { b[2] = 2 })}, "frame version 2"},
		"type":             {[][]byte{sealed(77, 0, 1, 0, 0)}, "unknown frame type 77"},
		"checksum":         {[][]byte{broken(func(b []byte) { b[len(b)-1] ^= 1 })}, "checksum"},
		"header bit":       {[][]byte{broken(func(b []byte) { b[12] ^= 2 })}, "checksum"},
		"oversize":         {[][]byte{broken(func(b []byte) { binary.BigEndian.PutUint32(b[17:], MaxPayload+1) })}, "the limit is"},
		"sequence":         {[][]byte{hang, sealed(typeData, 0, 1, 2, 1)}, "sequence 2, want 1"},
		"repeated":         {[][]byte{hang, sealed(typeData, 0, 1, 1, 1), sealed(typeData, 0, 1, 1, 1)}, "sequence 1, want 2"},
		"open sequence":    {[][]byte{sealed(typeOpen, 0, 1, 5, 0)}, "sequence 5"},
		"credit":           {append([][]byte{hang}, window...), "without credit"},
		"too much credit":  {[][]byte{hang, rawFrame(typeCredit, 0, 1, 1, creditBytes(1<<31))}, "CREDIT of 2147483648"},
		"no credit":        {[][]byte{hang, rawFrame(typeCredit, 0, 1, 1, creditBytes(0))}, "CREDIT of 0"},
		"credit size":      {[][]byte{hang, rawFrame(typeCredit, 0, 1, 1, []byte{1})}, "want 4"},
		"after FIN":        {[][]byte{hang, sealed(typeData, flagFin, 1, 1, 1), sealed(typeData, 0, 1, 2, 1)}, "after FIN"},
		"empty data":       {[][]byte{hang, sealed(typeData, 0, 1, 1, 0)}, "without payload"},
		"flags":            {[][]byte{sealed(typeOpen, 0x40, 1, 0, 0)}, "flags 0x40"},
		"even stream":      {[][]byte{openFrame(2, 0, "echo", nil)}, "OPEN of stream 2"},
		"stream goes back": {[][]byte{openFrame(5, flagFin, "echo", nil), openFrame(3, flagFin, "echo", nil)}, "OPEN of stream 3 after 5"},
		"stream 0":         {[][]byte{openFrame(0, 0, "echo", nil)}, "without a stream"},
		"never opened":     {[][]byte{sealed(typeData, 0, 9, 0, 1)}, "never opened"},
		"malformed OPEN":   {[][]byte{rawFrame(typeOpen, 0, 1, 0, []byte{0x0a, 9})}, "OPEN of stream 1"},
		"END from client":  {[][]byte{hang, sealed(typeEnd, flagFin, 1, 1, 0)}, "END from the client"},
		"second HELLO":     {[][]byte{helloFrame(nil)}, "after the handshake"},
		"PING on a stream": {[][]byte{sealed(typePing, 0, 1, 0, 8)}, "want 0, 0"},
		"PING size":        {[][]byte{sealed(typePing, 0, 0, 0, 7)}, "want 8"},
		"GOAWAY garbage":   {[][]byte{rawFrame(typeGoAway, 0, 0, 0, []byte{0xff})}, "GOAWAY"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := rawClient(t, ServerConfig{})
			p.write(c.frames...)
			if err := p.expectGoAway(); !errors.Is(err, errs.ProtocolError) || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestViolationsByTheServer(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		frame []byte
		want  string
	}{
		"OPEN":           {openFrame(3, 0, "echo", nil), "OPEN from the server"},
		"CANCEL":         {rawFrame(typeCancel, 0, 1, 0, nil), "CANCEL from the server"},
		"FIN":            {rawFrame(typeData, flagFin, 1, 0, []byte("x")), "with FIN from the server"},
		"END, no FIN":    {rawFrame(typeEnd, 0, 1, 0, nil), "END without FIN"},
		"sequence":       {rawFrame(typeData, 0, 1, 1, []byte("x")), "sequence 1, want 0"},
		"unknown stream": {rawFrame(typeData, 0, 7, 0, []byte("x")), "never opened"},
		"WELCOME":        {welcomeFrame(nil), "after the handshake"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, p := rawServer(t, ClientConfig{})
			s, err := conn.Open(t.Context(), "", "x", nil)
			if err != nil {
				t.Fatal(err)
			}
			p.expect(typeOpen)
			p.write(c.frame)
			if err := p.expectGoAway(); !errors.Is(err, errs.ProtocolError) || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			if _, err := s.Recv(t.Context()); !errors.Is(err, errs.ProtocolError) {
				t.Fatalf("stream: %v", err)
			}
			<-conn.Done()
			if !errors.Is(conn.Err(), errs.ProtocolError) {
				t.Fatalf("connection: %v", conn.Err())
			}
		})
	}
}

func TestHandshakeFailures(t *testing.T) {
	t.Parallel()
	auth := func(_ context.Context, h *msg.Hello) (any, error) {
		if h.Token != "right" {
			return nil, errs.New(errs.BadToken, "test.auth", "unknown token")
		}
		return "alice", nil
	}
	right := func(m *msg.Hello) { m.Token = "right" }
	for name, c := range map[string]struct {
		frame []byte
		want  errs.Code
	}{
		"no token":       {helloFrame(nil), errs.BadToken},
		"future version": {helloFrame(func(m *msg.Hello) { right(m); m.MinVersion, m.MaxVersion = 2, 9 }), errs.NotSupported},
		"old version":    {helloFrame(func(m *msg.Hello) { right(m); m.MinVersion, m.MaxVersion = 0, 0 }), errs.NotSupported},
		"small window":   {helloFrame(func(m *msg.Hello) { right(m); m.InitialCredit = 1 }), errs.BadRequest},
		"huge window":    {helloFrame(func(m *msg.Hello) { right(m); m.InitialCredit = 1 << 31 }), errs.BadRequest},
		"other frame":    {openFrame(1, 0, "echo", nil), errs.ProtocolError},
		"garbage":        {[]byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), errs.ProtocolError},
		"malformed":      {rawFrame(typeHello, 0, 0, 0, []byte{0x1a, 9}), errs.ProtocolError},
		"too long":       {rawFrame(typeHello, 0, 0, 0, make([]byte, maxHandshake+1)), errs.ProtocolError},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, _ := rawUnwelcomed(t, ServerConfig{Auth: auth})
			p.write(c.frame)
			if err := p.expectGoAway(); !errors.Is(err, c.want) {
				t.Fatalf("got %v, want %s", err, c.want)
			}
		})
	}
	t.Run("silence", func(t *testing.T) {
		t.Parallel()
		p, _ := rawUnwelcomed(t, ServerConfig{Handshake: 20 * time.Millisecond})
		if err := p.expectGoAway(); !errors.Is(err, errs.DeadlineExceeded) {
			t.Fatal(err)
		}
	})
	t.Run("client sees the refusal", func(t *testing.T) {
		t.Parallel()
		cs, ss := socketPair(t)
		srv := NewServer(ServerConfig{Auth: auth})
		defer srv.Close()
		go srv.ServeConn(context.Background(), ss)
		if _, err := NewClient(t.Context(), cs, ClientConfig{Token: "wrong"}); !errors.Is(err, errs.BadToken) {
			t.Fatal(err)
		}
	})
	t.Run("client gives up", func(t *testing.T) {
		t.Parallel()
		cs, ss := socketPair(t)
		defer ss.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if _, err := NewClient(ctx, cs, ClientConfig{}); !errors.Is(err, errs.DeadlineExceeded) {
			t.Fatal(err)
		}
	})
	for name, change := range map[string]func(*msg.Welcome){
		"version": func(w *msg.Welcome) { w.Version = 3 },
		"credit":  func(w *msg.Welcome) { w.InitialCredit = 0 },
		"payload": func(w *msg.Welcome) { w.MaxPayload = 10 },
		"streams": func(w *msg.Welcome) { w.MaxStreams = 0 },
	} {
		t.Run("bad WELCOME "+name, func(t *testing.T) {
			t.Parallel()
			cs, ss := socketPair(t)
			p := newRawPeer(t, ss)
			got := make(chan error, 1)
			go func() {
				_, err := NewClient(context.Background(), cs, ClientConfig{})
				got <- err
			}()
			p.expect(typeHello)
			p.write(welcomeFrame(change))
			if err := p.expectGoAway(); !errors.Is(err, errs.ProtocolError) {
				t.Fatal(err)
			}
			if err := <-got; !errors.Is(err, errs.ProtocolError) {
				t.Fatal(err)
			}
		})
	}
}

func TestPrincipalReachesHandlers(t *testing.T) {
	t.Parallel()
	c, _ := startPair(t, ServerConfig{
		Auth: func(_ context.Context, h *msg.Hello) (any, error) { return "user of " + h.Token, nil },
		Handlers: map[string]Handler{"who": func(_ context.Context, s *Stream) (Message, error) {
			return &msg.Selector{Tag: s.Principal().(string)}, nil
		}},
	}, ClientConfig{Token: "tok"})
	var m msg.Selector
	if err := c.Call(t.Context(), "", "who", nil, &m); err != nil || m.Tag != "user of tok" {
		t.Fatalf("%q, %v", m.Tag, err)
	}
	if c.Hello().Token != "" {
		t.Fatal("the token is kept")
	}
}

// Frames that cross the end of their stream are no violation.
func TestLateFramesAreIgnored(t *testing.T) {
	t.Parallel()
	p := rawClient(t, ServerConfig{})
	p.write(openFrame(1, 0, "fail", nil))
	p.expect(typeEnd)
	p.write(rawFrame(typeData, 0, 1, 1, []byte("late")), rawFrame(typeCancel, 0, 1, 2, nil), rawFrame(typePing, 0, 0, 0, []byte("12345678")))
	if _, token := p.expect(typePong); string(token) != "12345678" {
		t.Fatalf("PONG %q", token)
	}

	c, s := rawServer(t, ClientConfig{})
	st, err := c.Open(t.Context(), "", "x", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.expect(typeOpen)
	st.Cancel()
	s.expect(typeCancel)
	s.write(rawFrame(typeData, 0, 1, 0, []byte("late")), endFrame(1, 1, &msg.End{}))
	go c.Call(t.Context(), "", "y", nil, nil)
	s.expect(typeOpen)
}

// Frames may come in any portions.
func TestOneByteAtATime(t *testing.T) {
	t.Parallel()
	p := rawClient(t, ServerConfig{})
	body := (&msg.InputRequest{Data: []byte("slow")}).AppendWire(nil)
	for _, b := range openFrame(1, flagFin, "echo", body) {
		p.write([]byte{b})
	}
	_, payload := p.expect(typeEnd)
	if _, got, err := msg.ParseEnd(payload); err != nil || string(got) != string(body) {
		t.Fatalf("%q, %v", got, err)
	}
}
