package apiserver_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

func TestTokens(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	tok := want[v1.Token](w, 201, "POST", "/v1/tokens", v1.TokenRequest{Name: "ci", Rights: []v1.Right{v1.RightRead}, TTL: 3600})
	if tok.Secret == "" || tok.ExpiresAt == nil || tok.Project != "root" {
		t.Errorf("%+v", tok)
	}
	_, _, raw := w.do("GET", "/v1/tokens", nil)
	if !strings.Contains(raw, tok.ID) || strings.Contains(raw, tok.Secret) || strings.Contains(raw, rootToken) {
		t.Errorf("the list is %s", raw)
	}
	want[struct{}](w, 204, "DELETE", "/v1/tokens/"+tok.ID, nil)
	w.problem("bad_token", "GET", "/v1/sandboxes", nil, as(tok.Secret))
	w.problem("token_not_found", "DELETE", "/v1/tokens/"+tok.ID, nil)
}

func TestHealth(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if h := want[v1.Health](w, 200, "GET", "/v1/health", nil, anonymous()); !h.OK || h.Checks["store"] != "ok" || h.Checks["edges"] != "ok" || h.Version != "test" {
		t.Errorf("%+v", h)
	}
	w.store.Break(errors.New("etcd is on fire"))
	if h := want[v1.Health](w, 503, "GET", "/v1/health", nil, anonymous()); h.OK || !strings.Contains(h.Checks["store"], "fire") {
		t.Errorf("%+v", h)
	}
	w.create(hollow) // a create needs no store
	w.store.Break(nil)
	none := newWorld(t, func(_ *control.Config, ec *controltest.Config) { ec.ID = "none" })
	if h := want[v1.Health](none, 200, "GET", "/v1/health", nil, anonymous()); h.OK || h.Checks["edges"] == "ok" {
		t.Errorf("without an edge: %+v", h)
	}
	if p := none.problem("no_node", "POST", "/v1/sandboxes", hollow); p.RetryAfterMS == 0 || p.Status != 503 {
		t.Errorf("%+v", p)
	}
	none.problem("no_node", "POST", "/v1/images?name=x", "x")
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.create(hollow)
	w.problem("image_not_found", "POST", "/v1/sandboxes", `{"image":"nosuch"}`)
	w.problem("route_not_found", "GET", "/some/random/path", nil)
	_, _, raw := w.do("GET", "/metrics", nil)
	for _, line := range []string{
		`dsec_creates_total{reason="",result="ok"} 1`,
		`dsec_creates_total{reason="image_not_found",result="error"} 1`,
		`dsec_http_requests_total{route="POST /v1/sandboxes",status="201"} 1`,
		`dsec_http_requests_total{route="none",status="404"} 1`,
		`dsec_sandboxes{state="running"} 1`,
		`dsec_edges{ready="true"} 1`,
		`dsec_create_seconds_count 1`,
		`go_goroutines`, `process_open_fds`,
	} {
		if !strings.Contains(raw, line) {
			t.Errorf("no %s", line)
		}
	}
	if strings.Contains(raw, "random") {
		t.Error("a client's path became a label")
	}
}

func TestRequestIDs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.create(hollow, header{"X-Request-Id", "trace-42"})
	if reqs := w.edge.Requests(); reqs[len(reqs)-1] != "trace-42" {
		t.Errorf("the edge saw %v", reqs)
	}
	for _, sent := range []string{"", "with space", `quo"te`, strings.Repeat("x", 200)} {
		_, h, _ := w.do("GET", "/v1/health", nil, header{"X-Request-Id", sent})
		if got := h.Get("X-Request-Id"); got == sent || len(got) != 16 {
			t.Errorf("%q became %q", sent, got)
		}
	}
}

func TestNodes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	n := want[v1.Node](w, 200, http.MethodGet, "/v1/nodes/fakeaa", nil)
	if !n.Ready || n.Epoch != w.edge.Node().Epoch || n.Capacity.Slots != 10000 {
		t.Errorf("%+v", n)
	}
}
