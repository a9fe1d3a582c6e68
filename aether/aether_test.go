package aether

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

func TestMain(m *testing.M) {
	if sock := os.Getenv(benchSocketEnv); sock != "" {
		if err := serveForBenchmark(sock); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// socketPair returns the two ends of a Unix socket.
func socketPair(t testing.TB) (client, server net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err = net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	server, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return client, server
}

// testHandlers are operations that exercise every way to use a stream.
func testHandlers() map[string]Handler {
	return map[string]Handler{
		"echo": Unary(func(_ context.Context, _ *Stream, r *msg.InputRequest) (*msg.InputRequest, error) { return r, nil }),
		"where": func(_ context.Context, s *Stream) (Message, error) {
			return &msg.Selector{Tag: s.Target() + "|" + s.RequestID()}, nil
		},
		"fail": func(context.Context, *Stream) (Message, error) {
			return nil, errs.New(errs.PathNotFound, "test.fail", "nothing there").With("path", "/x").After(1500 * time.Millisecond).Because(errors.New("ENOENT"))
		},
		"panic": func(context.Context, *Stream) (Message, error) { panic("boom") },
		"hang": func(ctx context.Context, s *Stream) (Message, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
		// pipe sends back what it gets, as stdout and as messages.
		"pipe": func(ctx context.Context, s *Stream) (Message, error) {
			var n uint64
			for {
				f, err := s.Recv(ctx)
				if errors.Is(err, io.EOF) {
					return &msg.WriteResult{Bytes: n}, nil
				}
				if err != nil {
					return nil, err
				}
				n += uint64(len(f.Payload))
				if f.IsMessage {
					err = s.SendMessage(ctx, rawMessage(f.Payload))
				} else {
					err = s.Send(ctx, KindStdout, f.Payload)
				}
				if err != nil {
					return nil, err
				}
			}
		},
		// sink takes everything; source sends as many bytes as asked.
		"sink": func(ctx context.Context, s *Stream) (Message, error) {
			var n uint64
			for {
				f, err := s.Recv(ctx)
				if errors.Is(err, io.EOF) {
					return &msg.WriteResult{Bytes: n}, nil
				}
				if err != nil {
					return nil, err
				}
				n += uint64(len(f.Payload))
			}
		},
		"source": func(ctx context.Context, s *Stream) (Message, error) {
			var r msg.ReadRequest
			if err := s.Parse(&r); err != nil {
				return nil, err
			}
			buf := make([]byte, 64<<10)
			for left := r.Length; left > 0; {
				n := min(left, uint64(len(buf)))
				if err := s.Send(ctx, KindStdout, buf[:n]); err != nil {
					return nil, err
				}
				left -= n
			}
			return &msg.WriteResult{Bytes: r.Length}, nil
		},
	}
}

// startPair connects a client to a server over a Unix socket.
func startPair(t testing.TB, sc ServerConfig, cc ClientConfig) (*Conn, *Server) {
	t.Helper()
	cs, ss := socketPair(t)
	return startOn(t, cs, ss, sc, cc)
}

func startOn(t testing.TB, cs, ss net.Conn, sc ServerConfig, cc ClientConfig) (*Conn, *Server) {
	t.Helper()
	if sc.Handlers == nil {
		sc.Handlers = testHandlers()
	}
	srv := NewServer(sc)
	served := make(chan error, 1)
	go func() { served <- srv.ServeConn(context.Background(), ss) }()
	c, err := NewClient(context.Background(), cs, cc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		srv.Close()
		<-served
	})
	return c, srv
}

func TestCall(t *testing.T) {
	t.Parallel()
	c, _ := startPair(t, ServerConfig{Node: "n1", Generation: 7}, ClientConfig{})
	if w := c.Welcome(); w.Node != "n1" || w.Generation != 7 {
		t.Fatalf("welcome: %+v", w)
	}
	for _, n := range []int{0, 1, 100, 5000, 300_000, MaxPayload - 100} {
		req := &msg.InputRequest{Data: bytes.Repeat([]byte{'x'}, n)}
		var resp msg.InputRequest
		if err := c.Call(t.Context(), "sb", "echo", req, &resp); err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
		if !bytes.Equal(req.Data, resp.Data) {
			t.Fatalf("%d bytes came back as %d", n, len(resp.Data))
		}
	}
	var sel msg.Selector
	if err := c.Call(WithRequestID(t.Context(), "r1"), "sb", "where", nil, &sel); err != nil || sel.Tag != "sb|r1" {
		t.Fatalf("where: %q, %v", sel.Tag, err)
	}
}

func TestErrorsTravel(t *testing.T) {
	t.Parallel()
	c, _ := startPair(t, ServerConfig{}, ClientConfig{})
	err := c.Call(t.Context(), "", "fail", nil, nil)
	if !errors.Is(err, errs.NotFound) || !errors.Is(err, errs.PathNotFound) {
		t.Fatalf("got %v", err)
	}
	e := errs.Of(err)
	if e.Phase != "test.fail" || e.Details["path"] != "/x" || e.RetryAfter != 1500*time.Millisecond || e.Cause.Error() != "ENOENT" {
		t.Fatalf("got %+v", e)
	}
	for method, want := range map[string]errs.Code{"nope": errs.UnknownMethod, "panic": errs.InternalError} {
		if err := c.Call(t.Context(), "", method, nil, nil); !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %s", method, err, want)
		}
	}
	big := &msg.InputRequest{Data: make([]byte, MaxPayload)}
	if err := c.Call(t.Context(), "", "echo", big, nil); !errors.Is(err, errs.BodyTooLarge) {
		t.Errorf("big request: %v", err)
	}
}

func TestPipe(t *testing.T) {
	t.Parallel()
	c, _ := startPair(t, ServerConfig{}, ClientConfig{})
	s, err := c.Open(t.Context(), "", "pipe", nil)
	if err != nil {
		t.Fatal(err)
	}
	const total = 3 << 20
	go func() {
		s.SendMessage(t.Context(), &msg.Selector{Tag: "hello"})
		p := bytes.Repeat([]byte("0123456789abcdef"), total/16)
		s.Send(t.Context(), KindInput, p)
		s.CloseSend()
	}()
	f, err := s.Recv(t.Context())
	if err != nil || !f.IsMessage {
		t.Fatalf("first frame: %+v, %v", f, err)
	}
	first := len(f.Payload)
	n := 0
	for {
		f, err := s.Recv(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if f.IsMessage || f.Kind != KindStdout {
			t.Fatalf("frame %+v", f)
		}
		for i, b := range f.Payload {
			if want := "0123456789abcdef"[(n+i)%16]; b != want {
				t.Fatalf("byte %d is %q, want %q", n+i, b, want)
			}
		}
		n += len(f.Payload)
	}
	var r msg.WriteResult
	if err := s.Result(&r); err != nil || n != total || r.Bytes != uint64(total+first) {
		t.Fatalf("%d bytes, result %+v, %v", n, r, err)
	}
}
