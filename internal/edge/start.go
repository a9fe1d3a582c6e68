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
	"dsec/api/v1/errs"
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
		cfg: cfg, started: cfg.Now(), backends: map[v1.Backend]backend.Backend{}, stop: make(chan struct{}),
		sandboxes: map[string]*sandbox{}, keys: map[string]string{},
		admit: &admission{capacity: cfg.Capacity, largest: cfg.Largest, reserve: cfg.Reserve, free: cfg.FreeSpace, now: cfg.Now},
		feed:  newFeed(feedSize, uint64(cfg.Now().UnixMicro())), // above every number of an earlier process
	}
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
	e.wg.Go(e.lookForOOM)
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

// recover compares the journal with what the backends have, both ways: it adopts what
// runs, ends what was half-made or half-removed, and removes what has no record.
func (e *Edge) recover(ctx context.Context) error {
	j, records, err := openJournal(e.path("journal"))
	if errors.Is(err, errs.DataCorrupt) && e.anew {
		// None of its sandboxes is left anyway, and power that fails may tear more than a line.
		e.cfg.Log.Error("the journal of the time before the machine restarted is put aside as journal.damaged", "err", err)
		if err := os.Rename(e.path("journal"), e.path("journal.damaged")); err != nil {
			return err
		}
		j, records, err = openJournal(e.path("journal"))
	}
	if err != nil {
		return err
	}
	e.journal = j
	for _, rec := range records {
		e.recoverOne(ctx, rec)
	}
	for kind, b := range e.backends {
		ids, err := b.List(ctx)
		if err != nil {
			return fmt.Errorf("list sandboxes of %s: %w", kind, err)
		}
		for _, id := range ids {
			if e.sandboxes[id] != nil {
				continue
			}
			e.cfg.Log.Warn("removing a sandbox that no record explains", "sandbox", id, "backend", kind)
			if err := b.Delete(ctx, id); err != nil {
				e.cfg.Log.Error("remove it", "sandbox", id, "err", err)
			}
		}
	}
	return nil
}

func (e *Edge) recoverOne(ctx context.Context, rec record) {
	v := rec.Sandbox
	b := e.backends[v.Spec.Backend]
	_, epoch, err := v1.ParseSandboxID(v.ID)
	drop := func(why string) {
		e.cfg.Log.Info("dropping a sandbox's record", "sandbox", v.ID, "why", why)
		if err := e.journal.note(record{Sandbox: v1.Sandbox{ID: v.ID}, Removed: true}); err != nil {
			e.cfg.Log.Error("journal a removal", "sandbox", v.ID, "err", err)
		}
	}
	switch {
	case err != nil:
		drop("its id is not one")
		return
	case epoch != e.epoch:
		drop("the machine restarted") // whatever is left on disk is removed as unexplained
		return
	case v.State == v1.StateCreating:
		drop("its create never finished")
		return
	}
	s := &sandbox{backend: b, image: rec.Image, need: demand(&v.Spec), created: make(chan struct{}), removed: make(chan struct{}), view: v, cancel: func() {}}
	close(s.created)
	e.sandboxes[v.ID] = s
	if v.IdempotencyKey != "" {
		e.keys[v.IdempotencyKey] = v.ID
	}
	e.admit.force(s.need)
	if b == nil {
		e.cfg.Log.Error("a sandbox is out of reach: its backend is not usable now", "sandbox", v.ID, "backend", v.Spec.Backend)
		e.outOfReach(s, nil)
		return
	}
	if v.State == v1.StateStopping {
		e.retryLater(s)
		return
	}
	if v.State != v1.StateRunning {
		e.giveBack(s)
		e.limit(s)
		return
	}
	spec := backend.Spec{ID: v.ID, Generation: 1, Sandbox: v.Spec, Image: rec.Image}
	instance, err := b.Adopt(ctx, spec, rec.Handle)
	if err != nil && !errors.Is(err, errs.SandboxLost) {
		e.cfg.Log.Error("a sandbox is out of reach: it cannot be adopted now", "sandbox", v.ID, "err", err)
		e.outOfReach(s, err)
		e.limit(s)
		return
	}
	if err != nil {
		e.cfg.Log.Warn("a sandbox did not survive", "sandbox", v.ID, "err", err)
		cause := errs.New(errs.SandboxLost, "edge.adopt", "the sandbox ended while its edge was away").Because(err)
		cause.Node, cause.Sandbox = e.id, v.ID
		if terr := e.transition(s, v1.StateFailed, func(v *v1.Sandbox) {
			now := e.cfg.Now()
			v.EndedAt = &now
			v.Error = v1.ProblemOf(cause)
		}); terr != nil {
			e.cfg.Log.Error("record a lost sandbox", "sandbox", v.ID, "err", terr)
		}
		if derr := b.Delete(ctx, v.ID); derr != nil {
			e.cfg.Log.Error("clean up a lost sandbox", "sandbox", v.ID, "err", derr)
			return
		}
		e.giveBack(s)
		e.limit(s)
		return
	}
	s.instance = instance
	e.watch(s)
}

// outOfReach shows a sandbox that may well run, but cannot be used by this process. Its
// record stays as it is: a later start adopts it, or finishes its removal.
func (e *Edge) outOfReach(s *sandbox, cause error) {
	x := errs.New(errs.BackendUnusable, "edge.adopt", "the sandbox is out of reach: its backend did not work when the node started").Because(cause)
	x.Node, x.Sandbox = e.id, s.view.ID
	x.With("backend", string(s.view.Spec.Backend))
	s.view.Error = v1.ProblemOf(x)
	if s.view.State == v1.StateRunning {
		s.view.State = v1.StateFailed
	}
}
