package apiserver_test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

func TestBadRequests(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	big := `{"image":"` + strings.Repeat("x", 2<<20) + `"}`
	for _, c := range []struct {
		method, path string
		body         any
		code, field  string
		status       int
	}{
		{"POST", "/v1/sandboxes", `{"backend":"hollow","colour":"red"}`, "bad_request", "colour", 400},
		{"POST", "/v1/sandboxes", `{"backend":"magic"}`, "unknown_backend", "backend", 400},
		{"POST", "/v1/sandboxes", `{"backend":"microvm","image":"debian"}`, "unknown_backend", "backend", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","cpu_millis":"many"}`, "bad_request", "cpu_millis", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","memory_bytes":1000}`, "bad_spec", "memory_bytes", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","pids":-1}`, "bad_request", "pids", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","pids":4194305}`, "bad_spec", "pids", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","user":"a\u0000b"}`, "bad_spec", "user", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","work_dir":"/a\u0000b"}`, "bad_spec", "work_dir", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","work_dir":"relative"}`, "bad_spec", "work_dir", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","count":2}`, "bad_request", "count", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","labels":{"a=b":"c"}}`, "bad_spec", "labels", 400},
		{"POST", "/v1/sandboxes", `{"image":""}`, "bad_spec", "image", 400},
		{"POST", "/v1/sandboxes", `{"image":"nosuch"}`, "image_not_found", "", 404},
		{"POST", "/v1/sandboxes", `{`, "bad_request", "", 400},
		{"POST", "/v1/sandboxes", `{} {}`, "bad_request", "", 400},
		{"POST", "/v1/sandboxes", `[1]`, "bad_request", "", 400},
		{"POST", "/v1/sandboxes", nil, "bad_request", "", 400},
		{"POST", "/v1/sandboxes", big, "body_too_large", "", 413},
		{"POST", "/v1/sandboxes?wait=1", `{"backend":"hollow"}`, "bad_request", "wait", 400},
		{"POST", "/v1/sandboxes/batch", `{"backend":"hollow","count":0}`, "bad_request", "count", 400},
		{"POST", "/v1/sandboxes/batch", `{"backend":"hollow","count":10001}`, "bad_request", "count", 400},
		{"POST", "/v1/sandboxes/batch", `{"backend":"hollow","memory_bytes":1000,"count":3}`, "bad_spec", "memory_bytes", 400},
		{"POST", "/v1/sandboxes/delete", `{}`, "bad_request", "ids", 400},
		{"POST", "/v1/sandboxes/delete", `{"ids":["a"],"labels":{"a":"b"}}`, "bad_request", "labels", 400},
		{"POST", "/v1/sandboxes/pause", `{}`, "bad_request", "ids", 400},
		{"POST", "/v1/sandboxes/resume", `{"ids":["a"],"labels":{"a":"b"}}`, "bad_request", "labels", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","qos":"best"}`, "bad_request", "qos", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","on_idle":"pause"}`, "bad_spec", "on_idle", 400},
		{"POST", "/v1/sandboxes", `{"backend":"hollow","idle_ttl_s":0.5}`, "bad_spec", "idle_ttl_s", 400},
		{"GET", "/v1/sandboxes/usage?id=a&label=b%3Dc", nil, "bad_request", "label", 400},
		{"GET", "/v1/sandboxes?limit=0", nil, "bad_request", "limit", 400},
		{"GET", "/v1/sandboxes?limit=x", nil, "bad_request", "limit", 400},
		{"GET", "/v1/sandboxes?state=dancing", nil, "bad_request", "state", 400},
		{"GET", "/v1/sandboxes?label=novalue", nil, "bad_request", "label", 400},
		{"GET", "/v1/sandboxes?label=a%3D1&label=a%3D2", nil, "bad_request", "label", 400},
		{"GET", "/v1/events?from=x", nil, "bad_request", "from", 400},
		{"GET", "/v1/events?from=1", nil, "revision_compacted", "", 410},
		{"GET", "/v1/events?from=9007199254740991", nil, "revision_compacted", "", 410},
		{"GET", "/v1/sandboxes/nonsense", nil, "sandbox_not_found", "", 404},
		{"DELETE", "/v1/sandboxes/nonsense", nil, "sandbox_not_found", "", 404},
		{"GET", "/v1/images/nosuch", nil, "image_not_found", "", 404},
		{"GET", "/v1/images/team/nosuch", nil, "image_not_found", "", 404},
		{"DELETE", "/v1/images/nosuch", nil, "image_not_found", "", 404},
		{"POST", "/v1/images", "x", "bad_request", "name", 400},
		{"POST", "/v1/images?name=a%20b", "x", "bad_request", "name", 400},
		{"POST", "/v1/images?name=a%2F..%2Fb", "x", "bad_request", "name", 400},
		{"POST", "/v1/images?name=a&format=zip", "x", "bad_request", "format", 400},
		{"GET", "/v1/nodes/nosuch", nil, "node_not_found", "", 404},
		{"POST", "/v1/tokens", `{"name":"x","rights":["fly"]}`, "bad_request", "rights[0]", 400},
		{"POST", "/v1/tokens", `{"name":"","rights":["read"]}`, "bad_request", "name", 400},
		{"POST", "/v1/tokens", `{"rights":["read"]}`, "bad_request", "name", 400},
		{"DELETE", "/v1/tokens/nosuch", nil, "token_not_found", "", 404},
		{"DELETE", "/v1/tokens/root", nil, "bad_request", "", 400},
		{"GET", "/v1/nothing", nil, "route_not_found", "", 404},
		{"PUT", "/v1/sandboxes", `{}`, "method_not_allowed", "", 405},
		{"GET", "/v1/aether", nil, "bad_request", "", 400},
	} {
		p := w.problem(c.code, c.method, c.path, c.body)
		if c.field != "" && (p.Details["field"] != c.field || !strings.Contains(p.Message, c.field)) && p.Message != "unknown query parameter" {
			t.Errorf("%s %s: the field %q is not named: %+v", c.method, c.path, c.field, p)
		}
		if p.Status != c.status {
			t.Errorf("%s %s: status %d, want %d", c.method, c.path, p.Status, c.status)
		}
	}
	w.edge.WantEmpty(t)
}

func TestWrongMethodNamesTheRightOnes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, h, _ := w.do("PATCH", "/v1/sandboxes", nil)
	if h.Get("Allow") != "GET, POST" {
		t.Errorf("Allow: %q", h.Get("Allow"))
	}
}

func TestAuthentication(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	read, sandbox, image := w.token(v1.RightRead), w.token(v1.RightSandbox), w.token(v1.RightImage)
	id := "/v1/sandboxes/" + sb.ID
	for _, c := range []struct {
		method, path string
		body         any
		right        v1.Right
		lacking      []string
	}{
		{"POST", "/v1/sandboxes", hollow, v1.RightSandbox, []string{read, image}},
		{"POST", "/v1/sandboxes/batch", hollow, v1.RightSandbox, []string{read, image}},
		{"POST", "/v1/sandboxes/delete", map[string]any{"ids": []string{sb.ID}}, v1.RightSandbox, []string{read, image}},
		{"POST", "/v1/sandboxes/pause", map[string]any{"ids": []string{sb.ID}}, v1.RightSandbox, []string{read, image}},
		{"POST", "/v1/sandboxes/resume", map[string]any{"ids": []string{sb.ID}}, v1.RightSandbox, []string{read, image}},
		{"POST", id + "/pause", nil, v1.RightSandbox, []string{read, image}},
		{"POST", id + "/resume", nil, v1.RightSandbox, []string{read, image}},
		{"POST", id + "/hint", v1.HintRequest{NextCall: 90}, v1.RightSandbox, []string{read, image}},
		{"GET", "/v1/sandboxes/usage", nil, v1.RightRead, nil},
		{"POST", id + "/capability", nil, v1.RightSandbox, []string{read, image}},
		{"DELETE", id, nil, v1.RightSandbox, []string{read, image}},
		{"POST", "/v1/images?name=x", "x", v1.RightImage, []string{read, sandbox}},
		{"DELETE", "/v1/images/debian", nil, v1.RightImage, []string{read, sandbox}},
		{"GET", "/v1/tokens", nil, v1.RightAdmin, []string{read, sandbox, image}},
		{"POST", "/v1/tokens", v1.TokenRequest{Name: "x", Rights: []v1.Right{v1.RightAdmin}}, v1.RightAdmin, []string{read, sandbox, image}},
		{"DELETE", "/v1/tokens/x", nil, v1.RightAdmin, []string{read, sandbox, image}},
		{"GET", "/v1/sandboxes", nil, v1.RightRead, nil},
		{"GET", id, nil, v1.RightRead, nil},
		{"GET", "/v1/events", nil, v1.RightRead, nil},
		{"GET", "/v1/images", nil, v1.RightRead, nil},
		{"GET", "/v1/nodes", nil, v1.RightRead, nil},
		{"GET", "/metrics", nil, v1.RightRead, nil},
	} {
		w.problem("bad_token", c.method, c.path, c.body, anonymous())
		w.problem("bad_token", c.method, c.path, c.body, as("wrong"))
		w.problem("bad_token", c.method, c.path, c.body, header{"Authorization", "Basic " + rootToken})
		for _, token := range c.lacking {
			if p := w.problem("missing_right", c.method, c.path, c.body, as(token)); p.Details["right"] != string(c.right) || !strings.Contains(p.Message, string(c.right)) {
				t.Errorf("%s %s: the right is not named: %+v", c.method, c.path, p)
			}
		}
		if c.right == v1.RightRead {
			for _, token := range []string{read, sandbox, image} {
				if status, _, body := w.do(c.method, c.path, c.body, as(token)); status != 200 {
					t.Errorf("%s %s gives %d: %s", c.method, c.path, status, body)
				}
			}
		}
	}
	for _, open := range []string{"/v1/health", "/openapi.json", "/openapi.yaml"} {
		if status, _, _ := w.do("GET", open, nil, anonymous()); status != 200 {
			t.Errorf("%s gives %d", open, status)
		}
	}
	if got := want[v1.Sandbox](w, 200, "GET", id, nil); got.ID != sb.ID {
		t.Error("a request without the right removed the sandbox")
	}
}

func TestSandboxLife(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rev := want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes", nil).Revision
	sb := w.create(map[string]any{"image": "debian", "labels": map[string]string{"job": "a"}})
	if sb.State != v1.StateRunning || sb.Spec.MemoryBytes != v1.DefaultMemoryBytes || sb.ImageDigest != testImage.Digest || sb.Node != w.edge.Node().ID {
		t.Errorf("created %+v", sb)
	}
	if l := want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes?label=job%3Da", nil); len(l.Items) != 1 || l.Items[0].ID != sb.ID {
		t.Errorf("a create is not visible in the list at once: %+v", l)
	}
	if got := want[v1.Sandbox](w, 200, "GET", "/v1/sandboxes/"+sb.ID, nil); got.Usage == nil || got.Usage.MemoryBytes == 0 {
		t.Errorf("inspected without usage: %+v", got)
	}
	want[struct{}](w, 204, "DELETE", "/v1/sandboxes/"+sb.ID, nil)
	w.edge.WantEmpty(t)
	for _, method := range []string{"GET", "DELETE"} {
		if p := w.problem("sandbox_gone", method, "/v1/sandboxes/"+sb.ID, nil); p.Status != 410 || p.Sandbox != sb.ID {
			t.Errorf("%s of a removed sandbox: %+v", method, p)
		}
	}
	if l := want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes", nil); len(l.Items) != 0 {
		t.Errorf("still listed: %+v", l)
	}
	_, _, raw := w.do("GET", fmt.Sprintf("/v1/events?from=%d", rev), nil)
	evs := lines[v1.Event](t, raw)
	// States that follow each other within a moment are one event: "stopping" may be seen or not.
	n := len(evs)
	if n != 2 && n != 3 || evs[0].Sandbox.State != v1.StateRunning || evs[n-1].Type != v1.EventRemoved || evs[n-1].Revision != rev+uint64(n) {
		t.Errorf("events %s", raw)
	}
}

func TestUnknownAndLostIDs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	node := w.edge.Node()
	never := v1.SandboxID(node.ID, node.Epoch, 12345)
	time.Sleep(150 * time.Millisecond) // until then a node that is not registered may be on its way back
	for id, code := range map[string]string{
		never:                                  "sandbox_not_found",
		v1.SandboxID(node.ID, 0, 1):            "sandbox_lost",
		v1.SandboxID("zzzzzz", 1, 1):           "sandbox_lost",
		v1.SandboxID(node.ID, node.Epoch+1, 1): "sandbox_not_found",
	} {
		w.problem(code, "GET", "/v1/sandboxes/"+id, nil)
		w.problem(code, "DELETE", "/v1/sandboxes/"+id, nil)
		if id != never { // of that one the edge decides
			w.problem(code, "POST", "/v1/sandboxes/"+id+"/capability", nil)
		}
	}
}

func TestLostNodeAndItsReturn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	w.edge.Withdraw()
	eventually(t, "the sandbox is lost", func() bool {
		return want[v1.Sandbox](w, 200, "GET", "/v1/sandboxes/"+sb.ID, nil).State == v1.StateLost
	})
	if got := want[v1.Sandbox](w, 200, "GET", "/v1/sandboxes/"+sb.ID, nil); got.Error == nil || got.Error.Code != "sandbox_lost" || !got.Error.Infra {
		t.Errorf("a lost sandbox does not say why: %+v", got)
	}
	w.problem("no_node", "POST", "/v1/sandboxes", hollow)
	w.edge.Register()
	eventually(t, "the sandbox is back", func() bool {
		return want[v1.Sandbox](w, 200, "GET", "/v1/sandboxes/"+sb.ID, nil).State == v1.StateRunning
	})

	w.edge.Withdraw()
	eventually(t, "lost again", func() bool {
		return want[v1.Sandbox](w, 200, "GET", "/v1/sandboxes/"+sb.ID, nil).State == v1.StateLost
	})
	want[struct{}](w, 204, "DELETE", "/v1/sandboxes/"+sb.ID, nil) // legal in every state
	w.problem("sandbox_gone", "GET", "/v1/sandboxes/"+sb.ID, nil)
}

// What curl -d sends is said to be no JSON, and what to do.
func TestContentTypeHint(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.problem("bad_request", "POST", "/v1/sandboxes", `{"backend":"hollow"}`, header{"Content-Type", "application/x-www-form-urlencoded"})
	if !strings.Contains(p.Hint, "Content-Type: application/json") {
		t.Errorf("%+v", p)
	}
}

func TestEdgeThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	w.edge.Stop()
	if got := want[v1.Sandbox](w, 200, "GET", "/v1/sandboxes/"+sb.ID, nil); got.ID != sb.ID || got.Usage != nil {
		t.Errorf("what was last heard is %+v", got)
	}
	// Until the end of its connections is noticed, they say so themselves.
	eventually(t, "the edge is known to be unreachable", func() bool {
		_, _, raw := w.do("DELETE", "/v1/sandboxes/"+sb.ID, nil)
		var p v1.Problem
		if err := json.Unmarshal([]byte(raw), &p); err != nil || p.Class != string(errs.Unavailable) || !p.Retryable || !p.Infra {
			t.Fatalf("%v: %s", err, raw)
		}
		return p.Code == string(errs.EdgeUnreachable) && p.Node != ""
	})
	w.edge.Serve()
	eventually(t, "the edge is used again", func() bool {
		status, _, _ := w.do("POST", "/v1/sandboxes", hollow)
		return status == 201
	})
}

func TestListPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	made := map[string]bool{}
	for range 25 {
		made[w.create(hollow).ID] = true
	}
	after, pages := "", 0
	for {
		l := want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes?limit=10&state=running&after="+url.QueryEscape(after), nil)
		for _, sb := range l.Items {
			if !made[sb.ID] || sb.ID <= after {
				t.Fatalf("%s after %s", sb.ID, after)
			}
			delete(made, sb.ID)
			after = sb.ID
		}
		pages++
		if len(l.Items) < 10 {
			break
		}
	}
	if len(made) != 0 || pages != 3 {
		t.Errorf("%d not listed, %d pages", len(made), pages)
	}
}

func TestDeleteMany(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 40 {
		w.create(map[string]any{"backend": "hollow", "labels": map[string]string{"half": fmt.Sprint(i % 2)}})
	}
	_, _, raw := w.do("POST", "/v1/sandboxes/delete", v1.DeleteRequest{Labels: map[string]string{"half": "1"}})
	res := lines[v1.DeleteResult](t, raw)
	if len(res) != 20 || len(w.edge.Sandboxes()) != 20 {
		t.Errorf("%d results, %d left", len(res), len(w.edge.Sandboxes()))
	}
	ids := []string{res[0].ID, "nonsense"}
	for _, sb := range w.edge.Sandboxes() {
		ids = append(ids, sb.ID)
	}
	_, _, raw = w.do("POST", "/v1/sandboxes/delete", v1.DeleteRequest{IDs: ids})
	codes := map[string]int{}
	for _, r := range lines[v1.DeleteResult](t, raw) {
		if r.Error != nil {
			codes[r.Error.Code]++
		} else {
			codes["ok"]++
		}
	}
	if codes["ok"] != 20 || codes["sandbox_gone"] != 1 || codes["sandbox_not_found"] != 1 {
		t.Errorf("results %v", codes)
	}
	w.edge.WantEmpty(t)
	if status, _, raw := w.do("POST", "/v1/sandboxes/delete", v1.DeleteRequest{Labels: map[string]string{"half": "1"}}); status != 200 || raw != "" {
		t.Errorf("nothing to remove gives %d %q", status, raw)
	}
}

func TestStateChangesOfTheEdgeAreSeen(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	w.edge.Set(sb.ID, func(s *v1.Sandbox) { s.State = v1.StateFailed })
	eventually(t, "the list has it failed", func() bool {
		return len(want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes?state=failed", nil).Items) == 1
	})
}

func TestTwoEdges(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *control.Config, ec *controltest.Config) { ec.Capacity.Slots = 3 })
	controltest.Start(t, controltest.Config{Store: w.store, ID: "fakebb", Capacity: v1.Resources{Slots: 3}})
	w.awaitEdges(2)
	nodes := map[string]int{}
	for range 6 {
		nodes[w.create(hollow).Node]++
	}
	if nodes["fakeaa"] != 3 || nodes["fakebb"] != 3 {
		t.Errorf("placed %v", nodes)
	}
	if p := w.problem("node_full", "POST", "/v1/sandboxes", hollow); p.Details["resource"] != "slots" || p.RetryAfterMS == 0 {
		t.Errorf("%+v", p)
	}
	if l := want[v1.NodeList](w, 200, "GET", "/v1/nodes", nil); len(l.Items) != 2 || l.Items[0].ID != "fakeaa" || !l.Items[0].Ready {
		t.Errorf("nodes %+v", l)
	}
}
