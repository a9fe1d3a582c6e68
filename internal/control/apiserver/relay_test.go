package apiserver_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// dialAether upgrades a connection with a token. extra is sent along with the request, as
// an eager client may.
func dialAether(t testing.TB, w *world, token string) *aether.Conn {
	t.Helper()
	c, err := tryAether(t, w, token)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func tryAether(t testing.TB, w *world, token string) (*aether.Conn, error) {
	t.Helper()
	conn, err := net.Dial("tcp", w.ctl.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "GET /v1/aether HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nConnection: keep-alive, Upgrade\r\nUpgrade: aether/1\r\nX-Request-Id: up-1\r\n\r\n", token)
	r := bufio.NewReader(conn)
	res, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != http.StatusSwitchingProtocols {
		res.Body.Close()
		conn.Close()
		return nil, errors.New(res.Status)
	}
	if res.Header.Get("Upgrade") != "aether/1" || res.Header.Get("X-Request-Id") != "up-1" {
		t.Errorf("headers %v", res.Header)
	}
	return aether.NewClient(t.Context(), conn, aether.ClientConfig{})
}

func echo(ctx context.Context, c *aether.Conn, id, text string) (string, error) {
	var res msg.ExecResult
	err := c.Call(ctx, id, "process.exec", &msg.ExecRequest{Stdin: []byte(text)}, &res)
	return string(res.Stdout), err
}

func TestRelay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	c := dialAether(t, w, w.token(v1.RightSandbox))
	ctx := aether.WithRequestID(t.Context(), "call-7")
	if out, err := echo(ctx, c, sb.ID, "hello"); err != nil || out != "hello" {
		t.Fatal(out, err)
	}
	if !slices.Contains(w.edge.Requests(), "call-7") {
		t.Errorf("the request id did not reach the edge: %v", w.edge.Requests())
	}
	want[struct{}](w, 204, "DELETE", "/v1/sandboxes/"+sb.ID, nil)
	node := w.edge.Node()
	time.Sleep(150 * time.Millisecond) // until then a node that is not registered may be on its way back
	for id, code := range map[string]errs.Code{
		sb.ID:                                errs.SandboxGone,
		"nonsense":                           errs.SandboxNotFound,
		"":                                   errs.BadRequest,
		v1.SandboxID("zzzzzz", 1, 1):         errs.SandboxLost,
		v1.SandboxID(node.ID, 0, 1):          errs.SandboxLost,
		v1.SandboxID(node.ID, node.Epoch, 9): errs.SandboxNotFound, // said by the edge
	} {
		if _, err := echo(ctx, c, id, "x"); !errors.Is(err, code) {
			t.Errorf("target %q gives %v, want %s", id, err, code)
		}
	}
}

func TestRelayNeedsTheRight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	c := dialAether(t, w, w.token(v1.RightRead))
	if _, err := echo(t.Context(), c, sb.ID, "x"); !errors.Is(err, errs.MissingRight) {
		t.Errorf("a token that may only read gives %v", err)
	}
	if _, err := c.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{{Method: "process.exec", Target: sb.ID}}}); !errors.Is(err, errs.MissingRight) {
		t.Errorf("a batch gives %v", err)
	}
	if _, err := tryAether(t, w, "wrong"); err == nil || err.Error() != "401 Unauthorized" {
		t.Errorf("a wrong token gives %v", err)
	}
}

// What an edge serves for the control plane must not be reachable for clients, by any way.
func TestRelayHidesManagement(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	victim := w.create(hollow)
	mine := w.create(hollow)
	c := dialAether(t, w, w.token(v1.RightSandbox))
	ctx := t.Context()
	for _, method := range []string{"sandbox.create", "sandbox.delete", "sandbox.get", "edge.watch", "image.import", "image.delete", "image.list", "process.", "process", "nonsense", ""} {
		for _, target := range []string{"", mine.ID} {
			err := c.Call(ctx, target, method, &msg.SandboxRequest{Id: victim.ID}, nil)
			if err == nil || errors.Is(err, errs.SandboxNotFound) {
				t.Errorf("%q for %q gives %v", method, target, err)
			}
		}
	}
	kill := (&msg.SandboxRequest{Id: victim.ID}).AppendWire(nil)
	inner := (&msg.Batch{Ops: []*msg.BatchOp{{Method: "sandbox.delete", Body: kill}}}).AppendWire(nil)
	for name, b := range map[string]*msg.Batch{
		"by name":               {Ops: []*msg.BatchOp{{Method: "sandbox.delete", Target: mine.ID, Body: kill}}},
		"without target":        {Ops: []*msg.BatchOp{{Method: "sandbox.delete", Body: kill}}},
		"behind an allowed one": {Ops: []*msg.BatchOp{{Method: "process.exec", Target: mine.ID}, {Method: "sandbox.delete", Target: mine.ID, Body: kill}}},
		"nested":                {Ops: []*msg.BatchOp{{Method: "batch", Target: mine.ID, Body: inner}}},
		"mixed targets":         {Ops: []*msg.BatchOp{{Method: "process.exec", Target: victim.ID}, {Method: "edge.watch", Target: mine.ID}}},
	} {
		res, err := c.Batch(ctx, b)
		if err != nil {
			continue
		}
		if last := res.Items[len(res.Items)-1]; last.Error == nil {
			t.Errorf("%s: a batch went through", name)
		}
	}
	// The stream's own target, with an operation that names none.
	raw := msg.Batch{Ops: []*msg.BatchOp{{Method: "sandbox.delete", Body: kill}}}
	var res msg.BatchResult
	if err := c.Call(ctx, mine.ID, "batch", &raw, &res); err == nil && res.Items[0].Error == nil {
		t.Error("a batch on the stream's target went through")
	}
	if n := len(w.edge.Sandboxes()); n != 2 {
		t.Errorf("%d sandboxes left, want both", n)
	}
}

func TestRelayBatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.create(hollow), w.create(hollow)
	c := dialAether(t, w, w.token(v1.RightSandbox))
	op := func(id, text string) *msg.BatchOp {
		return &msg.BatchOp{Method: "process.exec", Target: id, Body: (&msg.ExecRequest{Stdin: []byte(text)}).AppendWire(nil)}
	}
	for name, ops := range map[string][]*msg.BatchOp{
		"one sandbox": {op(a.ID, "0"), op(a.ID, "1"), op(a.ID, "2")},
		"two":         {op(a.ID, "0"), op(b.ID, "1"), op("nonsense", "2")},
	} {
		res, err := c.Batch(t.Context(), &msg.Batch{Ops: ops})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for i, item := range res.Items {
			var out msg.ExecResult
			if ops[i].Target == "nonsense" {
				if !errors.Is(aether.FromStatus(item.Error), errs.SandboxNotFound) {
					t.Errorf("%s, %d: %+v", name, i, item)
				}
				continue
			}
			if item.Error != nil || out.ParseWire(item.Body) != nil || string(out.Stdout) != fmt.Sprint(i) {
				t.Errorf("%s, %d: %+v %q", name, i, item.Error, out.Stdout)
			}
		}
	}
}

func TestRevokedTokenLosesItsAetherConnection(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	tok := want[v1.Token](w, 201, "POST", "/v1/tokens", v1.TokenRequest{Name: "ci", Rights: []v1.Right{v1.RightSandbox}})
	c := dialAether(t, w, tok.Secret)
	if _, err := echo(t.Context(), c, sb.ID, "x"); err != nil {
		t.Fatal(err)
	}
	want[struct{}](w, 204, "DELETE", "/v1/tokens/"+tok.ID, nil)
	if _, err := echo(t.Context(), c, sb.ID, "x"); err == nil {
		t.Error("a revoked token still works on its connection")
	}
	select {
	case <-c.Done():
	case <-time.After(10 * time.Second):
		t.Error("the connection stays open")
	}
}

func TestBrokenEdgeConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	c := dialAether(t, w, rootToken)
	w.edge.Stop()
	if _, err := echo(t.Context(), c, sb.ID, "x"); !errors.Is(err, errs.Unavailable) {
		t.Errorf("with the edge down: %v", err)
	}
	w.edge.Serve()
	eventually(t, "calls work again", func() bool { _, err := echo(t.Context(), c, sb.ID, "x"); return err == nil })
}

func TestCapabilityOpensTheEdge(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	out := want[struct {
		Token     string    `json:"token"`
		ExpiresAt time.Time `json:"expires_at"`
		Address   string    `json:"address"`
	}](w, 201, "POST", "/v1/sandboxes/"+sb.ID+"/capability", nil)
	if out.Address != w.edge.Node().Address || time.Until(out.ExpiresAt) < time.Minute {
		t.Errorf("%+v", out)
	}
	conn, err := net.Dial("unix", out.Address[len("unix:"):])
	if err != nil {
		t.Fatal(err)
	}
	c, err := aether.NewClient(t.Context(), conn, aether.ClientConfig{Token: out.Token})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got, err := echo(t.Context(), c, sb.ID, "direct"); err != nil || got != "direct" {
		t.Error(got, err)
	}
}
