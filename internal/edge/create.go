package edge

import (
	"context"
	"errors"
	"strconv"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// create runs one sandbox as the apiserver resolved it and returns once its guest
// answers. On error nothing of it is left, and the error carries its id.
func (e *Edge) create(ctx context.Context, req *v1.EdgeCreate) (_ v1.Sandbox, err error) {
	defer func() {
		if err != nil {
			x := *errs.Of(err)
			x.Node, x.Sandbox = e.id, req.ID
			err = &x
			e.createsFailed.Add(1)
		}
	}()
	req.Spec.SetDefaults()
	if err := req.Spec.Validate(); err != nil {
		return v1.Sandbox{}, err
	}
	node, epoch, err := v1.ParseSandboxID(req.ID)
	if err != nil || node != e.id || epoch != e.epoch {
		return v1.Sandbox{}, errs.New(errs.SandboxLost, "edge.create", "the id is not of this node and epoch").With("node", e.id)
	}
	b := e.backends[req.Spec.Backend]
	if b == nil {
		return v1.Sandbox{}, errs.New(errs.UnknownBackend, "edge.create", "this node has no usable backend "+string(req.Spec.Backend)).With("backend", string(req.Spec.Backend))
	}
	if req.Image != nil {
		if err := e.cfg.Images.Ready(req.Image); err != nil {
			return v1.Sandbox{}, err
		}
	}

	var s *sandbox
	for {
		var existing bool
		if s, existing, err = e.enter(ctx, req, b); err != nil {
			return v1.Sandbox{}, err
		}
		if !existing {
			break
		}
		v, err := s.await(ctx)
		if v.ID == req.ID || !errors.Is(err, errs.StateConflict) {
			return v, err
		}
		select { // its key is free when nothing of it is left
		case <-s.removed:
		case <-ctx.Done():
			return v1.Sandbox{}, errs.Wrap(errs.DeadlineExceeded, "edge.create", "wait for the end of a create with this key that failed", ctx.Err())
		}
	}
	defer e.creates.Done()
	defer close(s.created)
	defer s.cancel()
	return e.start(s)
}

// enter admits the sandbox and puts it into the table. A sandbox of the same
// idempotency key is returned instead, in whatever state it is.
func (e *Edge) enter(ctx context.Context, req *v1.EdgeCreate, b backend.Backend) (s *sandbox, existing bool, err error) {
	now := e.cfg.Now()
	s = newSandbox(b, req.Image, v1.Sandbox{
		ID: req.ID, Generation: 1, State: v1.StateCreating, Node: e.id, Spec: req.Spec, ForkOf: req.ForkOf, CreatedAt: now, IdempotencyKey: req.IdempotencyKey,
		Steps: map[string]float64{},
	})
	e.hear(s)
	s.secrets = req.SecretEnv
	// The create outlives no caller: who went away would never learn of the sandbox.
	var cctx context.Context
	cctx, s.cancel = context.WithCancel(ctx)
	if req.Image != nil {
		s.view.ImageDigest, s.view.Parts = req.Image.Digest, v1.WithoutLayers(req.Image.Parts)
	}
	if ttl := req.Spec.MaxTTL.Duration(); ttl > 0 {
		t := now.Add(ttl)
		s.view.ExpiresAt = &t
	}
	e.mu.Lock()
	if e.stopping.Load() {
		e.mu.Unlock()
		return nil, false, stopped()
	}
	if id, ok := e.keys[req.IdempotencyKey]; ok && req.IdempotencyKey != "" {
		if old := e.sandboxes[id]; old != nil {
			e.mu.Unlock()
			return old, true, nil
		}
	}
	if old := e.sandboxes[req.ID]; old != nil { // the same request again
		e.mu.Unlock()
		return old, true, nil
	}
	if e.reconciler.removing[req.ID] {
		e.mu.Unlock()
		return nil, false, errs.New(errs.StateConflict, "edge.create", "what an earlier sandbox of this id left is being removed")
	}
	if err := e.admit.take(&s.share); err != nil {
		e.mu.Unlock()
		return nil, false, err
	}
	e.sandboxes[req.ID] = s
	if req.IdempotencyKey != "" {
		e.keys[req.IdempotencyKey] = req.ID
	}
	s.create = cctx
	e.creates.Add(1)
	e.mu.Unlock()
	return s, false, nil
}

func stopped() error { return errs.New(errs.ShuttingDown, "edge.create", "the node is stopping") }

// start takes the sandbox from creating to running.
func (e *Edge) start(s *sandbox) (v1.Sandbox, error) {
	begin := time.Now()
	v := s.snapshot()
	steps := map[string]float64{}
	report := func(step string, took time.Duration) { steps[step] = float64(took.Microseconds()) / 1000 }

	// The intent is on record before anything exists, so that a crash leaks nothing.
	err := e.record(s, v)
	if err == nil {
		e.feed.changed(v)
		var instance backend.Instance
		instance, err = s.backend.Create(s.create, backend.Spec{ID: v.ID, Generation: v.Generation, Sandbox: v.Spec, Image: s.image, SecretEnv: s.secrets}, report)
		s.secrets = nil
		if err == nil {
			s.mu.Lock()
			s.instance = instance
			s.mu.Unlock()
			err = idlesHow(&v.Spec, instance)
		}
		if err == nil {
			handshake := time.Now()
			_, err = s.connect(s.create)
			report("connect", time.Since(handshake))
		}
	}
	if err == nil {
		err = e.transition(s, v1.StateRunning, func(v *v1.Sandbox) {
			now := e.cfg.Now()
			v.StartedAt = &now
			v.CreateMS = float64(time.Since(begin).Microseconds()) / 1000
			v.Steps = steps
		})
	}
	if err != nil {
		if v := s.snapshot(); v.State == v1.StateStopping { // what ended it says more than where that met it
			err = goneNow(v)
		} else if e.stopping.Load() && s.create.Err() != nil {
			err = stopped()
		}
		e.undoCreate(s)
		return v1.Sandbox{}, err
	}
	e.limit(s)
	e.watch(s)
	e.createsOK.Add(1)
	return s.snapshot(), nil
}

// undoCreate removes a sandbox whose create failed or was overtaken by its removal.
func (e *Edge) undoCreate(s *sandbox) {
	v := s.snapshot()
	s.stopPacks()
	s.release(nil)
	err := e.erase(context.Background(), s.backend, v.ID)
	if errors.Is(err, errs.ShuttingDown) { // its record says creating: the next start ends it
		return
	}
	if err != nil {
		e.cfg.Log.Error("undo create", "sandbox", v.ID, "err", err)
		// It holds its admission and is tried again until it works: nobody else may know of it.
		// A removal that overtook the create does that by itself.
		if e.transition(s, v1.StateStopping, func(v *v1.Sandbox) { v.Error = v1.ProblemOf(err) }) == nil {
			e.retryLater(s)
		}
		return
	}
	e.forget(s)
}

// await waits for another request's create of the same sandbox.
func (s *sandbox) await(ctx context.Context) (v1.Sandbox, error) {
	select {
	case <-s.created:
	case <-ctx.Done():
		return v1.Sandbox{}, errs.Wrap(errs.DeadlineExceeded, "edge.create", "wait for the same create", ctx.Err())
	}
	v := s.snapshot()
	if v.State == v1.StateCreating || v.State == v1.StateStopping && v.StartedAt == nil { // it failed and is gone, or will be
		return v, errs.New(errs.StateConflict, "edge.create", "the create with this key failed meanwhile")
	}
	return v, nil
}

// watch ends with the sandbox: it notices a guest that dies by itself.
func (e *Edge) watch(s *sandbox) {
	s.mu.Lock()
	instance := s.instance
	s.mu.Unlock()
	if instance == nil { // removed already
		return
	}
	e.wg.Go(func() {
		select {
		case <-instance.Done():
			e.died(s, instance)
		case <-s.removed:
		case <-e.stop:
		}
	})
}

// died records why a sandbox ended by itself and frees what it held; the record stays
// until someone removes it.
func (e *Edge) died(s *sandbox, instance backend.Instance) {
	if !live(s.snapshot().State) { // it is being removed, which is why it ended
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeTime)
	defer cancel()
	e.noteOOM(s, nil)
	cause := errs.New(errs.InternalError, "guest", "the sandbox's first process died")
	// Neither the guest's nor the node's fault, and not to be masked as such.
	switch u, err := instance.Usage(ctx); {
	case err != nil:
	case u.OOMKills > 0:
		cause = errs.New(errs.SandboxLimit, "guest", "the sandbox ran out of memory and its first process was killed").With("resource", "memory")
		if last := s.snapshot().LastOOM; last != nil {
			cause.With("command", last.Command).With("limit_bytes", strconv.FormatInt(last.LimitBytes, 10))
		}
	case u.ForksRefused > 0:
		cause = errs.New(errs.SandboxLimit, "guest", "the sandbox's programs used up its limit of processes, and its first process could not go on").With("resource", "pids")
	}
	cause.Node, cause.Sandbox, cause.Retryable = e.id, instance.ID(), false
	err := e.transition(s, v1.StateFailed, func(v *v1.Sandbox) {
		now := e.cfg.Now()
		v.EndedAt = &now
		v.Error = v1.ProblemOf(cause)
	})
	if err != nil { // being removed: that does the rest
		return
	}
	e.cfg.Log.Warn("sandbox died", "sandbox", instance.ID(), "cause", cause)
	s.stopPacks()
	s.release(cause)
	if err := e.erase(context.Background(), s.backend, instance.ID()); err != nil {
		e.cfg.Log.Error("clean up a dead sandbox", "sandbox", instance.ID(), "err", err)
		return
	}
	e.giveBack(s)
}
