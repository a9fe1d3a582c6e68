package edge

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
)

// Where descriptors are few, connections to guests that nobody uses are closed, those in use and those used a
// moment ago are not, and a guest whose connection was closed answers as before.
func TestIdleChannelsAreBounded(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	e.channels.most = 2
	control := b.control(e)
	var all []*sandbox
	open := func() (n int) {
		for _, s := range all {
			if hasChannel(s) {
				n++
			}
		}
		return n
	}
	create := func() *aether.Conn {
		t.Helper()
		v, err := b.create(control, e, nil)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e.get(v.ID))
		return b.dial(e, v.ID, v1.RightSandbox)
	}
	info := func(c *aether.Conn, s *sandbox) {
		t.Helper()
		var i msg.GuestInfo
		if err := c.Call(t.Context(), s.view.ID, "guest.info", &msg.Empty{}, &i); err != nil {
			t.Error(err)
		}
	}
	first := create()
	for range 3 {
		create()
	}
	if n := open(); n != 4 {
		t.Errorf("%d of 4 connections are open, though all were used a moment ago", n)
	}
	b.now.Add(int64(channelIdle))
	info(first, all[0])
	if n := open(); n != 2 {
		t.Errorf("%d connections are open, want 2", n)
	}
	if !hasChannel(all[0]) {
		t.Error("the one just used is closed")
	}
	// One of those that were closed answers, and another one goes for it.
	b.now.Add(int64(2 * time.Second))
	second := b.dial(e, all[1].view.ID, v1.RightSandbox)
	b.now.Add(int64(channelIdle))
	info(second, all[1])
	if n := open(); n != 2 {
		t.Errorf("%d connections are open, want 2", n)
	}
	// A removed one is forgotten.
	for _, s := range all {
		if _, err := e.remove(t.Context(), s.view.ID, v1.EndRequest); err != nil {
			t.Fatal(err)
		}
	}
	if n := e.channels.open.Len() + len(e.channels.of); n != 0 {
		t.Errorf("%d connections are known after the removal", n)
	}
}

func hasChannel(s *sandbox) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.guest != nil
}

// A connection with a stream stays open, however old.
func TestChannelsInUseStayOpen(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	server := aether.NewServer(aether.ServerConfig{Handlers: map[string]aether.Handler{
		"guest.info": func(ctx context.Context, _ *aether.Stream) (aether.Message, error) {
			select {
			case <-end:
			case <-ctx.Done():
			}
			return &msg.GuestInfo{}, nil
		},
	}})
	near, far := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- server.ServeConn(t.Context(), far) }()
	c, err := aether.NewClient(t.Context(), near, aether.ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := c.Open(t.Context(), "", "guest.info", &msg.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	s := newSandbox(nil, nil, v1.Sandbox{ID: "x", State: v1.StateRunning})
	s.guest = c
	if s.closeIdle() {
		t.Error("closed under a stream")
	}
	close(end)
	if _, err := stream.Recv(t.Context()); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	for c.Streams() > 0 { // until the end of the stream is read
		if _, err := stream.Recv(t.Context()); err != nil {
			break
		}
	}
	s.view.State = v1.StatePaused
	if s.closeIdle() {
		t.Error("closed while it is paused")
	}
	s.view.State = v1.StateRunning
	if !s.closeIdle() || s.guest != nil {
		t.Error("not closed though nothing goes on")
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}
