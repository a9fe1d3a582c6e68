package apiserver_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

func TestIdempotencyKeyUnderConcurrency(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	gate := make(chan struct{})
	w.edge.OnCreate(func(ctx context.Context, _ *v1.EdgeCreate) error {
		select {
		case <-gate:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	const n = 50
	var (
		wg     sync.WaitGroup
		ids    sync.Map
		opened atomic.Int32
	)
	for range n {
		wg.Go(func() {
			opened.Add(1)
			sb := w.create(hollow, withKey("one"))
			ids.Store(sb.ID, true)
			if sb.IdempotencyKey != "" {
				t.Errorf("the key is shown: %q", sb.IdempotencyKey)
			}
		})
	}
	eventually(t, "all are under way", func() bool { return opened.Load() == n && w.edge.Creates() > 0 })
	close(gate)
	wg.Wait()
	count := 0
	ids.Range(func(any, any) bool { count++; return true })
	if count != 1 || w.edge.Creates() != 1 {
		t.Errorf("%d ids, %d creates on the edge", count, w.edge.Creates())
	}
	if p := w.problem("idempotency_key_reused", "POST", "/v1/sandboxes", `{"backend":"hollow","pids":100}`, withKey("one")); p.Status != 409 {
		t.Errorf("%+v", p)
	}
	// A default that is written out is the same request.
	if sb := w.create(`{"backend":"hollow","pids":1024}`, withKey("one")); sb.IdempotencyKey != "" {
		t.Error("the key is shown")
	}
	for _, path := range []string{"/v1/sandboxes", "/v1/sandboxes/" + w.edge.Sandboxes()[0].ID, "/v1/events"} {
		if _, _, raw := w.do("GET", path, nil); strings.Contains(raw, "idempotency") || strings.Contains(raw, "root:one") {
			t.Errorf("%s shows the key: %s", path, raw)
		}
	}
	want[struct{}](w, 204, "DELETE", "/v1/sandboxes/"+w.edge.Sandboxes()[0].ID, nil)
	w.problem("sandbox_gone", "POST", "/v1/sandboxes", hollow, withKey("one"))
	for _, path := range []string{"/v1/sandboxes", "/v1/sandboxes/batch"} { // a batch says it once, too
		for _, bad := range []string{"white space", "\u00e9", `a"b`, strings.Repeat("x", 256)} {
			p := w.problem("bad_request", "POST", path, hollow, withKey(bad))
			if p.Details["field"] != "Idempotency-Key" || !strings.Contains(p.Message, "1 to 255 visible ASCII") {
				t.Errorf("%s, key %q: %+v", path, bad, p)
			}
		}
	}
	w.create(hollow, withKey(strings.Repeat("x", 255)))
}

func TestFailedCreateFreesItsKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.edge.OnCreate(func(context.Context, *v1.EdgeCreate) error { return errs.New(errs.DiskFull, "edge.create", "no space") })
	if p := w.problem("disk_full", "POST", "/v1/sandboxes", hollow, withKey("k")); p.Status != 507 || p.Sandbox == "" {
		t.Errorf("%+v", p)
	}
	w.edge.OnCreate(nil)
	w.create(`{"backend":"hollow","pids":99}`, withKey("k"))
}

func TestIdempotencyKeySurvivesARestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first := w.create(hollow, withKey("k"))
	for range 10 {
		w.create(hollow)
	}
	w.shut()
	w.serve(nil, &controltest.Config{})
	// At once: before the edge's watch has told everything.
	if again := w.create(hollow, withKey("k")); again.ID != first.ID || again.IdempotencyKey != "" {
		t.Errorf("another sandbox after the restart: %s, not %s", again.ID, first.ID)
	}
	w.problem("idempotency_key_reused", "POST", "/v1/sandboxes", `{"backend":"hollow","pids":100}`, withKey("k"))
	if n := w.edge.Creates(); n != 11 {
		t.Errorf("%d creates", n)
	}
	if l := want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes", nil); len(l.Items) != 11 {
		t.Errorf("%d sandboxes known after the restart", len(l.Items))
	}
}

// vanish starts a request, waits until the edge has it, and goes away.
func vanish(t *testing.T, w *world, path string, body any, headers ...header) {
	t.Helper()
	reached := make(chan struct{}, 100)
	w.edge.OnCreate(func(ctx context.Context, _ *v1.EdgeCreate) error {
		reached <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	req := w.request(ctx, "POST", path, body, headers...)
	go func() {
		defer close(done)
		res, err := w.client.Do(req)
		if err == nil {
			_, _ = io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
	}()
	<-reached
	cancel()
	<-done
}

func TestClientThatVanishesMidCreateLeavesNothing(t *testing.T) {
	t.Parallel()
	for name, key := range map[string][]header{"plain": nil, "with a key": {withKey("k")}} {
		w := newWorld(t)
		vanish(t, w, "/v1/sandboxes", hollow, key...)
		eventually(t, name+": the create was canceled", func() bool {
			_, _, raw := w.do("GET", "/metrics", nil)
			return strings.Contains(raw, `dsec_creates_total{reason="request_canceled",result="error"} 1`)
		})
		w.edge.OnCreate(nil)
		w.edge.WantEmpty(t)
		w.create(hollow, key...) // and the key is free
	}
}

// The edge finishes a create whose client has left: its answer finds nobody.
func TestSandboxMadeForAClientThatLeftIsRemoved(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *control.Config, ec *controltest.Config) { ec.Stubborn = true })
	reached, release := make(chan struct{}), make(chan struct{})
	w.edge.OnCreate(func(context.Context, *v1.EdgeCreate) error { close(reached); <-release; return nil })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	req := w.request(ctx, "POST", "/v1/sandboxes", hollow)
	go func() {
		defer close(done)
		if res, err := w.client.Do(req); err == nil {
			res.Body.Close()
			t.Error("answered")
		}
	}()
	<-reached
	cancel()
	<-done
	eventually(t, "the create was given up", func() bool {
		_, _, raw := w.do("GET", "/metrics", nil)
		return strings.Contains(raw, `dsec_creates_total{reason="request_canceled",result="error"} 1`)
	})
	close(release)
	eventually(t, "what was made is removed", func() bool {
		_, _, raw := w.do("GET", "/metrics", nil)
		return strings.Contains(raw, `dsec_reaps_total{result="ok"} 1`)
	})
	w.edge.WantEmpty(t)
	if l := want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes", nil); len(l.Items) != 0 {
		t.Errorf("listed: %+v", l.Items)
	}
}

func TestOneOfSeveralWaitersMayLeave(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	reached, release := make(chan struct{}), make(chan struct{})
	w.edge.OnCreate(func(ctx context.Context, _ *v1.EdgeCreate) error {
		close(reached)
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan struct{})
	req := w.request(ctx, "POST", "/v1/sandboxes", hollow, withKey("k"))
	go func() {
		defer close(left)
		if res, err := w.client.Do(req); err == nil {
			res.Body.Close()
		}
	}()
	<-reached
	stays := make(chan v1.Sandbox, 1)
	go func() { stays <- w.create(hollow, withKey("k")) }()
	eventually(t, "the second waits", func() bool {
		_, _, raw := w.do("GET", "/metrics", nil)
		return strings.Contains(raw, "dsec_http_requests_in_flight 3")
	})
	cancel()
	<-left
	close(release)
	if sb := <-stays; sb.State != v1.StateRunning {
		t.Errorf("the one who stayed got %+v", sb)
	}
	if n := w.edge.Creates(); n != 1 {
		t.Errorf("%d creates", n)
	}
}

// A client that gave up and asks again gets a sandbox that stays, whether the edge gave up
// the first one in time or made it and it has to be removed.
func TestRetryWithAKeyWhileTheFirstCreateIsGivenUp(t *testing.T) {
	t.Parallel()
	for name, stubborn := range map[string]bool{"given up": false, "made for nobody": true} {
		w := newWorld(t, func(_ *control.Config, ec *controltest.Config) { ec.Stubborn = stubborn })
		reached, release := make(chan struct{}), make(chan struct{})
		var first sync.Once
		w.edge.OnCreate(func(ctx context.Context, _ *v1.EdgeCreate) error {
			wait := false
			first.Do(func() { wait = true })
			if !wait {
				return nil
			}
			close(reached)
			<-release
			return ctx.Err()
		})
		ctx, cancel := context.WithCancel(t.Context())
		left := make(chan struct{})
		req := w.request(ctx, "POST", "/v1/sandboxes", hollow, withKey("k"))
		go func() {
			defer close(left)
			if res, err := w.client.Do(req); err == nil {
				res.Body.Close()
				t.Error("answered")
			}
		}()
		<-reached
		cancel()
		<-left
		again := make(chan v1.Sandbox, 1)
		eventually(t, "the create was given up", func() bool {
			_, _, raw := w.do("GET", "/metrics", nil)
			return strings.Contains(raw, `dsec_creates_total{reason="request_canceled",result="error"} 1`)
		})
		go func() { again <- w.create(hollow, withKey("k")) }()
		eventually(t, "the second request waits", func() bool {
			_, _, raw := w.do("GET", "/metrics", nil)
			return strings.Contains(raw, "dsec_http_requests_in_flight 2")
		})
		close(release)
		sb := <-again
		eventually(t, "what was made for nobody is removed", func() bool {
			_, _, raw := w.do("GET", "/metrics", nil)
			return strings.Contains(raw, `dsec_reaps_total{result="ok"} 1`)
		})
		if left := w.edge.Sandboxes(); len(left) != 1 || left[0].ID != sb.ID {
			t.Errorf("%s: the answer was %s, and there are %+v", name, sb.ID, left)
		}
		if same := w.create(hollow, withKey("k")); same.ID != sb.ID {
			t.Errorf("%s: the key gives %s, not %s", name, same.ID, sb.ID)
		}
	}
}

func TestRenew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(`{"backend":"hollow","lease_s":30}`)
	if sb.Spec.Lease != 30 {
		t.Errorf("%+v", sb.Spec)
	}
	path := "/v1/sandboxes/" + sb.ID
	if status, _, raw := w.do("POST", path+"/renew", nil); status != 204 {
		t.Errorf("renew: %d %s", status, raw)
	}
	w.do("DELETE", path, nil)
	w.problem("sandbox_gone", "POST", path+"/renew", nil)
	w.problem("sandbox_not_found", "POST", "/v1/sandboxes/nosuch/renew", nil)
	for _, field := range []string{"lease_s", "max_ttl_s"} { // would overflow, and end at once
		w.problem("bad_spec", "POST", "/v1/sandboxes", `{"backend":"hollow","`+field+`":9e18}`)
	}
	w.problem("bad_spec", "POST", "/v1/sandboxes", `{"backend":"hollow","lease_s":0.5}`)
}

func TestUnknownBackendSaysWhichThereAre(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, want := range map[string]string{"microvm": "not in this version", "nosuch": "there is no backend"} {
		p := w.problem("unknown_backend", "POST", "/v1/sandboxes", `{"backend":"`+name+`"}`)
		if !strings.Contains(p.Message, want) || !strings.Contains(p.Message, "use container or hollow") {
			t.Errorf("%s: %s", name, p.Message)
		}
	}
}

func TestFullNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *control.Config, ec *controltest.Config) {
		ec.Capacity = v1.Resources{Slots: 10, MemoryBytes: 1 << 30}
	})
	w.create(`{"backend":"hollow","memory_bytes":1000000000}`)
	status, h, raw := w.do("POST", "/v1/sandboxes", `{"backend":"hollow","memory_bytes":500000000}`)
	var p v1.Problem
	if err := json.Unmarshal([]byte(raw), &p); err != nil {
		t.Fatal(err)
	}
	if status != 503 || p.Code != "node_full" || p.Details["resource"] != "memory" || h.Get("Retry-After") != "1" || p.RetryAfterMS != 1000 || !p.Retryable || !p.Infra {
		t.Errorf("%d %v %s", status, h, raw)
	}
	p = w.problem("spec_too_large", "POST", "/v1/sandboxes", `{"backend":"hollow","memory_bytes":5000000000}`)
	if p.Status != 400 || p.Retryable || p.Infra || p.RetryAfterMS != 0 || p.Details["largest"] != "1073741824" || !strings.Contains(p.Message, "1024 MiB") {
		t.Errorf("what no node can ever hold: %+v", p)
	}
}

func TestRefusalOfTheEdgeIsPassedOn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.edge.OnCreate(func(context.Context, *v1.EdgeCreate) error {
		return errs.New(errs.NodeFull, "edge.admit", "disk is short").With("resource", "disk").After(2500 * time.Millisecond)
	})
	status, h, raw := w.do("POST", "/v1/sandboxes", hollow)
	if status != 503 || h.Get("Retry-After") != "3" || !strings.Contains(raw, `"resource":"disk"`) || !strings.Contains(raw, `"node":"fakeaa"`) || !strings.Contains(raw, `"sandbox":"sfakeaa`) {
		t.Errorf("%d %v %s", status, h, raw)
	}
}

func TestBatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var n, most atomic.Int32
	w.edge.OnCreate(func(_ context.Context, req *v1.EdgeCreate) error {
		now := n.Add(1)
		defer n.Add(-1)
		for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
		}
		return nil
	})
	_, h, raw := w.do("POST", "/v1/sandboxes/batch", `{"backend":"hollow","count":100}`)
	res := lines[v1.CreateResult](t, raw)
	ids := map[string]bool{}
	for _, r := range res {
		if r.Sandbox != nil {
			ids[r.Sandbox.ID] = true
		}
	}
	if len(ids) != 100 || len(res) != 100 || h.Get("Content-Type") != "application/x-ndjson" || most.Load() > 16 {
		t.Errorf("%d ids in %d lines, %s, %d at once", len(ids), len(res), h.Get("Content-Type"), most.Load())
	}
}

func TestBatchTellsEachFailure(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *control.Config, ec *controltest.Config) { ec.Capacity.Slots = 5 })
	_, _, raw := w.do("POST", "/v1/sandboxes/batch", `{"backend":"hollow","count":8}`, withKey("b"))
	ok, full := 0, 0
	for _, r := range lines[v1.CreateResult](t, raw) {
		switch {
		case r.Sandbox != nil:
			ok++
		case r.Error.Code == "node_full" && r.Error.RequestID != "":
			full++
		}
	}
	if ok != 5 || full != 3 {
		t.Errorf("%d made, %d refused: %s", ok, full, raw)
	}
	// Again: those that were made are found.
	_, _, raw = w.do("POST", "/v1/sandboxes/batch", `{"backend":"hollow","count":8}`, withKey("b"))
	if got := strings.Count(raw, `"sandbox":{`); got != 5 || len(w.edge.Sandboxes()) != 5 {
		t.Errorf("%d in the second answer, %d on the edge", got, len(w.edge.Sandboxes()))
	}
}

func TestClientThatVanishesMidBatchKeepsOnlyWhatItWasTold(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var n atomic.Int32
	w.edge.OnCreate(func(ctx context.Context, _ *v1.EdgeCreate) error {
		if n.Add(1) > 3 {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	res, err := w.client.Do(w.request(ctx, "POST", "/v1/sandboxes/batch", `{"backend":"hollow","count":50}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	told := bufio.NewReader(res.Body)
	for range 3 {
		if _, err := told.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	eventually(t, "the request has ended", func() bool {
		_, _, raw := w.do("GET", "/metrics", nil)
		return strings.Contains(raw, "dsec_http_requests_in_flight 1")
	})
	w.edge.OnCreate(nil)
	eventually(t, "what was told is all there is", func() bool { return len(w.edge.Sandboxes()) == 3 })
}

// rawRequest sends a request on a connection of its own that the test then does not read.
func rawRequest(t *testing.T, w *world, method, path, body string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", w.ctl.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	// Small buffers, so that an unread answer soon blocks the writer.
	if err := conn.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	_, err = fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		method, path, rootToken, len(body), body)
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func TestReaderThatIsStuckEndsItsRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *control.Config, _ *controltest.Config) { c.StreamTimeout = 300 * time.Millisecond })
	labels := map[string]string{}
	for i := range 60 { // long lines fill the socket's buffers
		labels[fmt.Sprint("label", i)] = strings.Repeat("x", 250)
	}
	body, err := json.Marshal(map[string]any{"backend": "hollow", "labels": labels, "count": 2000})
	if err != nil {
		t.Fatal(err)
	}
	rawRequest(t, w, "POST", "/v1/sandboxes/batch", string(body))
	eventually(t, "the request has begun", func() bool { return w.edge.Creates() > 0 })
	eventually(t, "the stuck request has ended", func() bool {
		_, _, raw := w.do("GET", "/metrics", nil)
		return strings.Contains(raw, "dsec_http_requests_in_flight 1")
	})
	if n := w.edge.Creates(); n >= 2000 {
		t.Errorf("the whole batch was made for a reader that takes nothing")
	}
	w.create(hollow) // others go on
}

func TestCreateOutlivesTheBodyTimeout(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *control.Config, _ *controltest.Config) { c.BodyTimeout = 150 * time.Millisecond })
	w.edge.OnCreate(func(ctx context.Context, _ *v1.EdgeCreate) error {
		select { // longer than a body may take
		case <-time.After(500 * time.Millisecond):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	w.create(hollow)
}

func TestBodyThatDoesNotComeIsGivenUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *control.Config, _ *controltest.Config) { c.BodyTimeout = 150 * time.Millisecond })
	pr, pw := io.Pipe()
	defer pw.Close()
	if p := w.problem("deadline_exceeded", "POST", "/v1/sandboxes", pr); p.Status != 504 {
		t.Errorf("%+v", p)
	}
}

func TestEdgeThatDiesMidCreate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	reached := make(chan struct{})
	var once sync.Once
	w.edge.OnCreate(func(ctx context.Context, _ *v1.EdgeCreate) error {
		once.Do(func() { close(reached) })
		<-ctx.Done()
		return ctx.Err()
	})
	go func() { <-reached; w.edge.Stop() }()
	// Either the edge still says that it is stopping, or the connection is gone.
	_, _, raw := w.do("POST", "/v1/sandboxes", hollow)
	var p v1.Problem
	if err := json.Unmarshal([]byte(raw), &p); err != nil {
		t.Fatal(raw)
	}
	if p.Class != "unavailable" || !p.Retryable || !p.Infra || p.Sandbox == "" || p.Node != "fakeaa" {
		t.Errorf("%+v", p)
	}
	w.edge.OnCreate(nil)
	w.edge.Serve()
	eventually(t, "the edge is used again", func() bool {
		status, _, _ := w.do("POST", "/v1/sandboxes", hollow)
		return status == 201
	})
}

func TestShutdownDrains(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	reached, release := make(chan struct{}), make(chan struct{})
	w.edge.OnCreate(func(context.Context, *v1.EdgeCreate) error { close(reached); <-release; return nil })
	made := make(chan v1.Sandbox, 1)
	go func() { made <- w.create(hollow) }()
	res, err := w.client.Do(w.request(t.Context(), "GET", "/v1/events?follow=true", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	<-reached
	shut := make(chan struct{})
	go func() { defer close(shut); w.shut() }()
	raw, err := io.ReadAll(res.Body) // ends at once
	if err != nil {
		t.Fatal(err)
	}
	evs := lines[v1.Event](t, string(raw))
	if last := evs[len(evs)-1]; last.Error == nil || last.Error.Code != "shutting_down" {
		t.Errorf("the last line is %+v", last)
	}
	close(release)
	if sb := <-made; sb.State != v1.StateRunning {
		t.Errorf("the create under way got %+v", sb)
	}
	<-shut
	if _, err := w.client.Do(w.request(t.Context(), "GET", "/v1/health", nil)); err == nil || errors.Is(err, http.ErrServerClosed) {
		t.Errorf("after the shutdown: %v", err)
	}
}
