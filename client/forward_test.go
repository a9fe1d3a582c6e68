package client_test

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/client"
)

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Each side may end its own direction, and hears the other's end.
func TestForwardPassesHalfClosedConnections(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	inside := listen(t) // the fake's sandbox has this machine's loopback
	defer inside.Close()
	go func() {
		c, err := inside.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b, _ := io.ReadAll(c) // to the end that the client says
		c.Write(append(b, '!'))
	}()
	l := listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- sb.Forward(ctx, l, inside.Addr().(*net.TCPAddr).Port, client.ForwardOptions{Failed: func(err error) { t.Error(err) }})
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Write([]byte("hello"))
	c.(*net.TCPConn).CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "hello!" {
		t.Errorf("%q, %v", b, err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("ended by its caller: %v", err)
	}
	if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
		c.Close()
		t.Error("it still listens")
	}
}

func TestForwardTellsOfFailures(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	closed := listen(t)
	port := closed.Addr().(*net.TCPAddr).Port
	closed.Close()
	l := listen(t)
	failed, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		ended <- sb.Forward(t.Context(), l, port, client.ForwardOptions{Failed: func(err error) { failed <- err }})
	}()
	knock := func() {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		if b, err := io.ReadAll(c); len(b) > 0 || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%q, %v", b, err)
		}
	}
	knock()
	if err := <-failed; !errors.Is(err, errs.PortClosed) {
		t.Errorf("nothing listens: %v", err)
	}
	if err := sb.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	knock()
	if err := <-ended; !errors.Is(err, errs.SandboxGone) {
		t.Errorf("of a sandbox that is gone: %v", err)
	}
}

// Nobody needs to connect for it to be seen.
func TestForwardEndsWithTheSandbox(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	l := listen(t)
	ended := make(chan error, 1)
	go func() { ended <- sb.Forward(t.Context(), l, 1, client.ForwardOptions{}) }()
	if err := sb.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, errs.SandboxGone) {
			t.Errorf("of a sandbox that is gone: %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("it still listens")
	}
}

func TestStatsKeepsTheOrderAndEachError(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	ids := make([]string, 100)
	for i := range ids {
		ids[i] = sb.ID()
	}
	ids[50] = "saaaaaabbbbbcccccccccc"
	for i, s := range sb.Client().Stats(t.Context(), ids...) {
		if s.ID != ids[i] || (s.Err == nil) != (i != 50) || s.Err == nil && s.Sandbox.Usage == nil || s.Err != nil && !errors.Is(s.Err, client.ErrNotFound) {
			t.Errorf("%d: %+v", i, s)
		}
	}
	if all := sb.Client().Stats(t.Context()); len(all) != 0 {
		t.Errorf("of nothing: %+v", all)
	}
}
