package edges_test

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"dsec/aether"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/capability"
	"dsec/internal/control/controltest"
	"dsec/internal/control/edges"
	"dsec/internal/control/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newPool(t *testing.T, mem *storetest.Memory, claims capability.Claims) *edges.Pool {
	t.Helper()
	key, err := mem.SigningKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	signer, err := capability.NewSigner(key, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := edges.New(edges.Config{Token: func() (string, error) { return signer.Sign(claims) }, Size: 2})
	t.Cleanup(p.Close)
	return p
}

func good() capability.Claims {
	return capability.Claims{Subject: "test", Sandbox: "*", Rights: []v1.Right{v1.RightAdmin}, Expires: time.Now().Add(time.Minute)}
}

func TestPoolIsSmallAndShared(t *testing.T) {
	t.Parallel()
	mem := storetest.NewMemory("seed")
	edge := controltest.Start(t, controltest.Config{Store: mem})
	p := newPool(t, mem, good())
	var (
		mu    sync.Mutex
		wg    sync.WaitGroup
		conns = map[*aether.Conn]int{}
	)
	for range 100 {
		wg.Go(func() {
			c, err := p.Conn(t.Context(), edge.Node())
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			conns[c]++
		})
	}
	wg.Wait()
	if len(conns) != 2 {
		t.Errorf("%d connections", len(conns))
	}
	for _, n := range conns {
		if n != 50 {
			t.Errorf("a connection was given %d times of 100", n)
		}
	}
}

func TestConnectionsEndWithTheirEpoch(t *testing.T) {
	t.Parallel()
	mem := storetest.NewMemory("seed")
	edge := controltest.Start(t, controltest.Config{Store: mem})
	p := newPool(t, mem, good())
	node := edge.Node()
	old, err := p.Conn(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	next := node
	next.Epoch++
	if _, err := p.Conn(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	wantDone(t, old)
	if _, err := p.Conn(t.Context(), node); !errors.Is(err, errs.EdgeUnreachable) {
		t.Errorf("the old epoch gives %v", err)
	}
}

func TestForgottenNodesConnectionsEnd(t *testing.T) {
	t.Parallel()
	mem := storetest.NewMemory("seed")
	edge := controltest.Start(t, controltest.Config{Store: mem})
	p := newPool(t, mem, good())
	c, err := p.Conn(t.Context(), edge.Node())
	if err != nil {
		t.Fatal(err)
	}
	p.Forget(edge.Node().ID)
	wantDone(t, c)
	p.Close()
	if _, err := p.Conn(t.Context(), edge.Node()); !errors.Is(err, errs.ShuttingDown) {
		t.Errorf("a closed pool gives %v", err)
	}
}

func TestEdgeThatCannotBeReached(t *testing.T) {
	t.Parallel()
	mem := storetest.NewMemory("seed")
	edge := controltest.Start(t, controltest.Config{Store: mem})
	expired := good()
	expired.Expires = time.Now().Add(-time.Second)
	gone := edge.Node()
	gone.Address = "unix:/nonexistent/socket"
	for name, try := range map[string]func() error{
		"no socket": func() error { _, err := newPool(t, mem, good()).Conn(t.Context(), gone); return err },
		// The client who asked has a good token: it must not read "bad_token".
		"credential refused": func() error { _, err := newPool(t, mem, expired).Conn(t.Context(), edge.Node()); return err },
	} {
		err := try()
		e := errs.Of(err)
		if e.Code != errs.EdgeUnreachable || e.Node != edge.Node().ID || e.Cause == nil || !e.Infra {
			t.Errorf("%s: %+v", name, e)
		}
		if strings.Contains(name, "refused") && !strings.Contains(err.Error(), "expired") {
			t.Errorf("the cause is not told: %v", err)
		}
	}
}

func wantDone(t *testing.T, c *aether.Conn) {
	t.Helper()
	select {
	case <-c.Done():
	case <-time.After(10 * time.Second):
		t.Error("the connection stays open")
	}
}
