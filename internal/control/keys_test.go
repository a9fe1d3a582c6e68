package control_test

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

// pair is two apiservers on one etcd, with two edges.
func pair(t *testing.T) (servers [2]net.Addr, edges [2]*controltest.Edge) {
	t.Helper()
	first := start(t, t.TempDir())
	second, err := control.Start(t.Context(), control.Config{Listen: "127.0.0.1:0", RootToken: rootToken, Endpoints: first.Endpoints(), Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := second.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	for i, id := range []string{"fakeaa", "fakebb"} {
		edges[i] = controltest.Start(t, controltest.Config{Store: first.Store(), ID: id})
	}
	for i, c := range []*control.Control{first, second} {
		if err := c.WaitEdge(t.Context(), 2); err != nil {
			t.Fatal(err)
		}
		servers[i] = c.Addr()
	}
	return servers, edges
}

func createKeyed(t *testing.T, addr net.Addr, key, body string) (int, v1.Sandbox, v1.Problem) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr.String()+"/v1/sandboxes", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+rootToken)
	req.Header.Set("Idempotency-Key", key)
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Error(err)
		return 0, v1.Sandbox{}, v1.Problem{}
	}
	defer res.Body.Close()
	var sb v1.Sandbox
	var p v1.Problem
	if res.StatusCode < 300 {
		err = json.NewDecoder(res.Body).Decode(&sb)
	} else {
		err = json.NewDecoder(res.Body).Decode(&p)
	}
	if err != nil {
		t.Error(err)
	}
	return res.StatusCode, sb, p
}

const hollow = `{"backend":"hollow"}`

// However many ask, and wherever, one key makes one sandbox.
func TestOneKeyOverTwoApiservers(t *testing.T) {
	servers, edges := pair(t)
	for _, e := range edges { // long enough for all to come meanwhile
		e.OnCreate(func(context.Context, *v1.EdgeCreate) error { time.Sleep(20 * time.Millisecond); return nil })
	}
	for _, key := range []string{"a", "b", "c"} {
		before := len(edges[0].Sandboxes()) + len(edges[1].Sandboxes())
		var wg sync.WaitGroup
		var mu sync.Mutex
		ids := map[string]int{}
		for i := range 50 {
			wg.Go(func() {
				status, sb, p := createKeyed(t, servers[i%2], key, hollow)
				if status != 201 || sb.State != v1.StateRunning || sb.IdempotencyKey != "" {
					t.Errorf("%d %+v %+v", status, sb, p)
				}
				mu.Lock()
				defer mu.Unlock()
				ids[sb.ID]++
			})
		}
		wg.Wait()
		if made := len(edges[0].Sandboxes()) + len(edges[1].Sandboxes()) - before; len(ids) != 1 || made != 1 {
			t.Errorf("key %s: %d sandboxes were made, answers name %v", key, made, ids)
		}
	}
	for _, addr := range servers {
		if status, _, p := createKeyed(t, addr, "a", `{"backend":"hollow","pids":100}`); status != 409 || p.Code != string(errs.IdempotencyReuse) {
			t.Errorf("another request with the key: %d %+v", status, p)
		}
	}
}

// A create that failed at one apiserver leaves the key free at the other, and those who
// waited there for it create instead.
func TestFailedCreateFreesItsKeyEverywhere(t *testing.T) {
	servers, edges := pair(t)
	var once sync.Once
	begun := make(chan struct{})
	for _, e := range edges {
		e.OnCreate(func(context.Context, *v1.EdgeCreate) (err error) {
			once.Do(func() {
				close(begun)
				time.Sleep(50 * time.Millisecond)
				err = errs.New(errs.BadSpec, "edge.create", "not today") // not tried on the other edge
			})
			return err
		})
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if status, _, p := createKeyed(t, servers[0], "k", hollow); p.Code != string(errs.BadSpec) {
			t.Errorf("%d %+v", status, p)
		}
	})
	<-begun
	status, made, p := createKeyed(t, servers[1], "k", hollow)
	if status != 201 {
		t.Errorf("%d %+v", status, p)
	}
	wg.Wait()
	if status, again, p := createKeyed(t, servers[0], "k", hollow); status != 201 || again.ID != made.ID {
		t.Errorf("%d %+v %+v, want %s", status, again, p, made.ID)
	}
}
