package pressure

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	v1 "dsec/api/v1"
)

// fakeNode frees what its sandboxes have when they are paused or evicted.
type fakeNode struct {
	mu      sync.Mutex
	free    int64
	stall   float64
	boxes   map[string]*fakeBox
	broken  map[string]bool // cannot be paused or evicted
	stuck   map[string]bool // cannot be paused
	did     []string
	scanned int
}

type fakeBox struct {
	Candidate
	memory int64
}

func (n *fakeNode) Read() Reading {
	n.mu.Lock()
	defer n.mu.Unlock()
	return Reading{FreeBytes: n.free, Stall: n.stall}
}

func (n *fakeNode) Candidates(yield func(Candidate)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.scanned++
	for _, b := range n.boxes {
		yield(b.Candidate)
	}
}

func (n *fakeNode) Pause(_ context.Context, c Candidate) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	id := c.ID
	b := n.boxes[id]
	if n.broken[id] || n.stuck[id] || b == nil || b.Paused || b.Uses > c.Uses {
		return errors.New("cannot be paused")
	}
	n.did = append(n.did, "pause "+id)
	b.Paused = true
	n.free += b.memory
	b.memory = 0
	return nil
}

func (n *fakeNode) Evict(_ context.Context, id string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.boxes[id]
	if n.broken[id] || b == nil {
		return errors.New("cannot be evicted")
	}
	n.did = append(n.did, "evict "+id)
	n.free += b.memory
	delete(n.boxes, id)
	return nil
}

// took returns what was done since the last call; within a round the order is not told.
func (n *fakeNode) took() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	slices.Sort(n.did)
	s := strings.Join(n.did, ", ")
	n.did = nil
	return s
}

type clock struct{ now time.Time }

func newPolicy(n *fakeNode) (*Policy, *clock) {
	c := &clock{time.Unix(1e9, 0)}
	return &Policy{Limits: LimitsFor(1000), Node: n, Now: func() time.Time { return c.now }}, c
}

func box(id string, qos v1.QoS, priority int, age time.Duration, memory int64) *fakeBox {
	at := time.Unix(1e9, 0).Add(-age)
	return &fakeBox{Candidate{ID: id, QoS: qos, Priority: priority, Active: at, Created: at}, memory}
}

func node(free int64, boxes ...*fakeBox) *fakeNode {
	n := &fakeNode{free: free, boxes: map[string]*fakeBox{}, broken: map[string]bool{}, stuck: map[string]bool{}}
	for _, b := range boxes {
		n.boxes[b.ID] = b
	}
	return n
}

// Levels begin at once, one by one or several, and end one by one after a while with more memory.
func TestLevels(t *testing.T) {
	t.Parallel()
	n := node(5000)
	p, c := newPolicy(n)
	var changes []string
	p.Changed = func(from, to Level, r Reading) {
		changes = append(changes, fmt.Sprintf("%v>%v at %d", from, to, r.FreeBytes))
	}
	for _, s := range []struct {
		free  int64
		stall float64
		after time.Duration
		want  Level
	}{
		{1000, 0, 0, None},
		{5000, 99, 0, None}, // sandboxes at their own limits
		{999, 0, 0, Admission},
		{1200, 0, time.Hour, Admission},   // not a quarter more
		{1250, 0, time.Second, Admission}, // not for long enough
		{1200, 0, 3 * time.Second, Admission},
		{1300, 0, 4 * time.Second, Admission},
		{1300, 0, time.Second, None},
		{499, 0, 0, Evict},
		{2000, 0, 5 * time.Second, Pause},
		{2000, 0, 5 * time.Second, Admission},
		{2000, 0, 5 * time.Second, None},
		{749, 0, 0, Pause},
		{700, 30, 0, Evict}, // it thrashes
		{749, 0, 0, Evict},
	} {
		n.free, n.stall = s.free, s.stall
		c.now = c.now.Add(s.after)
		next := p.Step(t.Context())
		if p.Level() != s.want {
			t.Errorf("%d free, %v later: level %q, want %q; %v", s.free, s.after, p.Level(), s.want, changes)
		}
		if want := map[bool]time.Duration{true: calmEvery, false: tightEvery}[s.want == None]; next != want {
			t.Errorf("the next look at level %q is in %v", s.want, next)
		}
	}
	if len(changes) != 8 || changes[0] != ">admission at 999" {
		t.Errorf("changes: %q", changes)
	}
}

func TestPausesWhoWasUsedLongestAgo(t *testing.T) {
	t.Parallel()
	n := node(700, box("ls", v1.QoSLatency, -5, time.Hour, 100))
	for i := range 12 {
		n.boxes[fmt.Sprintf("be%02d", i)] = box(fmt.Sprintf("be%02d", i), v1.QoSBest, 0, time.Duration(i)*time.Minute, 10)
	}
	p, c := newPolicy(n)
	n.broken["be11"] = true
	p.Step(t.Context())
	if got := n.took(); got != "pause be04, pause be05, pause be06, pause be07, pause be08, pause be09, pause be10" {
		t.Errorf("first %s", got)
	}
	p.Step(t.Context()) // 770 free: the level is held, but nothing need be done
	if got := n.took(); got != "" || p.Level() != Pause {
		t.Errorf("with enough for the level: %q at %q", got, p.Level())
	}
	n.free, n.broken["be11"] = 700, false
	p.Step(t.Context())
	if got := n.took(); got != "pause be00, pause be01, pause be02, pause be03" {
		t.Errorf("then %s", got)
	}
	n.free = 700
	p.Step(t.Context())
	c.now = c.now.Add(failTime + time.Second)
	p.Step(t.Context())
	if got := n.took(); got != "pause be11" {
		t.Errorf("what could not be paused before: %s", got)
	}
	n.free = 700
	p.Step(t.Context())
	if got := n.took(); got != "" {
		t.Errorf("nothing is left to pause, nor is it the level to evict, but: %s", got)
	}
}

func TestOrderOfEviction(t *testing.T) {
	t.Parallel()
	n := node(100,
		box("ls", v1.QoSLatency, 0, time.Hour, 1), box("ls-young", v1.QoSLatency, 0, time.Minute, 1), box("ls-low", v1.QoSLatency, -1, time.Hour, 1),
		box("be-high", v1.QoSBest, 1, time.Hour, 1), box("be", v1.QoSBest, 0, time.Hour, 1),
		box("be-stuck", v1.QoSBest, 9, time.Hour, 1),
		box("ls-paused", v1.QoSLatency, 5, time.Hour, 1), box("be-paused", v1.QoSBest, 9, time.Hour, 1),
	)
	n.boxes["ls-paused"].Paused, n.boxes["be-paused"].Paused = true, true
	n.broken["be"], n.stuck["be-stuck"] = true, true
	p, _ := newPolicy(n)
	var got []string
	for range 9 {
		p.Step(t.Context())
		if did := n.took(); did != "" {
			got = append(got, did)
		}
	}
	want := []string{"pause be-high", "evict be-high, evict be-paused, evict ls-paused", "evict be-stuck", "evict ls-low", "evict ls-young", "evict ls"}
	if !slices.Equal(got, want) {
		t.Errorf("rounds:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Whatever comes: sandboxes are not even looked at while memory is enough, nobody of class ls is touched above the
// level of evictions, none that runs is evicted while one is paused, and it ends.
func TestPolicyHolds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		n := node(int64(rapid.IntRange(0, 3000).Draw(rt, "free")))
		for i := range rapid.IntRange(0, 30).Draw(rt, "sandboxes") {
			b := box(fmt.Sprint("b", i), rapid.SampledFrom([]v1.QoS{v1.QoSBest, v1.QoSLatency}).Draw(rt, "qos"), rapid.IntRange(-2, 2).Draw(rt, "priority"),
				time.Duration(rapid.IntRange(0, 100).Draw(rt, "age"))*time.Second, int64(rapid.IntRange(0, 100).Draw(rt, "memory")))
			b.Paused = rapid.Bool().Draw(rt, "paused")
			n.boxes[b.ID], n.broken[b.ID] = b, rapid.IntRange(0, 5).Draw(rt, "broken") == 0
		}
		p, c := newPolicy(n)
		for range 60 {
			before, scanned := n.Read(), n.scanned
			paused := 0
			for id, b := range n.boxes {
				if b.Paused && !n.broken[id] {
					paused++
				}
			}
			ls := map[string]bool{}
			for id, b := range n.boxes {
				ls[id] = b.QoS == v1.QoSLatency
			}
			p.Step(t.Context())
			c.now = c.now.Add(tightEvery)
			did := n.took()
			if before.FreeBytes >= p.Limits.Pause && (did != "" || n.scanned != scanned) {
				rt.Fatalf("with %d free: %q, %d looks at the sandboxes", before.FreeBytes, did, n.scanned-scanned)
			}
			for _, one := range strings.Split(did, ", ") {
				what, id, _ := strings.Cut(one, " ")
				if ls[id] && (what == "pause" || before.FreeBytes >= p.Limits.Evict) {
					rt.Fatalf("%q to one of class ls with %d free", did, before.FreeBytes)
				}
			}
			if paused > 0 && strings.Count(did, "evict") > paused {
				rt.Fatalf("%q with %d paused", did, paused)
			}
		}
		if did := n.took(); n.free < p.Limits.Evict {
			for id := range n.boxes {
				if !n.broken[id] {
					rt.Fatalf("%d free and %s is still there; %s", n.free, id, did)
				}
			}
		}
	})
}

func TestStall(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "memory")
	if got := Stall(file); got != 0 {
		t.Errorf("without the file: %v", got)
	}
	if err := os.WriteFile(file, []byte("some avg10=30.00 avg60=2.00 avg300=0.00 total=10930947\nfull avg10=12.50 avg60=1.00 avg300=0.00 total=7383081\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := Stall(file); got != 12.5 {
		t.Errorf("%v", got)
	}
}
