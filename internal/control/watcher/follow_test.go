package watcher

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/control/store/storetest"
)

// fakeEdges is a Source whose watches are fed by the test.
type fakeEdges struct {
	opened chan *fakeWatch
}

type fakeWatch struct {
	node   v1.Node
	from   uint64
	events chan v1.EdgeEvent
	fail   chan error
}

func (f *fakeEdges) Watch(ctx context.Context, node v1.Node, from uint64, each func(v1.EdgeEvent) error) error {
	w := &fakeWatch{node: node, from: from, events: make(chan v1.EdgeEvent), fail: make(chan error)}
	select {
	case f.opened <- w:
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		select {
		case ev := <-w.events:
			if err := each(ev); err != nil {
				return err
			}
		case err := <-w.fail:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (f *fakeEdges) Images(context.Context, v1.Node) ([]v1.Image, error) {
	return []v1.Image{{Digest: "sha256:img"}}, nil
}

func TestFollowingEdges(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	mem := storetest.NewMemory("seed")
	reg := NewRegistry(Config{Grace: 50 * time.Millisecond})
	edges := &fakeEdges{opened: make(chan *fakeWatch)}
	w := New(reg, mem, edges, slog.New(slog.DiscardHandler))
	runCtx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- w.Run(runCtx) }()
	defer func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run ended with %v", err)
		}
	}()

	if err := reg.WaitSynced(ctx); err != nil {
		t.Fatal(err)
	}
	node := v1.Node{ID: testNode, Epoch: 3, Address: "unix:/x", Ready: true}
	lease, err := mem.Register(ctx, node)
	if err != nil {
		t.Fatal(err)
	}
	first := <-edges.opened
	if first.from != 0 {
		t.Errorf("the first watch begins at %d", first.from)
	}
	if n, err := reg.Node(testNode); err != nil || n.Ready {
		t.Errorf("a node that has not answered yet is %+v, %v", n, err)
	}
	first.events <- v1.EdgeEvent{Seq: 7, Reset: true, Sandboxes: []v1.Sandbox{box(1, 1, v1.StateRunning, nil)}}
	if err := reg.WaitSynced(ctx); err != nil {
		t.Fatal(err)
	}
	if n, _ := reg.Node(testNode); !n.Ready {
		t.Error("the node is not ready")
	}
	if l := reg.Loads()[0]; l.Used.Slots != 1 || len(l.Images) != 1 {
		t.Errorf("load %+v", l)
	}

	first.fail <- errors.New("broken")
	second := <-edges.opened
	if second.from != 7 {
		t.Errorf("the second watch begins at %d, want 7", second.from)
	}
	if n, _ := reg.Node(testNode); !n.Ready {
		t.Error("a node that answers again is not ready before its next event")
	}
	second.events <- v1.EdgeEvent{Seq: 9, More: true} // breaks off: sequence 9 was not reached
	second.fail <- errors.New("broken")
	second = <-edges.opened
	if second.from != 7 {
		t.Errorf("after half an event the watch begins at %d, want 7", second.from)
	}
	second.events <- v1.EdgeEvent{Seq: 8, Sandboxes: []v1.Sandbox{box(2, 1, v1.StateRunning, nil)}}
	wantState(t, reg, 2, v1.StateRunning)

	// A short absence changes nothing; a longer one loses the sandboxes.
	if err := lease.Withdraw(ctx); err != nil {
		t.Fatal(err)
	}
	wantState(t, reg, 1, v1.StateLost)
	if len(reg.Nodes()) != 0 {
		t.Errorf("nodes %v", reg.Nodes())
	}
	if _, err := mem.Register(ctx, node); err != nil {
		t.Fatal(err)
	}
	third := <-edges.opened
	if third.from != 0 {
		t.Errorf("after a loss the watch begins at %d", third.from)
	}
	third.events <- v1.EdgeEvent{Seq: 9, Reset: true, Sandboxes: []v1.Sandbox{box(1, 1, v1.StateRunning, nil)}}
	wantState(t, reg, 1, v1.StateRunning)
	if _, ok := reg.Get(id(3, 2)); ok {
		t.Error("a sandbox that the edge no longer has is listed")
	}
}

func wantState(t *testing.T, reg *Registry, n uint64, want v1.State) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		rev := reg.Revision()
		if sb, ok := reg.Get(id(3, n)); ok && sb.State == want {
			return
		}
		if err := reg.Wait(ctx, rev); err != nil {
			t.Fatalf("sandbox %d never became %s", n, want)
		}
	}
}
