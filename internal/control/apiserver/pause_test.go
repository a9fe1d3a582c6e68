package apiserver_test

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

// codes counts outcomes by their code; "" is success.
func codes(list []v1.PauseResult) map[string]int {
	out := map[string]int{}
	for _, r := range list {
		if r.Error != nil {
			out[r.Error.Code]++
		} else {
			out[""]++
		}
	}
	return out
}

func (w *world) pauses(path string, req v1.PauseRequest) []v1.PauseResult {
	w.t.Helper()
	status, _, raw := w.do("POST", path, req)
	if status != 200 {
		w.t.Fatalf("%s gives %d: %s", path, status, raw)
	}
	return lines[v1.PauseResult](w.t, raw)
}

func TestJobIsPausedByOneCallOfEachEdge(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *control.Config, ec *controltest.Config) { ec.Capacity.Slots = 20 })
	other := controltest.Start(t, controltest.Config{Store: w.store, ID: "fakebb", Capacity: v1.Resources{Slots: 20}})
	w.awaitEdges(2)
	for range 40 {
		w.create(map[string]any{"backend": "hollow", "labels": map[string]string{"job": "x"}})
	}
	job := v1.PauseRequest{Labels: map[string]string{"job": "x"}}
	for round, changed := range []bool{true, false} {
		list := w.pauses("/v1/sandboxes/pause", job)
		if len(list) != 40 {
			t.Fatalf("%d outcomes", len(list))
		}
		for _, r := range list {
			if r.Error != nil || r.State != v1.StatePaused || r.Changed != changed || changed && r.FreedBytes != controltest.Freed {
				t.Fatalf("round %d: %+v", round, r)
			}
		}
	}
	// At once: the answer is no older than a list that follows it.
	if got := want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes?state=paused", nil).Items; len(got) != 40 || got[0].PausedAt == nil || got[0].PauseReason != v1.PauseRequested {
		t.Errorf("%d are listed as paused", len(got))
	}
	for _, e := range []*controltest.Edge{w.edge, other} {
		if asks := e.Asks(); len(asks) != 2 || asks[0].Method != "sandbox.pause" || len(asks[0].IDs) != 20 {
			t.Errorf("%s was asked %d times", e.Node().ID, len(asks))
		}
	}
	if got := codes(w.pauses("/v1/sandboxes/resume", job)); got[""] != 40 {
		t.Errorf("resumed: %v", got)
	}
	if n := len(want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes?state=running", nil).Items); n != 40 {
		t.Errorf("%d run", n)
	}
}

// A paused sandbox keeps its slot, and leaves CPU and memory to others.
func TestPausedSandboxLeavesRoom(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *control.Config, ec *controltest.Config) {
		ec.Capacity = v1.Resources{Slots: 2, CPUMillis: 1000, MemoryBytes: 1 << 30}
	})
	first := w.create(hollow)
	w.problem("node_full", "POST", "/v1/sandboxes", hollow)
	want[v1.PauseResult](w, 200, "POST", "/v1/sandboxes/"+first.ID+"/pause", nil)
	w.create(hollow)
	if p := w.problem("node_full", "POST", "/v1/sandboxes", hollow); p.Details["resource"] != "slots" {
		t.Errorf("%+v", p)
	}
}

func TestEveryIDHasItsOutcome(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *control.Config, ec *controltest.Config) { ec.Capacity.Slots = 3 })
	other := controltest.Start(t, controltest.Config{Store: w.store, ID: "fakebb"})
	w.awaitEdges(2)
	by := map[string][]string{}
	for len(by[w.edge.Node().ID]) < 3 || len(by[other.Node().ID]) < 3 {
		sb := w.create(hollow)
		by[sb.Node] = append(by[sb.Node], sb.ID)
	}
	here, there := by[w.edge.Node().ID], by[other.Node().ID]
	w.do(http.MethodDelete, "/v1/sandboxes/"+here[0], nil)
	w.edge.Set(here[1], func(s *v1.Sandbox) { s.State = v1.StateFailed })
	other.Stop()
	ids := []string{"nonsense", here[0], here[1], here[2], here[2], v1.SandboxID(w.edge.Node().ID, w.edge.Node().Epoch, 77), v1.SandboxID("nosuch", 1, 1), there[0], there[1]}
	list := w.pauses("/v1/sandboxes/pause", v1.PauseRequest{IDs: ids})
	if len(list) != len(ids) {
		t.Errorf("%d outcomes of %d ids", len(list), len(ids))
	}
	// An unknown node is not lost while this server is young, and one that stops says so or nothing.
	got := codes(list)
	if away := got["sandbox_lost"] + got["edge_unreachable"] + got["shutting_down"]; got[""] != 2 || got["sandbox_not_found"] != 2 || got["sandbox_gone"] != 1 || got["state_conflict"] != 1 || away != 3 {
		t.Errorf("outcomes %v", got)
	}
	for _, r := range list {
		if r.Error != nil && (r.Error.Sandbox != r.ID || r.Error.RequestID == "") {
			t.Errorf("%+v", r.Error)
		}
	}
}

// What an edge leaves open when its call ends has failed with the call.
func TestEdgeThatEndsBeforeAllOutcomes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for range 10 {
		w.create(map[string]any{"backend": "hollow", "labels": map[string]string{"job": "x"}})
	}
	w.edge.OnEach(func(_ context.Context, _ string, n int) error {
		if n == 4 {
			return errs.New(errs.ShuttingDown, "edge", "the node stops")
		}
		return nil
	})
	job := map[string]string{"job": "x"}
	if got := codes(w.pauses("/v1/sandboxes/pause", v1.PauseRequest{Labels: job})); got[""] != 4 || got["shutting_down"] != 6 {
		t.Errorf("outcomes %v", got)
	}
	_, _, raw := w.do("POST", "/v1/sandboxes/delete", v1.DeleteRequest{Labels: job})
	left := map[string]bool{}
	for _, r := range lines[v1.DeleteResult](t, raw) {
		if r.Error != nil {
			left[r.ID] = r.Error.Code == "shutting_down"
		}
	}
	if len(left) != 6 {
		t.Errorf("%d are not removed: %v", len(left), left)
	}
	for _, sb := range w.edge.Sandboxes() {
		if !left[sb.ID] {
			t.Errorf("%s is there, and nobody was told", sb.ID)
		}
	}
}

func TestClientThatLeavesEndsTheCall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	asked, ended := make(chan struct{}), make(chan struct{})
	w.edge.OnEach(func(ctx context.Context, _ string, _ int) error {
		close(asked)
		<-ctx.Done()
		close(ended)
		return ctx.Err()
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	res, err := w.client.Do(w.request(ctx, "POST", "/v1/sandboxes/"+sb.ID+"/pause", nil))
	if err == nil {
		res.Body.Close()
		t.Errorf("an answer: %s", res.Status)
	}
	<-ended
}

func TestPauseResumeHint(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sb := w.create(hollow)
	path := "/v1/sandboxes/" + sb.ID
	if r := want[v1.PauseResult](w, 200, "POST", path+"/pause", nil); r.ID != sb.ID || r.State != v1.StatePaused || !r.Changed {
		t.Errorf("%+v", r)
	}
	if r := want[v1.PauseResult](w, 200, "POST", path+"/resume", nil); r.State != v1.StateRunning || !r.Changed {
		t.Errorf("%+v", r)
	}
	if r := want[v1.HintResult](w, 200, "POST", path+"/hint", v1.HintRequest{NextCall: 1}); r.Action != "keep" || r.Sandbox.State != v1.StateRunning {
		t.Errorf("%+v", r)
	}
	if r := want[v1.HintResult](w, 200, "POST", path+"/hint", v1.HintRequest{NextCall: 90}); r.Action != "pause" || r.Sandbox.State != v1.StatePaused || r.Sandbox.Node != w.edge.Node().ID {
		t.Errorf("%+v", r)
	}
	if n := len(want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes?state=paused", nil).Items); n != 1 {
		t.Errorf("%d are paused", n)
	}
	if p := w.problem("bad_request", "POST", path+"/hint", v1.HintRequest{NextCall: 2 * v1.MaxTime}); p.Details["field"] != "next_call_s" {
		t.Errorf("%+v", p)
	}
	want[struct{}](w, 204, "DELETE", path, nil)
	for _, verb := range []string{"pause", "resume"} {
		w.problem("sandbox_gone", "POST", path+"/"+verb, nil)
		w.problem("sandbox_not_found", "POST", "/v1/sandboxes/nonsense/"+verb, nil)
	}
	w.problem("sandbox_gone", "POST", path+"/hint", v1.HintRequest{NextCall: 90})
}

func TestUsageOfMany(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var ids []string
	for i := range 6 {
		ids = append(ids, w.create(map[string]any{"backend": "hollow", "qos": "be", "labels": map[string]string{"half": fmt.Sprint(i % 2)}}).ID)
	}
	for _, c := range []struct {
		query string
		items int
		asked int // ids in the edge's call; 0: all
	}{{"", 6, 0}, {"?label=half%3D1", 3, 3}, {"?id=" + ids[0] + "&id=" + ids[1] + "&id=" + ids[0], 2, 2}} {
		l := want[v1.UsageList](w, 200, "GET", "/v1/sandboxes/usage"+c.query, nil)
		if len(l.Nodes) != 1 || len(l.Nodes[0].Items) != c.items || l.Nodes[0].Node.ID != w.edge.Node().ID || l.Nodes[0].CPUMillis != 2000 {
			t.Fatalf("%s: %+v", c.query, l)
		}
		for _, it := range l.Nodes[0].Items {
			if it.Usage == nil || it.Usage.MemoryBytes != 1<<20 || it.State != v1.StateRunning || it.QoS != v1.QoSBest || len(it.Labels) != 1 || it.MemoryBytes == 0 {
				t.Errorf("%s: %+v", c.query, it)
			}
		}
		if asks := w.edge.Asks(); len(asks[len(asks)-1].IDs) != c.asked {
			t.Errorf("%s asked for %d", c.query, len(asks[len(asks)-1].IDs))
		}
	}
	l := want[v1.UsageList](w, 200, "GET", "/v1/sandboxes/usage?id=nonsense&id="+ids[0], nil)
	if len(l.Unknown) != 1 || l.Unknown[0].Error.Code != "sandbox_not_found" || len(l.Nodes) != 1 || len(l.Nodes[0].Items) != 1 {
		t.Errorf("%+v", l)
	}
	w.edge.Stop()
	l = want[v1.UsageList](w, 200, "GET", "/v1/sandboxes/usage", nil)
	if len(l.Nodes) != 1 || l.Nodes[0].Error == nil || l.Nodes[0].Error.Class != "unavailable" || len(l.Nodes[0].Items) != 6 || l.Nodes[0].Items[0].Usage != nil {
		t.Errorf("of a node that does not answer: %+v", l)
	}
}
