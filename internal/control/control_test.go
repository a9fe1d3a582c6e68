package control_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const rootToken = "root-token-for-tests"

func start(t *testing.T, dir string) *control.Control {
	t.Helper()
	c, err := control.Start(t.Context(), control.Config{Listen: "127.0.0.1:0", RootToken: rootToken, DataDir: dir, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return c
}

func post(t *testing.T, addr net.Addr, token, path, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr.String()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var b strings.Builder
	if _, err := io.Copy(&b, res.Body); err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, b.String()
}

// The whole control plane on a real embedded etcd, over a restart.
func TestWholeControlPlaneOverARestart(t *testing.T) {
	dir := t.TempDir()
	var made string
	t.Run("first", func(t *testing.T) {
		c := start(t, dir)
		controltest.Start(t, controltest.Config{Store: c.Store()})
		if err := c.WaitEdge(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		status, body := post(t, c.Addr(), rootToken, "/v1/sandboxes", `{"backend":"hollow"}`)
		if status != 201 || !strings.Contains(body, `"state":"running"`) {
			t.Fatal(status, body)
		}
		status, made = post(t, c.Addr(), rootToken, "/v1/tokens", `{"name":"ci","rights":["read"]}`)
		if status != 201 {
			t.Fatal(status, made)
		}
	})
	c := start(t, dir)
	_, secret, _ := strings.Cut(made, `"secret":"`)
	secret, _, _ = strings.Cut(secret, `"`)
	if status, body := post(t, c.Addr(), secret, "/v1/sandboxes", `{"backend":"hollow"}`); status != 403 {
		t.Errorf("the token of before the restart gives %d %s", status, body)
	}
	if status, body := post(t, c.Addr(), rootToken, "/v1/sandboxes", `{"backend":"hollow"}`); status != 503 || !strings.Contains(body, "no_node") {
		t.Errorf("without an edge: %d %s", status, body)
	}
}

// A request that comes before the edges that are awaited waits for them, and then meets them.
func TestRequestsWaitForEdges(t *testing.T) {
	c, err := control.Start(t.Context(), control.Config{Listen: "127.0.0.1:0", RootToken: rootToken, DataDir: t.TempDir(), Edges: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	conn, err := net.Dial("tcp", c.Addr().String()) // it is accepted by the kernel alone
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const body = `{"backend":"hollow"}`
	if _, err := fmt.Fprintf(conn, "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s", rootToken, len(body), body); err != nil {
		t.Fatal(err)
	}
	controltest.Start(t, controltest.Config{Store: c.Store()})
	answer, err := io.ReadAll(conn)
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 201") {
		t.Errorf("%q, %v", answer, err)
	}
}

// Nothing is left of one that is closed while it waits.
func TestCloseWhileEdgesAreAwaited(t *testing.T) {
	c, err := control.Start(t.Context(), control.Config{Listen: "127.0.0.1:0", RootToken: rootToken, DataDir: t.TempDir(), Edges: 1})
	if err != nil {
		t.Fatal(err)
	}
	address := c.Addr().String()
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}

func TestStartFailsClearly(t *testing.T) {
	for name, cfg := range map[string]control.Config{
		"no store":        {Listen: "127.0.0.1:0", RootToken: rootToken},
		"weak root token": {Listen: "127.0.0.1:0", RootToken: "x", DataDir: t.TempDir()},
		"bad address":     {Listen: "256.0.0.1:1", RootToken: rootToken, DataDir: t.TempDir()},
	} {
		if c, err := control.Start(t.Context(), cfg); err == nil {
			c.Close(t.Context())
			t.Errorf("%s: started", name)
		}
	}
}

// A server that was killed leaves its socket, which must not keep the next one from
// starting; that of one that runs is its own.
func TestASocketOfAKilledServerIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "api.sock")
	old, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	cfg := control.Config{Listen: "unix:" + path, RootToken: rootToken, DataDir: t.TempDir()}
	if c, err := control.Start(t.Context(), cfg); err == nil {
		c.Close(t.Context())
		t.Fatal("it took the socket of a server that runs")
	}
	old.(*net.UnixListener).SetUnlinkOnClose(false)
	old.Close()
	c, err := control.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
