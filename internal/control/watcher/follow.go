package watcher

import (
	"context"
	"log/slog"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/control/store"
)

// Source reads from an edge.
type Source interface {
	// Watch calls each for every event of the edge's watch after sequence from (0: begin
	// with a Reset) until ctx ends, the stream breaks or each fails. An edge must begin with
	// a Reset when it does not know from; to be sure, its sequence never repeats a number
	// after a restart.
	Watch(ctx context.Context, node v1.Node, from uint64, each func(v1.EdgeEvent) error) error
	// Images returns the images present on the edge.
	Images(ctx context.Context, node v1.Node) ([]v1.Image, error)
}

const (
	retryMin = 50 * time.Millisecond
	retryMax = 2 * time.Second

	imagesTimeout = 5 * time.Second
)

// Watcher feeds a Registry.
type Watcher struct {
	reg    *Registry
	nodes  store.Nodes
	source Source
	log    *slog.Logger

	mu      sync.Mutex
	follows map[string]*following
	wg      sync.WaitGroup
}

// following is one edge's watch.
type following struct {
	node   v1.Node
	cancel context.CancelFunc
	expiry *time.Timer // runs while the lease is gone
}

// New returns a Watcher that does nothing before Run.
func New(reg *Registry, nodes store.Nodes, source Source, log *slog.Logger) *Watcher {
	return &Watcher{reg: reg, nodes: nodes, source: source, log: log, follows: map[string]*following{}}
}

// Run follows the registered edges until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer w.wg.Wait()
	defer cancel()
	defer w.stopTimers()
	w.wg.Go(func() { w.sweep(ctx) })
	return w.nodes.FollowNodes(ctx, func(c store.Change[v1.Node]) error {
		w.apply(ctx, c)
		return nil
	})
}

func (w *Watcher) sweep(ctx context.Context) {
	t := time.NewTicker(max(w.reg.cfg.KeepLost/16, time.Second))
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			w.reg.sweep(w.reg.cfg.Now())
		}
	}
}

func (w *Watcher) apply(ctx context.Context, c store.Change[v1.Node]) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, node := range c.Put {
		w.up(ctx, node)
	}
	for _, id := range c.Delete {
		w.leaseGone(id)
	}
	if c.Reset {
		for id := range w.follows {
			if _, still := c.Put[id]; !still {
				w.leaseGone(id)
			}
		}
		w.reg.mu.Lock()
		w.reg.listed = true
		w.reg.poke()
		w.reg.mu.Unlock()
	}
}

func (w *Watcher) up(ctx context.Context, node v1.Node) {
	fresh := w.reg.nodeUp(node)
	f := w.follows[node.ID]
	if f != nil && f.expiry != nil {
		f.expiry.Stop()
		f.expiry = nil
	}
	if f != nil && !fresh {
		return
	}
	if f != nil {
		f.cancel()
	}
	fctx, cancel := context.WithCancel(ctx)
	w.follows[node.ID] = &following{node: node, cancel: cancel}
	w.log.Info("following edge", "node", node.ID, "epoch", node.Epoch, "address", node.Address)
	w.wg.Go(func() { w.follow(fctx, node) })
}

// leaseGone gives an edge time to come back before its sandboxes count as lost.
func (w *Watcher) leaseGone(id string) {
	f := w.follows[id]
	if f == nil || f.expiry != nil {
		return
	}
	f.expiry = time.AfterFunc(w.reg.cfg.Grace, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.follows[id] != f || f.expiry == nil {
			return
		}
		delete(w.follows, id)
		f.cancel()
		if w.reg.nodeLost(f.node) {
			w.log.Warn("edge is lost", "node", id, "epoch", f.node.Epoch)
		}
	})
}

func (w *Watcher) stopTimers() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.follows {
		if f.expiry != nil {
			f.expiry.Stop()
			f.expiry = nil
		}
		f.cancel()
	}
}

// follow keeps one edge's watch running.
func (w *Watcher) follow(ctx context.Context, node v1.Node) {
	var last uint64
	wait := retryMin
	for ctx.Err() == nil {
		alive := w.readImages(ctx, node)
		// A watch that goes on where the last one broke may be silent for long: that the edge
		// answered is then what shows that it is back.
		w.reg.streamOpened(node, alive && last > 0)
		err := w.source.Watch(ctx, node, last, func(ev v1.EdgeEvent) error {
			if ctx.Err() != nil {
				return ctx.Err() // a later epoch has taken over
			}
			w.reg.applyEdge(node, ev)
			wait = retryMin
			if !ev.More { // a part is not gone on from
				last = ev.Seq
			}
			return nil
		})
		w.reg.streamClosed(node)
		if ctx.Err() != nil {
			return
		}
		w.log.Warn("edge's watch broke", "node", node.ID, "err", err, "retry_in", wait)
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
		case <-t.C:
		}
		wait = min(2*wait, retryMax)
	}
}

func (w *Watcher) readImages(ctx context.Context, node v1.Node) bool {
	ctx, cancel := context.WithTimeout(ctx, imagesTimeout)
	defer cancel()
	images, err := w.source.Images(ctx, node)
	if err != nil {
		w.log.Warn("edge does not list its images", "node", node.ID, "err", err)
		return false
	}
	w.reg.setImages(node, images)
	return true
}
