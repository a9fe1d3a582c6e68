package robustness

import (
	"encoding/json"
	"strings"
	"testing"

	"dsec/internal/bench"
	"dsec/test/bed"
)

// The benchmark that kills the server starts it again as it was, and finds nothing lost.
func TestBenchRestart(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{Flags: []string{"--slots", "77"}})
	out := b.Must(t, "bench", "restart", "--data", b.Data, "--image", bed.Image, "--sandboxes", "6", "--paused", "2", "--kills", "2", "--load", "2", "--every", "500ms", "--json")
	var results []bench.Result
	if err := json.Unmarshal([]byte(out), &results); err != nil || len(results) != 2 {
		t.Fatalf("%v in %s", err, out)
	}
	for _, r := range results {
		if r.OK != 2 || r.Errors != 0 || r.Latency.Max <= 0 {
			t.Errorf("%+v", r)
		}
	}
	if x := results[0].Extra; x["load operations"] == 0 || x["lost"] != 0 || x["leaked"] != 0 || x["sandboxes"] != 6 {
		t.Errorf("%v", x)
	}
	nodes, err := b.Client(t).Nodes(t.Context())
	if err != nil || len(nodes) != 1 || nodes[0].Capacity.Slots != 77 {
		t.Errorf("%+v, %v", nodes, err)
	}
	if left := b.Must(t, "ls", "-q"); left != "" {
		t.Errorf("left: %s", left)
	}
	if r := b.CLI(t, "bench", "restart", "--data", b.Dir, "--image", bed.Image); r.Code == 0 || !strings.Contains(r.Stderr, "node_not_found") {
		t.Errorf("without a server: %+v", r)
	}
}
