package httpupgrade_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/httpupgrade"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

func handler(srv *aether.Server) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/aether", func(w http.ResponseWriter, r *http.Request) {
		conn, err := httpupgrade.Upgrade(w, r)
		if err != nil {
			e := errs.Of(err)
			http.Error(w, `{"code":"`+string(e.Code)+`","message":"`+e.Message+`"}`, errs.Lookup(e.Code).HTTP)
			return
		}
		srv.ServeConn(context.Background(), conn)
	})
	mux.HandleFunc("/json", func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(410)
		io.WriteString(w, `{"code":"sandbox_gone","message":"it was removed","phase":"api"}`)
	})
	mux.HandleFunc("/plain", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(401) })
	return mux
}

func newServer() *aether.Server {
	return aether.NewServer(aether.ServerConfig{Handlers: map[string]aether.Handler{
		"echo": aether.Unary(func(_ context.Context, _ *aether.Stream, r *msg.InputRequest) (*msg.InputRequest, error) {
			return r, nil
		}),
	}})
}

func TestUpgrade(t *testing.T) {
	t.Parallel()
	for _, secure := range []bool{false, true} {
		srv := newServer()
		defer srv.Close()
		h := httptest.NewUnstartedServer(handler(srv))
		var cfg *tls.Config
		if secure {
			h.EnableHTTP2 = true
			h.StartTLS()
			roots := x509.NewCertPool()
			roots.AddCert(h.Certificate())
			cfg = &tls.Config{RootCAs: roots}
		} else {
			h.Start()
		}
		defer h.Close()
		conn, err := httpupgrade.Dial(t.Context(), h.URL+"/aether", nil, cfg)
		if err != nil {
			t.Fatal(err)
		}
		c, err := aether.NewClient(t.Context(), conn, aether.ClientConfig{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for _, n := range []int{10, 700_000} {
			req, resp := &msg.InputRequest{Data: make([]byte, n)}, new(msg.InputRequest)
			if err := c.Call(t.Context(), "", "echo", req, resp); err != nil || len(resp.Data) != n {
				t.Fatalf("tls %v, %d bytes: %d, %v", secure, n, len(resp.Data), err)
			}
		}
	}
}

// A client may send its HELLO without waiting for the 101.
func TestFramesBehindTheRequest(t *testing.T) {
	t.Parallel()
	srv := newServer()
	defer srv.Close()
	h := httptest.NewServer(handler(srv))
	defer h.Close()
	conn, err := net.Dial("tcp", h.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	early := &eager{Conn: conn, head: "GET /aether HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: aether/1\r\n\r\n"}
	c, err := aether.NewClient(t.Context(), early, aether.ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Call(t.Context(), "", "echo", nil, nil); err != nil {
		t.Fatal(err)
	}
}

// eager sends head in one write with the first frame and skips the HTTP answer.
type eager struct {
	net.Conn
	head string
	r    *bufio.Reader
}

func (e *eager) Write(p []byte) (int, error) {
	if e.head == "" {
		return e.Conn.Write(p)
	}
	_, err := e.Conn.Write(append([]byte(e.head), p...))
	e.head = ""
	return len(p), err
}

func (e *eager) Read(p []byte) (int, error) {
	if e.r == nil {
		e.r = bufio.NewReader(e.Conn)
		for {
			line, err := e.r.ReadString('\n')
			if err != nil {
				return 0, err
			}
			if strings.TrimSpace(line) == "" {
				break
			}
		}
	}
	return e.r.Read(p)
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	srv := newServer()
	defer srv.Close()
	h := httptest.NewServer(handler(srv))
	defer h.Close()
	for path, want := range map[string]error{"/json": errs.SandboxGone, "/plain": errs.BadToken, "/none": errs.NotFound} {
		_, err := httpupgrade.Dial(t.Context(), h.URL+path, nil, nil)
		if !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", path, err, want)
		}
	}
	resp, err := http.Get(h.URL + "/aether")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 400 {
		t.Errorf("plain GET: %s", resp.Status)
	}
	for _, bad := range []string{"ftp://x/", "nonsense", "http://"} {
		if _, err := httpupgrade.Dial(t.Context(), bad, nil, nil); !errors.Is(err, errs.BadRequest) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestDialHonoursContext(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts, never answers
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := httpupgrade.Dial(ctx, "http://"+l.Addr().String()+"/", nil, nil); !errors.Is(err, errs.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
}
