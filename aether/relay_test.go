package aether

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// chain starts a server and hops relays before it, and returns a client of the outermost
// one and the connections between, the innermost last.
func chain(t testing.TB, hops int, handlers map[string]Handler) (client *Conn, between []*Conn) {
	t.Helper()
	c, _ := startPair(t, ServerConfig{Handlers: handlers}, ClientConfig{})
	for range hops {
		up := c
		between = append([]*Conn{up}, between...)
		c, _ = startPair(t, ServerConfig{Route: to(up)}, ClientConfig{})
	}
	return c, between
}

func to(up *Conn) func(context.Context, any, *msg.Open) (Relay, error) {
	return func(_ context.Context, _ any, o *msg.Open) (Relay, error) {
		return Relay{Conn: up, Target: o.Target + ">"}, nil
	}
}

func TestRelayTwoHops(t *testing.T) {
	t.Parallel()
	c, _ := chain(t, 2, nil)
	var sel msg.Selector
	if err := c.Call(WithRequestID(t.Context(), "r9"), "sb", "where", nil, &sel); err != nil || sel.Tag != "sb>>|r9" {
		t.Fatalf("%q, %v", sel.Tag, err)
	}
	if err := c.Call(t.Context(), "", "fail", nil, nil); !errors.Is(err, errs.PathNotFound) {
		t.Fatal(err)
	}
	s, err := c.Open(t.Context(), "", "pipe", nil)
	if err != nil {
		t.Fatal(err)
	}
	const total = 5 << 20
	go func() {
		s.Send(t.Context(), KindInput, make([]byte, total))
		s.CloseSend()
	}()
	if n := drain(t, s); n != total {
		t.Fatalf("%d bytes of %d", n, total)
	}
	var r msg.WriteResult
	if err := s.Result(&r); err != nil || r.Bytes != total {
		t.Fatalf("%+v, %v", r, err)
	}
	if n := c.Streams(); n != 0 {
		t.Fatalf("%d streams left", n)
	}
}

// drain reads a stream to its successful end and returns the bytes of data.
func drain(t testing.TB, s *Stream) (n int) {
	t.Helper()
	for {
		f, err := s.Recv(context.Background())
		if errors.Is(err, io.EOF) {
			return n
		}
		if err != nil {
			t.Fatalf("after %d bytes: %v", n, err)
		}
		n += len(f.Payload)
	}
}

func TestRelayKeepsEarlyData(t *testing.T) {
	t.Parallel()
	up, _ := startPair(t, ServerConfig{}, ClientConfig{})
	release := make(chan struct{})
	c, _ := startPair(t, ServerConfig{Route: func(ctx context.Context, _ any, o *msg.Open) (Relay, error) {
		<-release // as if a sandbox had to resume first
		return Relay{Conn: up}, nil
	}}, ClientConfig{})
	s, err := c.Open(t.Context(), "", "sink", nil)
	if err != nil {
		t.Fatal(err)
	}
	const early, late = 200 << 10, 2 << 20
	if err := s.Send(t.Context(), KindInput, make([]byte, early)); err != nil {
		t.Fatal(err)
	}
	close(release)
	if err := s.Send(t.Context(), KindInput, make([]byte, late)); err != nil {
		t.Fatal(err)
	}
	s.CloseSend()
	drain(t, s)
	var r msg.WriteResult
	if err := s.Result(&r); err != nil || r.Bytes != early+late {
		t.Fatalf("%+v, %v", r, err)
	}
}

func TestRelayCancelReachesTheEnd(t *testing.T) {
	t.Parallel()
	started, ended := make(chan struct{}, 3), make(chan error, 3)
	h := testHandlers()
	h["wait"] = func(ctx context.Context, s *Stream) (Message, error) {
		started <- struct{}{}
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, ctx.Err()
	}
	c, between := chain(t, 2, h)
	s, err := c.Open(t.Context(), "", "wait", nil)
	if err != nil {
		t.Fatal(err)
	}
	<-started
	s.Cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if _, err := s.Recv(t.Context()); !errors.Is(err, errs.RequestCanceled) {
		t.Fatal(err)
	}

	// The client vanishes altogether.
	if _, err := c.Open(t.Context(), "", "wait", nil); err != nil {
		t.Fatal(err)
	}
	<-started
	c.Close()
	<-ended
	for _, b := range between { // nothing of it stays on the shared connections
		eventually(t, func() bool { return b.Streams() == 0 })
		if b.Err() != nil {
			t.Fatal(b.Err())
		}
	}
}

func eventually(t testing.TB, ok func() bool) {
	t.Helper()
	for range 5000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("it did not come true")
}

func TestRelayDeadlineReachesTheEnd(t *testing.T) {
	t.Parallel()
	c, between := chain(t, 2, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if err := c.Call(ctx, "", "hang", nil, nil); !errors.Is(err, errs.Deadline) {
		t.Fatal(err)
	}
	for _, b := range between {
		eventually(t, func() bool { return b.Streams() == 0 })
	}
}

func TestRelayUpstreamDies(t *testing.T) {
	t.Parallel()
	for _, hops := range []int{1, 2} {
		c, between := chain(t, hops, nil)
		s, err := c.Open(t.Context(), "", "pipe", nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Send(t.Context(), KindInput, []byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Recv(t.Context()); err != nil { // it is joined now
			t.Fatal(err)
		}
		between[len(between)-1].Close()
		if _, err := s.Recv(t.Context()); !errors.Is(err, errs.ConnectionLost) {
			t.Fatalf("%d hops: %v", hops, err)
		}
		if c.Err() != nil {
			t.Fatalf("the client's own connection ended: %v", c.Err())
		}
		if err := c.Call(t.Context(), "", "echo", nil, nil); !errors.Is(err, errs.ConnectionLost) {
			t.Fatalf("a call after it: %v", err)
		}
	}
}

// A client that stops reading its socket must not hold up others on the shared upstream.
func TestRelayStuckClient(t *testing.T) {
	t.Parallel()
	up, _ := startPair(t, ServerConfig{}, ClientConfig{})
	srv := NewServer(ServerConfig{Route: to(up), WriteTimeout: 300 * time.Millisecond})
	t.Cleanup(func() { srv.Close() })
	serve := func() *stuckConn {
		cs, ss := socketPair(t)
		go srv.ServeConn(context.Background(), ss)
		return &stuckConn{Conn: cs, release: make(chan struct{})}
	}
	stuck, err := NewClient(t.Context(), serve(), ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer stuck.Close()
	good, err := NewClient(t.Context(), serve(), ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer good.Close()
	stuck.conn.(*stuckConn).stop.Store(true)
	defer close(stuck.conn.(*stuckConn).release)
	for range 8 {
		if _, err := stuck.Open(t.Context(), "", "source", &msg.ReadRequest{Length: 64 << 20}); err != nil {
			t.Fatal(err)
		}
	}
	for range 50 { // while the relay queues for it, and after it has given up on it
		s, err := good.Open(t.Context(), "", "source", &msg.ReadRequest{Length: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if n := drain(t, s); n != 1<<20 {
			t.Fatal(n)
		}
	}
	eventually(t, func() bool { return up.Streams() == 0 }) // the write timeout cut it off
	if up.Err() != nil {
		t.Fatal(up.Err())
	}
}

// A stuck client with very many streams is cut off when its queue is too long, long
// before the write timeout, and the shared upstream stays.
func TestRelayQueueIsBounded(t *testing.T) {
	t.Parallel()
	up, _ := startPair(t, ServerConfig{}, ClientConfig{})
	cs, ss := socketPair(t)
	srv := NewServer(ServerConfig{Route: to(up)})
	defer srv.Close()
	served := make(chan error, 1)
	go func() { served <- srv.ServeConn(context.Background(), ss) }()
	p := newRawPeer(t, cs)
	defer cs.Close()
	p.write(helloFrame(nil))
	p.expect(typeWelcome)
	body := (&msg.ReadRequest{Length: 1 << 20}).AppendWire(nil)
	for i := range uint64(2 * queueMax / DefaultWindow) {
		p.write(openFrame(2*i+1, flagFin, "source", body))
	}
	if err := <-served; !errors.Is(err, errs.ConnectionLost) {
		t.Fatal(err)
	}
	eventually(t, func() bool { return up.Streams() == 0 })
	if err := up.Call(t.Context(), "", "echo", nil, nil); err != nil {
		t.Fatal(err)
	}
}

// A client that reads its connection but not one stream holds up nobody at all.
func TestRelayStuckStream(t *testing.T) {
	t.Parallel()
	c, between := chain(t, 2, nil)
	lazy, err := c.Open(t.Context(), "", "source", &msg.ReadRequest{Length: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		s, err := c.Open(t.Context(), "", "source", &msg.ReadRequest{Length: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if n := drain(t, s); n != 1<<20 {
			t.Fatal(n)
		}
	}
	lazy.mu.Lock()
	held := 0
	for _, it := range lazy.queue {
		held += len(it.buf.b)
	}
	lazy.mu.Unlock()
	if limit := DefaultWindow + chunk; held > limit {
		t.Fatalf("the client holds %d bytes, more than %d", held, limit)
	}
	for _, b := range between {
		eventually(t, func() bool { return b.w.pending() == 0 })
	}
	if n := drain(t, lazy); n != 8<<20 {
		t.Fatal(n)
	}
}

// Ends with larger windows than the relay's get what they granted.
func TestRelayWindows(t *testing.T) {
	t.Parallel()
	up, _ := startPair(t, ServerConfig{Window: 1 << 20}, ClientConfig{Window: MinWindow})
	sc := ServerConfig{Route: to(up), Window: MinWindow}
	c, srv := startPair(t, sc, ClientConfig{Window: 2 << 20})
	s, err := c.Open(t.Context(), "", "pipe", nil)
	if err != nil {
		t.Fatal(err)
	}
	const total = 9 << 20
	go func() {
		s.Send(t.Context(), KindInput, make([]byte, total))
		s.CloseSend()
	}()
	if n := drain(t, s); n != total {
		t.Fatal(n)
	}
	// A client with less than the relay has promised upstream is refused, stream by stream.
	up2, _ := startPair(t, ServerConfig{}, ClientConfig{Window: 128 << 10})
	srv.cfg.Route = to(up2)
	cs, ss := socketPair(t)
	go srv.ServeConn(context.Background(), ss)
	small, err := NewClient(t.Context(), cs, ClientConfig{Window: MinWindow})
	if err != nil {
		t.Fatal(err)
	}
	defer small.Close()
	if err := small.Call(t.Context(), "", "echo", nil, nil); !errors.Is(err, errs.NotSupported) {
		t.Fatal(err)
	}
}

func TestRelayRouteErrorsAndLocalMethods(t *testing.T) {
	t.Parallel()
	c, _ := startPair(t, ServerConfig{Route: func(_ context.Context, _ any, o *msg.Open) (Relay, error) {
		switch o.Target {
		case "gone":
			return Relay{}, errs.New(errs.SandboxGone, "route", "it was removed")
		case "panic":
			panic("route")
		}
		return Relay{}, nil
	}}, ClientConfig{})
	if err := c.Call(t.Context(), "", "echo", nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := c.Call(t.Context(), "gone", "echo", nil, nil); !errors.Is(err, errs.SandboxGone) {
		t.Fatal(err)
	}
	if err := c.Call(t.Context(), "panic", "echo", nil, nil); !errors.Is(err, errs.InternalError) {
		t.Fatal(err)
	}
}

func TestRelayBatch(t *testing.T) {
	t.Parallel()
	up1, _ := startPair(t, ServerConfig{}, ClientConfig{})
	up2, _ := startPair(t, ServerConfig{}, ClientConfig{})
	var whole atomic.Int64
	c, _ := startPair(t, ServerConfig{Route: func(_ context.Context, _ any, o *msg.Open) (Relay, error) {
		if o.Method == MethodBatch {
			whole.Add(1)
		}
		switch o.Target {
		case "a":
			return Relay{Conn: up1, Target: "A"}, nil
		case "b":
			return Relay{Conn: up2, Target: "B"}, nil
		}
		return Relay{}, nil
	}}, ClientConfig{})
	r, err := c.Batch(t.Context(), &msg.Batch{Parallel: 3, Ops: []*msg.BatchOp{
		{Method: "where", Target: "a"}, {Method: "where", Target: "b"}, {Method: "fail", Target: "a"}, {Method: "where"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"A|", "B|", "", "|"} {
		var sel msg.Selector
		if err := sel.ParseWire(r.Items[i].Body); err != nil || sel.Tag != want {
			t.Errorf("op %d: %q, %v", i, sel.Tag, err)
		}
	}
	if err := FromStatus(r.Items[2].Error); !errors.Is(err, errs.PathNotFound) {
		t.Error(err)
	}
	// One target: the batch is relayed whole.
	if _, err := c.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{{Method: "where", Target: "a"}, {Method: "where", Target: "a"}}}); err != nil {
		t.Fatal(err)
	}
	if whole.Load() != 2 {
		t.Errorf("Route saw %d batches", whole.Load())
	}
}

// The credit that a relay has seen granted over the life of a stream is more than what
// one stream may hold; what counts is the balance, which frames use up.
func TestRelayCreditDoesNotPileUp(t *testing.T) {
	t.Parallel()
	const most = maxCredit - DefaultWindow // with the initial window, all that may be granted
	t.Run("to the client", func(t *testing.T) {
		t.Parallel()
		up, _ := startPair(t, ServerConfig{}, ClientConfig{})
		p := rawClient(t, ServerConfig{Route: to(up)})
		p.write(openFrame(1, flagFin, "source", (&msg.ReadRequest{Length: 4 << 20}).AppendWire(nil)))
		p.write(creditFrame(1, 1, most))
		seq, got := uint32(2), 0
		for {
			h, payload, err := p.read()
			if err != nil {
				t.Fatal(err)
			}
			switch h.typ {
			case typeData:
				got += len(payload)
				p.write(creditFrame(1, seq, uint32(h.cost()))) // what was taken is granted again
				seq++
				continue
			case typeCredit:
				continue
			case typeEnd:
				if got != 4<<20 {
					t.Fatalf("%d bytes", got)
				}
			default:
				t.Fatalf("%s after %d bytes", h.typ, got)
			}
			break
		}
		if err := up.Call(t.Context(), "", "echo", nil, nil); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("to the server", func(t *testing.T) {
		t.Parallel()
		up, far := rawServer(t, ClientConfig{})
		p := rawClient(t, ServerConfig{Route: to(up)})
		p.write(openFrame(1, 0, "sink", nil))
		far.expect(typeOpen)
		far.write(creditFrame(1, 0, most))
		p.expect(typeCredit)
		for i := range uint32(8) {
			p.write(rawFrame(typeData, 0, 1, 1+i, make([]byte, MaxPayload)))
			h, _ := far.expect(typeData)
			far.write(creditFrame(1, 1+i, uint32(h.cost())))
			p.expect(typeCredit)
		}
		far.write(endFrame(1, 9, &msg.End{}))
		p.expect(typeEnd)
	})
	// Who grants more than a stream may hold is cut off, and nobody else.
	t.Run("too much", func(t *testing.T) {
		t.Parallel()
		up, far := rawServer(t, ClientConfig{})
		p := rawClient(t, ServerConfig{Route: to(up)})
		p.write(openFrame(1, 0, "sink", nil))
		far.expect(typeOpen)
		p.write(creditFrame(1, 1, most))
		far.expect(typeCredit)
		p.write(creditFrame(1, 2, 1))
		if err := p.expectGoAway(); !errors.Is(err, errs.ProtocolError) {
			t.Fatal(err)
		}
		far.expect(typeCancel)
		if up.Err() != nil {
			t.Fatal(up.Err())
		}
	})
}

func creditFrame(stream uint64, seq, n uint32) []byte {
	return rawFrame(typeCredit, 0, stream, seq, binary.BigEndian.AppendUint32(nil, n))
}

func BenchmarkRelayCall(b *testing.B) {
	c, _ := chain(b, 2, nil)
	benchCalls(b, c)
}

func BenchmarkRelayCallParallel(b *testing.B) {
	c, _ := chain(b, 2, nil)
	benchParallel(b, c)
}

func BenchmarkRelayStream(b *testing.B) {
	c, _ := chain(b, 2, nil)
	benchStream(b, c)
}

// Whoever routed a stream hears of each frame of input, and once of its end, whichever end that is.
func TestRelayTellsOfInputAndEnd(t *testing.T) {
	t.Parallel()
	up, _ := startPair(t, ServerConfig{}, ClientConfig{})
	var touched, done atomic.Int64
	cfg := ServerConfig{Route: func(_ context.Context, _ any, o *msg.Open) (Relay, error) {
		return Relay{Conn: up, Touch: func() { touched.Add(1) }, Done: func() { done.Add(1) }}, nil
	}}
	c, _ := startPair(t, cfg, ClientConfig{})
	joined := func() *Stream {
		s, err := c.Open(t.Context(), "", "pipe", nil)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the first may come before the stream is joined
			if err := s.Send(t.Context(), KindInput, []byte("x")); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Recv(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		return s
	}
	s := joined()
	if n := touched.Load(); n < 1 || n > 2 {
		t.Errorf("touched %d times by two frames", n)
	}
	if n := done.Load(); n != 0 {
		t.Errorf("done %d times while it is open", n)
	}
	s.CloseSend()
	drain(t, s)
	eventually(t, func() bool { return done.Load() == 1 })
	joined().Cancel()
	eventually(t, func() bool { return done.Load() == 2 })
	joined()
	c.Close()
	eventually(t, func() bool { return done.Load() == 3 })

	c, _ = startPair(t, cfg, ClientConfig{})
	if _, err := c.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{{Method: "where", Target: "a"}, {Method: "where", Target: "b"}}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return done.Load() == 4 }) // it was relayed whole
	joined()
	up.Close()
	eventually(t, func() bool { return done.Load() == 5 })
	if err := c.Call(t.Context(), "", "echo", nil, nil); !errors.Is(err, errs.ConnectionLost) {
		t.Error(err)
	}
	if n := done.Load(); n != 6 {
		t.Errorf("done %d times after a stream that could not go on", n)
	}
}
