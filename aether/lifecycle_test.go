package aether

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

func TestCancelAndDeadline(t *testing.T) {
	t.Parallel()
	ended := make(chan error, 1)
	h := testHandlers()
	h["watch"] = func(ctx context.Context, s *Stream) (Message, error) {
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, ctx.Err()
	}
	c, _ := startPair(t, ServerConfig{Handlers: h}, ClientConfig{})

	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(5*time.Millisecond, cancel)
	if err := c.Call(ctx, "", "watch", nil, nil); !errors.Is(err, errs.Canceled) || !errors.Is(err, context.Canceled) {
		t.Fatalf("call: %v", err)
	}
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("handler: %v", err)
	}

	ctx, cancel = context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if err := c.Call(ctx, "", "watch", nil, nil); !errors.Is(err, errs.Deadline) {
		t.Fatalf("call: %v", err)
	}
	if err := <-ended; err == nil {
		t.Fatal("handler saw no end")
	}

	// The ctx of Open bounds the stream.
	ctx, cancel = context.WithCancel(t.Context())
	s, err := c.Open(ctx, "", "watch", nil)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := s.Recv(t.Context()); !errors.Is(err, errs.Canceled) {
		t.Fatalf("stream: %v", err)
	}
	<-ended
	if err := s.Send(t.Context(), KindInput, []byte("x")); !errors.Is(err, errs.Canceled) {
		t.Fatalf("send after it: %v", err)
	}

	// A ctx that has already ended sends nothing.
	if err := c.Call(ctx, "", "watch", nil, nil); !errors.Is(err, errs.Canceled) {
		t.Fatal(err)
	}
}

// The server keeps the deadline by itself: here the client does not cancel.
func TestServerKeepsDeadline(t *testing.T) {
	t.Parallel()
	p := rawClient(t, ServerConfig{})
	p.write(rawFrame(typeOpen, flagFin, 1, 0, (&msg.Open{Method: "hang", TimeoutUs: 2000}).AppendWire(nil)))
	_, payload := p.expect(typeEnd)
	status, _, err := msg.ParseEnd(payload)
	if err != nil || !errors.Is(FromStatus(status), errs.DeadlineExceeded) {
		t.Fatalf("%v, %v", FromStatus(status), err)
	}
}

func TestPeerVanishesMidStream(t *testing.T) {
	t.Parallel()
	ended := make(chan error, 2)
	h := testHandlers()
	h["recv"] = func(ctx context.Context, s *Stream) (Message, error) {
		s.Recv(ctx)
		_, err := s.Recv(ctx)
		ended <- err
		<-ctx.Done()
		return nil, err
	}
	p := rawClient(t, ServerConfig{Handlers: h})
	p.write(openFrame(1, 0, "recv", nil), rawFrame(typeData, 0, 1, 1, []byte("x")))
	p.write(rawFrame(typeData, 0, 1, 2, make([]byte, 100))[:60]) // half a frame
	p.conn.Close()
	if err := <-ended; !errors.Is(err, errs.ConnectionLost) && !errors.Is(err, errs.Canceled) {
		t.Fatalf("handler: %v", err)
	}

	c, s := rawServer(t, ClientConfig{})
	st, err := c.Open(t.Context(), "", "x", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.expect(typeOpen)
	s.write(rawFrame(typeData, 0, 1, 0, []byte("first")))
	s.conn.Close()
	if f, err := st.Recv(t.Context()); err != nil || string(f.Payload) != "first" {
		t.Fatalf("what had arrived: %q, %v", f.Payload, err)
	}
	if _, err := st.Recv(t.Context()); !errors.Is(err, errs.ConnectionLost) || errors.Is(err, io.EOF) {
		t.Fatalf("client: %v", err)
	}
	if err := c.Call(t.Context(), "", "x", nil, nil); !errors.Is(err, errs.ConnectionLost) {
		t.Fatal(err)
	}
}

// A stream that nobody reads must not hold up another, and must not take memory.
func TestUnreadStream(t *testing.T) {
	t.Parallel()
	c, _ := startPair(t, ServerConfig{}, ClientConfig{})
	lazy, err := c.Open(t.Context(), "", "source", &msg.ReadRequest{Length: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if err := c.Call(t.Context(), "", "echo", nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	// The other way: the server's handler does not read.
	stuck, err := c.Open(t.Context(), "", "hang", nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if err := stuck.Send(ctx, KindInput, make([]byte, 4<<20)); !errors.Is(err, errs.Deadline) {
		t.Fatalf("send without credit: %v", err)
	}
	if err := c.Call(t.Context(), "", "echo", nil, nil); err != nil {
		t.Fatal(err)
	}
	if n := drain(t, lazy); n != 4<<20 {
		t.Fatal(n)
	}
}

// A peer that stops reading its connection is cut off by the write timeout, over a plain
// socket and over one without a descriptor.
func TestPeerStopsReading(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		cs, ss := socketPair(t)
		if hidden {
			ss = &stuckConn{Conn: ss, release: make(chan struct{})}
		}
		srv := NewServer(ServerConfig{Handlers: testHandlers(), WriteTimeout: 50 * time.Millisecond})
		served := make(chan error, 1)
		go func() { served <- srv.ServeConn(context.Background(), ss) }()
		p := newRawPeer(t, cs)
		p.write(helloFrame(func(m *msg.Hello) { m.InitialCredit = MaxWindow }))
		p.expect(typeWelcome)
		p.write(openFrame(1, flagFin, "source", (&msg.ReadRequest{Length: 64 << 20}).AppendWire(nil)))
		if err := <-served; !errors.Is(err, errs.ConnectionLost) {
			t.Fatalf("hidden %v: %v", hidden, err)
		}
		cs.Close()
	}
}

// limits counts the deadlines that are set on a connection.
type limits struct {
	net.Conn
	n atomic.Int64
}

func (c *limits) SetWriteDeadline(t time.Time) error {
	if !t.IsZero() {
		c.n.Add(1)
	}
	return c.Conn.SetWriteDeadline(t)
}

// A peer that may stand still for long is given all the time in the world.
func TestNoWriteTimeout(t *testing.T) {
	t.Parallel()
	for _, timeout := range []time.Duration{-1, time.Minute} {
		cs, ss := socketPair(t)
		counted := &limits{Conn: ss}
		srv := NewServer(ServerConfig{Handlers: testHandlers(), WriteTimeout: timeout})
		served := make(chan error, 1)
		go func() { served <- srv.ServeConn(context.Background(), counted) }()
		p := newRawPeer(t, cs)
		p.write(helloFrame(func(m *msg.Hello) { m.InitialCredit = MaxWindow }))
		p.expect(typeWelcome)
		p.write(openFrame(1, flagFin, "source", (&msg.ReadRequest{Length: 4 << 20}).AppendWire(nil)))
		if n, err := io.CopyN(io.Discard, cs, 4<<20); err != nil {
			t.Fatal(n, err)
		}
		cs.Close()
		<-served
		if n := counted.n.Load(); (n == 0) != (timeout < 0) {
			t.Errorf("timeout %v: %d deadlines were set", timeout, n)
		}
	}
}

func TestKeepAliveFindsDeadPeer(t *testing.T) {
	t.Parallel()
	c, p := rawServer(t, ClientConfig{KeepAlive: 10 * time.Millisecond})
	go io.Copy(io.Discard, p.conn) // takes everything, answers nothing
	<-c.Done()
	if !errors.Is(c.Err(), errs.ConnectionLost) {
		t.Fatal(c.Err())
	}

	// The server's side of it.
	cs, ss := socketPair(t)
	defer cs.Close()
	srv := NewServer(ServerConfig{KeepAlive: 10 * time.Millisecond})
	served := make(chan error, 1)
	go func() { served <- srv.ServeConn(context.Background(), ss) }()
	q := newRawPeer(t, cs)
	q.write(helloFrame(func(m *msg.Hello) { m.KeepaliveMs = 1000 }))
	if err := <-served; !errors.Is(err, errs.ConnectionLost) {
		t.Fatal(err)
	}
}

func TestKeepAliveKeepsQuietPeer(t *testing.T) {
	t.Parallel()
	c, _ := startPair(t, ServerConfig{KeepAlive: 10 * time.Millisecond}, ClientConfig{KeepAlive: 10 * time.Millisecond})
	select {
	case <-c.Done():
		t.Fatal(c.Err())
	case <-time.After(150 * time.Millisecond):
	}
	if err := c.Call(t.Context(), "", "echo", nil, nil); err != nil {
		t.Fatal(err)
	}
}

func TestMaxStreams(t *testing.T) {
	t.Parallel()
	c, _ := startPair(t, ServerConfig{MaxStreams: 2}, ClientConfig{})
	a, err := c.Open(t.Context(), "", "hang", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Open(t.Context(), "", "hang", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Open(t.Context(), "", "hang", nil); !errors.Is(err, errs.Capacity) {
		t.Fatal(err)
	}
	a.Cancel()
	eventually(t, func() bool { return c.Call(t.Context(), "", "echo", nil, nil) == nil })

	// A client that does not count is refused by the server and stays connected.
	p := rawClient(t, ServerConfig{MaxStreams: 1})
	p.write(openFrame(1, 0, "hang", nil), openFrame(3, 0, "hang", nil))
	h, payload := p.expect(typeEnd)
	status, _, _ := msg.ParseEnd(payload)
	if h.stream != 3 || !errors.Is(FromStatus(status), errs.Capacity) {
		t.Fatalf("stream %d: %v", h.stream, FromStatus(status))
	}
	// Cancelled handlers count until they return.
	p.write(rawFrame(typeCancel, 0, 1, 1, nil))
}

func TestShutdownDrains(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	h := testHandlers()
	h["slow"] = func(ctx context.Context, s *Stream) (Message, error) {
		<-release
		return &msg.Selector{Tag: "done"}, nil
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := NewServer(ServerConfig{Handlers: h})
	served := make(chan error, 1)
	go func() { served <- srv.Serve(context.Background(), l) }()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewClient(t.Context(), conn, ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := c.Open(t.Context(), "", "slow", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Call(t.Context(), "", "echo", nil, nil); err != nil { // slow has started
		t.Fatal(err)
	}
	down := make(chan error, 1)
	go func() { down <- srv.Shutdown(context.Background()) }()
	eventually(t, func() bool { return errors.Is(c.Call(t.Context(), "", "echo", nil, nil), errs.ShuttingDown) })
	close(release)
	drain(t, s)
	var m msg.Selector
	if err := s.Result(&m); err != nil || m.Tag != "done" {
		t.Fatalf("%q, %v", m.Tag, err)
	}
	if err := <-down; err != nil {
		t.Fatal(err)
	}
	if err := <-served; err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if !errors.Is(c.Err(), errs.ShuttingDown) {
		t.Fatal(c.Err())
	}
	if _, err := net.Dial("tcp", l.Addr().String()); err == nil {
		t.Fatal("it still accepts")
	}
}

func TestShutdownCutsOffAtItsDeadline(t *testing.T) {
	t.Parallel()
	c, srv := startPair(t, ServerConfig{}, ClientConfig{})
	s, err := c.Open(t.Context(), "", "hang", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Call(t.Context(), "", "echo", nil, nil); err != nil { // hang has started
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := srv.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if _, err := s.Recv(t.Context()); !errors.Is(err, errs.ShuttingDown) {
		t.Fatal(err)
	}
}

func TestServeConnEndsWithItsContext(t *testing.T) {
	t.Parallel()
	cs, ss := socketPair(t)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- NewServer(ServerConfig{Handlers: testHandlers()}).ServeConn(ctx, ss) }()
	c, err := NewClient(t.Context(), cs, ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	cancel()
	if err := <-served; err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if !errors.Is(c.Err(), errs.ShuttingDown) {
		t.Fatal(c.Err())
	}
}

// The connection works over any net.Conn, one without a descriptor or buffers included.
func TestPipeTransport(t *testing.T) {
	t.Parallel()
	cs, ss := net.Pipe()
	c, _ := startOn(t, cs, ss, ServerConfig{}, ClientConfig{})
	s, err := c.Open(t.Context(), "", "pipe", nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		s.Send(t.Context(), KindInput, make([]byte, 2<<20))
		s.CloseSend()
	}()
	if n := drain(t, s); n != 2<<20 {
		t.Fatal(n)
	}
}

// Many goroutines on one stream: every byte arrives, and END is the last word.
func TestConcurrentSenders(t *testing.T) {
	t.Parallel()
	const senders, each = 8, 300 << 10
	h := map[string]Handler{"many": func(ctx context.Context, s *Stream) (Message, error) {
		var wg sync.WaitGroup
		for i := range senders {
			wg.Go(func() {
				for sent := 0; sent < each; sent += 3000 {
					s.Send(ctx, Kind(1+i%2), make([]byte, 3000))
				}
			})
		}
		wg.Wait()
		return nil, nil
	}}
	c, _ := startPair(t, ServerConfig{Handlers: h}, ClientConfig{})
	s, err := c.Open(t.Context(), "", "many", nil)
	if err != nil {
		t.Fatal(err)
	}
	if n, want := drain(t, s), senders*((each+2999)/3000)*3000; n != want {
		t.Fatalf("%d bytes, want %d", n, want)
	}
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if err := s.Send(t.Context(), KindInput, []byte("x")); !errors.Is(err, errs.Conflict) {
		t.Fatal(err)
	}
}

// The cost of one more idle connection, both ends of it, after it has been used.
func TestIdleConnectionIsSmall(t *testing.T) {
	const n = 300
	measure := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	srv := NewServer(ServerConfig{Handlers: testHandlers()})
	defer srv.Close()
	conns := make([]*Conn, 0, n)
	open := func() {
		cs, ss := socketPair(t)
		go srv.ServeConn(context.Background(), ss)
		c, err := NewClient(t.Context(), cs, ClientConfig{})
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
		for range 3 {
			if err := c.Call(t.Context(), "sb", "echo", &msg.InputRequest{Data: make([]byte, 100)}, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 50 {
		open()
	}
	before := measure()
	for range n {
		open()
	}
	per := (int64(measure()) - int64(before)) / n / 2
	t.Logf("%d bytes per idle end of a connection", per)
	if per > 12<<10 && !raceEnabled { // the race detector has costs of its own
		t.Errorf("an idle connection costs %d bytes, the limit is %d", per, 12<<10)
	}
	for _, c := range conns {
		c.Close()
	}
}
