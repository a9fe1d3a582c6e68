package placement

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"pgregory.net/rapid"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/watcher"
)

// fakeNodes is a registry: nodes with a capacity, and sandboxes that become known when
// the test says so.
type fakeNodes struct {
	mu    sync.Mutex
	loads []watcher.NodeLoad
	known map[string]bool
}

func (f *fakeNodes) Loads() []watcher.NodeLoad {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]watcher.NodeLoad(nil), f.loads...)
}

func (f *fakeNodes) Known(id string) bool { f.mu.Lock(); defer f.mu.Unlock(); return f.known[id] }

func (f *fakeNodes) add(node, id string, r v1.Resources) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.known[id] = true
	for i := range f.loads {
		if f.loads[i].Node.ID == node {
			f.loads[i].Used.Slots += r.Slots
			f.loads[i].Used.MemoryBytes += r.MemoryBytes
			f.loads[i].Used.CPUMillis += r.CPUMillis
		}
	}
}

func node(name string, slots int64) watcher.NodeLoad {
	return watcher.NodeLoad{Node: &v1.Node{
		ID: name, Epoch: 1, Ready: true, Backends: []v1.Backend{v1.BackendContainer},
		Capacity: v1.Resources{Slots: slots, MemoryBytes: 1000 * slots, CPUMillis: 1000 * slots},
	}}
}

var one = Need{Backend: v1.BackendContainer, Resources: v1.Resources{Slots: 1, MemoryBytes: 1000, CPUMillis: 1000}}

func newPlacer(seed uint64, loads ...watcher.NodeLoad) (*Placer, *fakeNodes) {
	f := &fakeNodes{loads: loads, known: map[string]bool{}}
	n := 0
	return New(f, func(node v1.Node) string { n++; return fmt.Sprint(node.ID, n) }, rand.NewPCG(seed, seed)), f
}

// Creates that overlap never use more of a node than it has, whichever order they
// start, become known and end in.
func TestNeverOversells(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var loads []watcher.NodeLoad
		capacity := int64(0)
		for i := range rapid.IntRange(1, 4).Draw(t, "nodes") {
			slots := rapid.Int64Range(1, 6).Draw(t, "slots")
			capacity += slots
			loads = append(loads, node(fmt.Sprint("n", i), slots))
		}
		p, f := newPlacer(rapid.Uint64().Draw(t, "seed"), loads...)
		type flight struct{ node, id string }
		var flying []flight
		placed := map[string]int64{}
		total := int64(0)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			if len(flying) > 0 && rapid.Bool().Draw(t, "land") {
				i := rapid.IntRange(0, len(flying)-1).Draw(t, "which")
				fl := flying[i]
				flying = append(flying[:i], flying[i+1:]...)
				f.add(fl.node, fl.id, one.Resources) // Apply comes before release
				p.release(fl.node, fl.id)
				continue
			}
			n, id, err := p.reserve(one, nil)
			if err != nil {
				if !errors.Is(err, errs.NodeFull) || total != capacity {
					t.Fatalf("refused with %d of %d used: %v", total, capacity, err)
				}
				continue
			}
			placed[n.ID]++
			total++
			if placed[n.ID] > n.Capacity.Slots {
				t.Fatalf("node %s has %d of %d", n.ID, placed[n.ID], n.Capacity.Slots)
			}
			flying = append(flying, flight{n.ID, id})
		}
	})
}

func TestBurstSpreads(t *testing.T) {
	t.Parallel()
	var loads []watcher.NodeLoad
	for i := range 10 {
		loads = append(loads, node(fmt.Sprint("n", i), 1000))
	}
	const seed, n = 7, 1000
	t.Logf("seed %d", seed)
	p, _ := newPlacer(seed, loads...)
	count := map[string]int{}
	for range n { // none of them ends
		where, _, err := p.reserve(one, nil)
		if err != nil {
			t.Fatal(err)
		}
		count[where.ID]++
	}
	for id, c := range count {
		if c < n/10*8/10 || c > n/10*12/10 {
			t.Errorf("node %s got %d of %d", id, c, n)
		}
	}
}

func TestNextCandidateAfterARefusal(t *testing.T) {
	t.Parallel()
	p, _ := newPlacer(1, node("a", 5), node("b", 5), node("c", 5))
	var asked []string
	err := p.Place(t.Context(), one, func(_ context.Context, n v1.Node, _ string) error {
		asked = append(asked, n.ID)
		if len(asked) < 3 {
			return errs.New(errs.EdgeUnreachable, "test", "no answer")
		}
		return nil
	})
	if err != nil || len(asked) != 3 || asked[0] == asked[1] || asked[1] == asked[2] || asked[0] == asked[2] {
		t.Errorf("asked %v, %v", asked, err)
	}
	if len(p.inFlight) != 0 {
		t.Errorf("reservations left: %v", p.inFlight)
	}
}

func TestWhatIsReportedWhenAllRefuse(t *testing.T) {
	t.Parallel()
	p, _ := newPlacer(1, node("a", 5), node("b", 5), node("c", 5))
	err := p.Place(t.Context(), one, func(_ context.Context, n v1.Node, id string) error {
		switch n.ID {
		case "a":
			return errs.New(errs.EdgeUnreachable, "test", "no answer")
		case "b":
			return errs.New(errs.DiskFull, "test", "no disk")
		}
		return errs.New(errs.NodeFull, "edge.admit", "memory").With("resource", "memory").After(3e9)
	})
	e := errs.Of(err)
	if e.Code != errs.NodeFull || e.Details["resource"] != "memory" || e.RetryAfter != 3e9 || e.Node != "c" || e.Sandbox == "" {
		t.Errorf("reported %+v", e)
	}
	err = p.Place(t.Context(), one, func(context.Context, v1.Node, string) error {
		return errs.New(errs.EdgeUnreachable, "test", "no answer")
	})
	if !errors.Is(err, errs.EdgeUnreachable) {
		t.Errorf("with no edge answering: %v", err)
	}
}

func TestAFinalErrorEndsTheSearch(t *testing.T) {
	t.Parallel()
	p, _ := newPlacer(1, node("a", 5), node("b", 5))
	asked := 0
	err := p.Place(t.Context(), one, func(context.Context, v1.Node, string) error {
		asked++
		return errs.New(errs.ImageNotFound, "test", "no image")
	})
	if asked != 1 || !errors.Is(err, errs.ImageNotFound) || errs.Of(err).Sandbox == "" {
		t.Errorf("asked %d times: %v", asked, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	asked = 0
	err = p.Place(ctx, one, func(context.Context, v1.Node, string) error {
		asked++
		cancel()
		return errs.New(errs.ConnectionLost, "test", "gone")
	})
	if asked != 1 || err == nil {
		t.Errorf("a caller that went away: asked %d times, %v", asked, err)
	}
}

func TestNoNode(t *testing.T) {
	t.Parallel()
	never := func(context.Context, v1.Node, string) error { t.Error("asked"); return nil }
	unready := node("a", 5)
	unready.Node.Ready = false
	full := node("a", 5)
	full.Used = v1.Resources{Slots: 5}
	big := Need{Backend: v1.BackendContainer, Resources: v1.Resources{Slots: 1, MemoryBytes: 1e6}}
	largeUnready, largeFull := node("b", 5), node("b", 5)
	largeUnready.Node.Capacity.MemoryBytes, largeFull.Node.Capacity.MemoryBytes = 1e7, 1e7
	largeUnready.Node.Ready = false
	largeFull.Used = v1.Resources{Slots: 5}
	small := node("a", 5000) // much in all, but a small machine
	small.Node.Largest = v1.Resources{MemoryBytes: 1e6 - 1}
	for name, c := range map[string]struct {
		load     []watcher.NodeLoad
		need     Need
		code     errs.Code
		resource string
		retry    bool
	}{
		"none registered":            {nil, one, errs.NoNode, "", true},
		"none ready":                 {[]watcher.NodeLoad{unready}, one, errs.NoNode, "", true},
		"backend":                    {[]watcher.NodeLoad{node("a", 5)}, Need{Backend: v1.BackendHollow}, errs.NoNode, "", true},
		"full":                       {[]watcher.NodeLoad{full}, one, errs.NodeFull, "slots", true},
		"too big for any":            {[]watcher.NodeLoad{node("a", 5)}, big, errs.SpecTooLarge, "memory", false},
		"too big for one sandbox":    {[]watcher.NodeLoad{small}, big, errs.SpecTooLarge, "memory", false},
		"the large one is not ready": {[]watcher.NodeLoad{node("a", 5), largeUnready}, big, errs.NodeFull, "", true},
		"the large one is full":      {[]watcher.NodeLoad{node("a", 5), largeFull}, big, errs.NodeFull, "slots", true},
	} {
		p, _ := newPlacer(1, c.load...)
		e := errs.Of(p.Place(t.Context(), c.need, never))
		if e.Code != c.code || e.Details["resource"] != c.resource || e.Retryable != c.retry || c.retry != (e.RetryAfter > 0) {
			t.Errorf("%s: %+v", name, e)
		}
	}
}

func TestImageDecidesWhereItIs(t *testing.T) {
	t.Parallel()
	has := node("b", 5)
	has.Images = map[string]struct{}{"sha256:x": {}}
	p, _ := newPlacer(1, node("a", 5), has, node("c", 5))
	need := one
	need.Digests = []string{"sha256:x"}
	for range 5 {
		if n, _, err := p.reserve(need, nil); err != nil || n.ID != "b" {
			t.Fatal(n.ID, err)
		}
	}
	// It is full now; others load the image.
	if n, _, err := p.reserve(need, nil); err != nil || n.ID == "b" {
		t.Error(n.ID, err)
	}
	need.Digests = []string{"sha256:nowhere"}
	if _, _, err := p.reserve(need, nil); err != nil {
		t.Errorf("an image that is nowhere: %v", err)
	}
}

func BenchmarkReserve(b *testing.B) {
	var loads []watcher.NodeLoad
	for i := range 100 {
		loads = append(loads, node(fmt.Sprint("n", i), 1000))
	}
	p, _ := newPlacer(1, loads...)
	b.ReportAllocs()
	for b.Loop() {
		n, id, err := p.reserve(one, nil)
		if err != nil {
			b.Fatal(err)
		}
		p.release(n.ID, id)
	}
}
