package lazy

import (
	"context"
	"sync"
)

// gate bounds how many fetches run at once. Fetches that a reader waits for go
// before those made ahead, and some places are theirs alone.
type gate struct {
	mu       sync.Mutex
	free     int
	reserved int // places that only urgent tickets take
	urgent   []*ticket
	ahead    []*ticket
}

type ticket struct {
	ready  chan struct{}
	urgent bool
	queued bool
}

func newGate(n int) *gate { return &gate{free: n, reserved: n / 4} }

// enter waits for a place; leave gives it back.
func (g *gate) enter(ctx context.Context, t *ticket) error {
	g.mu.Lock()
	t.queued = true
	if t.urgent {
		g.urgent = append(g.urgent, t)
	} else {
		g.ahead = append(g.ahead, t)
	}
	g.next()
	g.mu.Unlock()
	select {
	case <-t.ready:
		return nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !t.queued { // it came at the same moment
		g.free++
		g.next()
	} else {
		g.remove(t)
	}
	return ctx.Err()
}

func (g *gate) leave() {
	g.mu.Lock()
	g.free++
	g.next()
	g.mu.Unlock()
}

// hurry makes t urgent: a reader has come to wait for it.
func (g *gate) hurry(t *ticket) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t.urgent {
		return
	}
	if t.queued {
		g.remove(t)
		g.urgent = append(g.urgent, t)
		t.queued = true
	}
	t.urgent = true
	g.next()
}

func (g *gate) remove(t *ticket) {
	list := &g.ahead
	if t.urgent {
		list = &g.urgent
	}
	for i, x := range *list {
		if x == t {
			*list = append((*list)[:i], (*list)[i+1:]...)
			break
		}
	}
	t.queued = false
}

func (g *gate) next() {
	for g.free > 0 {
		var t *ticket
		switch {
		case len(g.urgent) > 0:
			t, g.urgent = g.urgent[0], g.urgent[1:]
		case len(g.ahead) > 0 && g.free > g.reserved:
			t, g.ahead = g.ahead[0], g.ahead[1:]
		default:
			return
		}
		g.free--
		t.queued = false
		close(t.ready)
	}
}

// waiting counts fetches made ahead that wait.
func (g *gate) waiting() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.ahead)
}
