package watcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testNode = "nodeaa"

var t0 = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

// fixture is a registry with one connected node of epoch 3 and a settable clock.
type fixture struct {
	*Registry
	now  time.Time
	node v1.Node
}

func newFixture(cfg Config) *fixture {
	f := &fixture{now: t0, node: v1.Node{ID: testNode, Epoch: 3, Ready: true, Address: "unix:/x"}}
	cfg.Now = func() time.Time { return f.now }
	f.Registry = NewRegistry(cfg)
	f.nodeUp(f.node)
	f.streamOpened(f.node, false)
	f.applyEdge(f.node, v1.EdgeEvent{Seq: 1, Reset: true})
	return f
}

func id(epoch, n uint64) string { return v1.SandboxID(testNode, epoch, n) }

func box(n, generation uint64, state v1.State, labels map[string]string) v1.Sandbox {
	return v1.Sandbox{
		ID: id(3, n), Generation: generation, State: state, Node: testNode, CreatedAt: t0,
		Spec: v1.Spec{CPUMillis: 1000, MemoryBytes: 100, Labels: labels},
	}
}

func (f *fixture) tell(ev v1.EdgeEvent) { f.applyEdge(f.node, ev) }

func ids(l v1.SandboxList) string {
	var b strings.Builder
	for _, s := range l.Items {
		b.WriteString(s.ID[len(s.ID)-1:])
	}
	return b.String()
}

func TestIndexKeepsOrder(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var x index
		want := map[string]bool{}
		for _, n := range rapid.SliceOfN(rapid.IntRange(0, 3000), 0, 4000).Draw(t, "ops") {
			name := fmt.Sprintf("%05d", n)
			if want[name] {
				x.remove(name)
				delete(want, name)
			} else {
				x.insert(&entry{sb: &v1.Sandbox{ID: name}})
				want[name] = true
			}
		}
		after := fmt.Sprintf("%05d", rapid.IntRange(-1, 3000).Draw(t, "after"))
		var expect, got []string
		for name := range want {
			if name > after {
				expect = append(expect, name)
			}
		}
		slices.Sort(expect)
		x.ascend(after, func(e *entry) bool { got = append(got, e.sb.ID); return true })
		if !slices.Equal(got, expect) || x.n != len(want) {
			t.Fatalf("after %s: %d of %d entries, n=%d", after, len(got), len(expect), x.n)
		}
	})
}

func TestListByLabelStateAndPage(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	for n := range uint64(8) {
		state := v1.StateRunning
		if n == 5 {
			state = v1.StateFailed
		}
		f.Apply(box(n, 1, state, map[string]string{"job": "j", "half": fmt.Sprint(n % 2)}))
	}
	for _, c := range []struct {
		f    Filter
		want string
	}{
		{Filter{}, "abcdefgh"},
		{Filter{Limit: 3}, "abc"},
		{Filter{Limit: 3, After: id(3, 2)}, "def"},
		{Filter{After: id(3, 7)}, ""},
		{Filter{Labels: map[string]string{"half": "1"}}, "bdfh"},
		{Filter{Labels: map[string]string{"half": "1", "job": "j"}, After: id(3, 1), Limit: 2}, "df"},
		{Filter{Labels: map[string]string{"half": "1"}, State: v1.StateRunning}, "bdh"},
		{Filter{Labels: map[string]string{"half": "1", "job": "other"}}, ""},
	} {
		if got := ids(f.List(c.f)); got != c.want {
			t.Errorf("%+v gives %q, want %q", c.f, got, c.want)
		}
	}
	f.Remove(id(3, 3))
	if got := ids(f.List(Filter{Labels: map[string]string{"half": "1"}})); got != "bfh" {
		t.Errorf("after a removal: %q", got)
	}
	if l := f.List(Filter{Limit: 1}); l.Revision != f.Revision() {
		t.Errorf("the list's revision is %d, not %d", l.Revision, f.Revision())
	}
}

func TestOlderGenerationsChangeNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	f.tell(v1.EdgeEvent{Seq: 2, Sandboxes: []v1.Sandbox{box(1, 2, v1.StateRunning, nil)}})
	rev := f.Revision()
	f.Apply(box(1, 1, v1.StateCreating, nil))
	f.tell(v1.EdgeEvent{Seq: 3, Sandboxes: []v1.Sandbox{box(1, 2, v1.StateRunning, nil)}})
	if sb, _ := f.Get(id(3, 1)); sb.State != v1.StateRunning || f.Revision() != rev {
		t.Errorf("state %s, %d events too many", sb.State, f.Revision()-rev)
	}
}

func TestRemovedSandboxIsNotBroughtBackByALateEvent(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	f.Apply(box(1, 1, v1.StateRunning, nil))
	f.Remove(id(3, 1))
	f.tell(v1.EdgeEvent{Seq: 2, Sandboxes: []v1.Sandbox{box(1, 2, v1.StateStopping, nil)}})
	if _, ok := f.Get(id(3, 1)); ok {
		t.Error("it is back")
	}
}

func TestResetKeepsWhatWasAnsweredAfterItsWatchBegan(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	f.tell(v1.EdgeEvent{Seq: 2, Sandboxes: []v1.Sandbox{box(1, 1, v1.StateRunning, nil)}})
	f.Apply(box(2, 1, v1.StateRunning, nil)) // before the second watch
	f.streamOpened(f.node, false)
	f.Apply(box(3, 1, v1.StateRunning, nil)) // answered after it began
	f.tell(v1.EdgeEvent{Seq: 9, Reset: true})
	if got := ids(f.List(Filter{})); got != "d" {
		t.Errorf("left are %q, want only the youngest", got)
	}
}

func TestResetInParts(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	for n := range uint64(4) {
		f.tell(v1.EdgeEvent{Seq: 2 + n, Sandboxes: []v1.Sandbox{box(n, 1, v1.StateRunning, nil)}})
	}
	f.streamOpened(f.node, false)
	f.tell(v1.EdgeEvent{Seq: 9, Reset: true, More: true, Sandboxes: []v1.Sandbox{box(0, 1, v1.StateRunning, nil)}})
	if got := ids(f.List(Filter{})); got != "abcd" {
		t.Fatalf("after the first part: %q", got)
	}
	f.tell(v1.EdgeEvent{Seq: 9, Sandboxes: []v1.Sandbox{box(2, 1, v1.StateRunning, nil), box(3, 2, v1.StateFailed, nil)}})
	if got := ids(f.List(Filter{})); got != "acd" {
		t.Errorf("after the last part: %q", got)
	}

	// A watch that breaks off within a Reset leaves nothing half done.
	f.streamOpened(f.node, false)
	f.tell(v1.EdgeEvent{Seq: 12, Reset: true, More: true})
	f.streamClosed(f.node)
	f.streamOpened(f.node, false)
	f.tell(v1.EdgeEvent{Seq: 13, Sandboxes: []v1.Sandbox{box(5, 1, v1.StateRunning, nil)}})
	if got := ids(f.List(Filter{})); got != "acdf" {
		t.Errorf("after a broken Reset: %q", got)
	}
}

// A node is ready when it has told all, or whoever waits for it would see a part of its sandboxes.
func TestNodeIsReadyOnceItHasToldAll(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	f.streamClosed(f.node)
	ready := func(when string, want bool) {
		t.Helper()
		if n, err := f.Node(testNode); err != nil || n.Ready != want {
			t.Errorf("%s: ready %v, %v", when, n.Ready, err)
		}
	}
	f.streamOpened(f.node, false)
	ready("at first", false)
	f.tell(v1.EdgeEvent{Seq: 9, Reset: true, More: true, Node: &f.node, Sandboxes: []v1.Sandbox{box(0, 1, v1.StateRunning, nil)}})
	ready("after a part", false)
	f.tell(v1.EdgeEvent{Seq: 9, Sandboxes: []v1.Sandbox{box(1, 1, v1.StateRunning, nil)}})
	ready("after the last part", true)
	f.tell(v1.EdgeEvent{Seq: 20, Reset: true, More: true})
	ready("when it tells all again", true)
}

func TestLocate(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{RemovedKept: 2})
	f.Apply(box(1, 1, v1.StateRunning, nil))
	for n := uint64(2); n < 5; n++ {
		f.Apply(box(n, 1, v1.StateRunning, nil))
		f.Remove(id(3, n))
	}
	// A node may be on its way back when we have only started.
	if _, _, err := f.Locate(v1.SandboxID("zzzzzz", 1, 1)); !errors.Is(err, errs.EdgeUnreachable) {
		t.Errorf("of a node that has not registered yet: %v", err)
	}
	f.now = f.now.Add(f.cfg.Grace)
	for _, c := range []struct {
		id   string
		want error
	}{
		{id(3, 1), nil},
		{id(3, 99), nil}, // the edge decides
		{id(3, 4), errs.SandboxGone},
		{id(3, 2), nil}, // forgotten by now: the edge decides
		{id(2, 1), errs.SandboxLost},
		{id(4, 1), errs.SandboxNotFound},
		{v1.SandboxID("zzzzzz", 1, 1), errs.SandboxLost},
		{"nonsense", errs.SandboxNotFound},
		{"", errs.SandboxNotFound},
	} {
		node, _, err := f.Locate(c.id)
		if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%s gives %v, want %v", c.id, err, c.want)
		}
		if c.want == errs.SandboxLost && c.id[1:7] == "zzzzzz" && !strings.Contains(errs.Of(err).Hint(), "the server that made it") {
			t.Errorf("of a node nobody knows: %q", errs.Of(err).Hint())
		}
		if err == nil && node.ID != testNode {
			t.Errorf("%s is on %q", c.id, node.ID)
		}
	}
}

// A server that stops with its node does not take the sandboxes, which go on running, for lost.
func TestHeldNodeIsNotLost(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	f.tell(v1.EdgeEvent{Seq: 2, Sandboxes: []v1.Sandbox{box(1, 1, v1.StateRunning, nil)}})
	f.Hold()
	if f.nodeLost(f.node) {
		t.Error("the node is lost")
	}
	if _, sb, err := f.Locate(id(3, 1)); err != nil || sb.State != v1.StateRunning {
		t.Errorf("%+v, %v", sb, err)
	}
}

func TestLostNode(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	f.tell(v1.EdgeEvent{Seq: 2, Sandboxes: []v1.Sandbox{box(1, 1, v1.StateRunning, nil)}})
	rev := f.Revision()
	f.nodeLost(f.node)
	sb, _ := f.Get(id(3, 1))
	if sb.State != v1.StateLost || sb.Error == nil || sb.Error.Code != string(errs.SandboxLost) || sb.EndedAt == nil {
		t.Fatalf("the sandbox is %+v", sb)
	}
	evs, _, err := f.Events(rev, EventFilter{}, 10)
	if err != nil || len(evs) != 2 || evs[0].Sandbox.State != v1.StateLost || evs[1].Node.Ready {
		t.Fatalf("events %+v, %v", evs, err)
	}
	if _, _, err := f.Locate(id(3, 1)); !errors.Is(err, errs.SandboxLost) {
		t.Errorf("Locate gives %v", err)
	}

	t.Run("the same epoch comes back", func(t *testing.T) {
		f.nodeUp(f.node)
		f.streamOpened(f.node, false)
		f.tell(v1.EdgeEvent{Seq: 9, Reset: true, Sandboxes: []v1.Sandbox{box(1, 1, v1.StateRunning, nil)}})
		if sb, _ := f.Get(id(3, 1)); sb.State != v1.StateRunning || sb.Error != nil {
			t.Errorf("the sandbox is %+v", sb)
		}
		if used := f.Loads()[0].Used; used.Slots != 1 {
			t.Errorf("used %+v", used)
		}
	})
	t.Run("a later epoch comes", func(t *testing.T) {
		next := f.node
		next.Epoch = 4
		f.nodeUp(next)
		if sb, _ := f.Get(id(3, 1)); sb.State != v1.StateLost {
			t.Errorf("the sandbox is %s", sb.State)
		}
		f.now = f.now.Add(time.Hour)
		f.sweep(f.now)
		if _, ok := f.Get(id(3, 1)); ok {
			t.Error("a lost sandbox is listed for ever")
		}
		if _, _, err := f.Locate(id(3, 1)); !errors.Is(err, errs.SandboxLost) {
			t.Errorf("Locate gives %v", err)
		}
	})
}

func TestIdempotencyKeys(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	sb := box(1, 1, v1.StateRunning, nil)
	sb.IdempotencyKey = Key{"f", "root/k"}.String()
	f.tell(v1.EdgeEvent{Seq: 2, Sandboxes: []v1.Sandbox{sb}})
	if got, fp, ok := f.KeyHolder("root/k"); !ok || fp != "f" || got.ID != sb.ID || got.IdempotencyKey != "" {
		t.Fatalf("holder %+v, fingerprint %q", got, fp)
	}
	if _, _, ok := f.KeyHolder(""); ok {
		t.Error("the empty key has a holder")
	}
	f.now = t0.Add(5 * time.Minute)
	if _, _, ok := f.KeyHolder("root/k"); ok {
		t.Error("the key holds for ever")
	}
	f.now = t0
	f.Remove(sb.ID)
	if _, _, ok := f.KeyHolder("root/k"); ok {
		t.Error("the key outlives its sandbox")
	}
}

func TestRevisions(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{EventsKept: 4})
	first := f.Revision()
	for n := range uint64(6) {
		f.Apply(box(n, 1, v1.StateRunning, nil))
	}
	if _, _, err := f.Events(first, EventFilter{}, 10); !errors.Is(err, errs.RevisionCompacted) {
		t.Errorf("an old revision gives %v", err)
	}
	if _, _, err := f.Events(f.Revision()+1, EventFilter{}, 10); !errors.Is(err, errs.RevisionCompacted) {
		t.Errorf("a revision of the future gives %v", err)
	}
	if evs, next, err := f.Events(0, EventFilter{}, 10); err != nil || len(evs) != 4 || next != f.Revision() {
		t.Errorf("from the oldest: %d events up to %d, %v", len(evs), next, err)
	}
	f.now = f.now.Add(time.Millisecond)
	if restarted := newFixture(Config{}); restarted.Revision() == 0 {
		t.Error("no base")
	}
	later := NewRegistry(Config{Now: func() time.Time { return f.now }})
	if later.Revision() <= f.Revision() {
		t.Errorf("a restart goes back from %d to %d", f.Revision(), later.Revision())
	}
}

// A watcher that reads in pieces sees every event exactly once, whatever happens
// between.
func TestWatchMissesAndRepeatsNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := newFixture(Config{EventsKept: 64})
		from := f.Revision()
		start, gens, seen := from, map[uint64]uint64{}, from
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			n := rapid.Uint64Range(0, 9).Draw(t, "n")
			switch rapid.IntRange(0, 3).Draw(t, "op") {
			case 0, 1:
				gens[n]++
				f.Apply(box(n, gens[n], v1.StateRunning, nil))
			case 2:
				f.Remove(id(3, n))
			case 3:
				evs, next, err := f.Events(from, EventFilter{}, rapid.IntRange(1, 5).Draw(t, "max"))
				if err != nil {
					t.Fatal(err)
				}
				for _, e := range evs {
					if e.Revision != seen+1 {
						t.Fatalf("event %d after %d", e.Revision, seen)
					}
					seen = e.Revision
				}
				from = next
			}
		}
		evs, _, err := f.Events(from, EventFilter{}, 1000)
		if err != nil || seen+uint64(len(evs)) != f.Revision() {
			t.Fatalf("from %d: saw up to %d, %d more, now %d: %v", start, seen, len(evs), f.Revision(), err)
		}
	})
}

func TestUsedFollowsTheSandboxes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := newFixture(Config{})
		gens := map[uint64]uint64{}
		states := []v1.State{v1.StateCreating, v1.StateRunning, v1.StateStopping, v1.StateStopped, v1.StateFailed}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			n := rapid.Uint64Range(0, 5).Draw(t, "n")
			switch rapid.IntRange(0, 4).Draw(t, "op") {
			case 0, 1, 2:
				gens[n]++
				f.Apply(box(n, gens[n], rapid.SampledFrom(states).Draw(t, "state"), nil))
			case 3:
				f.tell(v1.EdgeEvent{Seq: 2, Removed: []string{id(3, n)}})
			case 4:
				f.nodeLost(f.node)
				f.nodeUp(f.node)
			}
		}
		var want v1.Resources
		for _, sb := range f.List(Filter{}).Items {
			if holdsResources(sb.State) {
				want.Slots++
				want.CPUMillis += 1000
				want.MemoryBytes += 100
			}
		}
		if got := f.Loads()[0].Used; got != want {
			t.Fatalf("used %+v, want %+v", got, want)
		}
		total := 0
		for _, n := range f.States() {
			total += n
		}
		if total != len(f.List(Filter{}).Items) {
			t.Fatalf("states count %d", total)
		}
	})
}

func TestEventLabels(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	rev := f.Revision()
	f.Apply(box(1, 1, v1.StateRunning, map[string]string{"job": "a"}))
	f.Apply(box(2, 1, v1.StateRunning, map[string]string{"job": "b"}))
	f.Remove(id(3, 1))
	evs, next, err := f.Events(rev, EventFilter{Labels: map[string]string{"job": "a"}}, 10)
	if err != nil || next != f.Revision() || len(evs) != 2 || evs[1].Type != v1.EventRemoved || evs[1].Sandbox.ID != id(3, 1) {
		t.Fatalf("%+v, next %d, %v", evs, next, err)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.Wait(ctx, f.Revision()); !errors.Is(err, errs.RequestCanceled) {
		t.Errorf("got %v", err)
	}
	if err := f.Wait(t.Context(), f.Revision()-1); err != nil {
		t.Error(err)
	}
}

func BenchmarkApplyOf100k(b *testing.B) {
	f := newFixture(Config{})
	for n := range uint64(100000) {
		f.Apply(box(n*7919, 1, v1.StateRunning, map[string]string{"job": fmt.Sprint(n % 100)}))
	}
	n := uint64(0)
	b.ReportAllocs()
	for b.Loop() {
		n++
		sb := box(n*7919+1, 1, v1.StateRunning, map[string]string{"job": "7"})
		f.Apply(sb)
		f.Remove(sb.ID)
	}
}

func BenchmarkListLabelOf100k(b *testing.B) {
	f := newFixture(Config{})
	for n := range uint64(100000) {
		f.Apply(box(n*7919, 1, v1.StateRunning, map[string]string{"job": fmt.Sprint(n % 1000)}))
	}
	b.ReportAllocs()
	for b.Loop() {
		if l := f.List(Filter{Labels: map[string]string{"job": "7"}, Limit: 1000}); len(l.Items) != 100 {
			b.Fatal(len(l.Items))
		}
	}
}

// An OOM kill is an event of its own, also when the answer to the removal tells of it first.
func TestOOMKillsAreEvents(t *testing.T) {
	t.Parallel()
	f := newFixture(Config{})
	from := f.Revision()
	sb := box(1, 1, v1.StateRunning, nil)
	f.tell(v1.EdgeEvent{Seq: 2, Sandboxes: []v1.Sandbox{sb}})
	sb.Generation, sb.OOMKills = 2, 1
	f.tell(v1.EdgeEvent{Seq: 3, Sandboxes: []v1.Sandbox{sb}})
	sb.Generation, sb.OOMKills, sb.State, sb.EndReason = 4, 2, v1.StateStopping, v1.EndRequest
	f.Apply(sb)
	f.Remove(sb.ID)
	f.tell(v1.EdgeEvent{Seq: 4, Sandboxes: []v1.Sandbox{sb}, Removed: []string{sb.ID}})
	events, _, err := f.Events(from, EventFilter{}, 100)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range events {
		got = append(got, fmt.Sprintf("%s %s %d", e.Type, e.Sandbox.State, e.Sandbox.OOMKills))
	}
	want := []string{"state running 0", "oom running 1", "oom stopping 2", "state stopping 2", "removed stopping 2"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if last := events[len(events)-1].Sandbox; last.EndReason != v1.EndRequest {
		t.Errorf("%+v", last)
	}
}
