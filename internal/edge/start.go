package edge

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"

	v1 "dsec/api/v1"
	"dsec/internal/backend"
	"dsec/internal/capability"
)

// feedSize is how many changes a watcher may be behind before it must read all again.
const feedSize = 8192

// Start brings up an edge: it takes its identity, adopts the sandboxes that survived,
// removes what no record explains, and then serves and registers.
func Start(ctx context.Context, cfg Config) (_ *Edge, err error) {
	if cfg.BootID == "" {
		if cfg.BootID, err = readBootID(); err != nil {
			return nil, err
		}
	}
	e := &Edge{
		cfg: cfg, started: cfg.Now(), backends: map[v1.Backend]backend.Backend{}, stop: make(chan struct{}), removing: make(chan struct{}, removals), merging: make(chan struct{}, 1), pausing: make(chan struct{}, pauseParallel),
		sandboxes: map[string]*sandbox{}, keys: map[string]string{}, temps: map[string]int{},
		admit: &admission{capacity: cfg.Capacity, largest: cfg.Largest, reserve: cfg.Reserve, free: cfg.FreeSpace, other: cfg.Shortage, now: cfg.Now},
		costs: newCosts(cfg.Costs),
		feed:  newFeed(feedSize, uint64(cfg.Now().UnixMicro())), // above every number of an earlier process
	}
	e.pressure = e.newPressure()
	e.admit.level = e.pressure.Level
	e.reconciler = newReconciler(e)
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	for _, b := range cfg.Backends {
		if err := b.Check(ctx); err != nil {
			cfg.Log.Warn("backend is not usable here", "backend", b.Kind(), "err", err)
			continue
		}
		e.backends[b.Kind()] = b
		e.usable = append(e.usable, b.Kind())
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close(context.WithoutCancel(ctx)))
		}
	}()
	if err := e.identify(ctx); err != nil {
		return nil, fmt.Errorf("identity of the edge: %w", err)
	}
	if err := e.recover(ctx); err != nil {
		return nil, fmt.Errorf("recover sandboxes: %w", err)
	}
	key, err := cfg.Cluster.SigningKey(ctx)
	if err != nil {
		return nil, fmt.Errorf("signing key: %w", err)
	}
	if e.signer, err = capability.NewSigner(key, cfg.Now); err != nil {
		return nil, err
	}
	if e.listener, err = listen(cfg.Listen); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", cfg.Listen, err)
	}
	network, _, _ := strings.Cut(cfg.Listen, ":")
	e.address = network + ":" + e.listener.Addr().String()
	e.server = e.newServer()
	e.wg.Go(func() {
		if err := e.server.Serve(context.WithoutCancel(ctx), e.listener); err != nil {
			cfg.Log.Error("serve", "err", err)
		}
	})
	if cfg.Memory != nil && cfg.Reserve.MemoryBytes > 0 {
		e.wg.Go(e.watchPressure)
	}
	e.wg.Go(e.meterAll)
	every := cfg.ReconcileEvery
	if every <= 0 {
		every = reconcileEvery
	}
	e.wg.Go(func() { e.reconciler.run(every) })
	for _, b := range e.backends {
		if w, ok := b.(backend.OOMWatcher); ok {
			e.wg.Go(func() { e.watchOOM(w) })
		}
	}
	if e.reg, err = cfg.Cluster.Register(ctx, e.Node()); err != nil {
		return nil, fmt.Errorf("register: %w", err)
	}
	e.wg.Go(func() {
		select {
		case <-e.reg.Superseded():
			cfg.Log.Error("another process registered this node; stopping", "node", e.id)
			go e.Close(context.Background()) // Close waits for this goroutine
		case <-e.stop:
		}
	})
	return e, nil
}

// listen opens the address. A socket file that a dead edge left is replaced.
func listen(address string) (net.Listener, error) {
	network, where, _ := strings.Cut(address, ":")
	if network == "unix" {
		if err := os.Remove(where); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	l, err := net.Listen(network, where)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		if err := os.Chmod(where, 0o600); err != nil {
			l.Close()
			return nil, err
		}
	}
	return l, nil
}
