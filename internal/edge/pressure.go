package edge

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/edge/pressure"
)

// squeezed is the edge as its policy of memory pressure sees it.
type squeezed struct {
	*Edge
	last pressure.Reading
}

// Read implements pressure.Node. What cannot be read is as it was.
func (e *squeezed) Read() pressure.Reading {
	r, err := e.cfg.Memory()
	if err != nil {
		e.cfg.Log.Error("look at the node's memory", "err", err)
		return e.last
	}
	e.last = r
	return r
}

// Candidates implements pressure.Node.
func (e *squeezed) Candidates(yield func(pressure.Candidate)) {
	e.mu.Lock()
	all := make([]*sandbox, 0, len(e.sandboxes))
	for _, s := range e.sandboxes {
		all = append(all, s)
	}
	e.mu.Unlock()
	now := e.cfg.Now()
	for _, s := range all {
		v := s.snapshot()
		if v.State != v1.StateRunning && v.State != v1.StatePaused || s.backend == nil {
			continue
		}
		c := pressure.Candidate{ID: v.ID, QoS: v.Spec.QoS, Priority: v.Spec.Priority, Paused: v.State == v1.StatePaused, Created: v.CreatedAt}
		u := s.seen()
		if c.Active, c.Uses = u.last, u.began; u.open > 0 {
			c.Active = now
		}
		yield(c)
	}
}

// Pause implements pressure.Node.
func (e *squeezed) Pause(ctx context.Context, c pressure.Candidate) error {
	_, err := e.pause(ctx, c.ID, v1.PausePressure, &use{began: c.Uses})
	return err
}

// Evict implements pressure.Node.
func (e *squeezed) Evict(ctx context.Context, id string) error {
	_, err := e.remove(ctx, id, v1.EndEvicted)
	if errors.Is(err, errs.SandboxGone) || errors.Is(err, errs.SandboxNotFound) {
		return nil
	}
	return err
}

// newPressure returns the policy for a node that keeps so much memory free.
func (e *Edge) newPressure() *pressure.Policy {
	mib := func(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }
	return &pressure.Policy{
		Limits: pressure.LimitsFor(e.cfg.Reserve.MemoryBytes), Node: &squeezed{Edge: e, last: pressure.Reading{FreeBytes: 1 << 50}}, Now: e.cfg.Now,
		Changed: func(from, to pressure.Level, r pressure.Reading) {
			e.cfg.Log.Warn("the node's memory", "free", mib(r.FreeBytes), "stalled_percent", r.Stall, "level", to, "level_before", from)
		},
		Acted: func(what pressure.Level, c pressure.Candidate, err error) {
			e.cfg.Log.Warn("for want of memory", "do", what, "sandbox", c.ID, "qos", c.QoS, "priority", c.Priority, "paused", c.Paused, "err", err)
		},
	}
}

// watchPressure keeps the node from running out of memory until the edge stops.
func (e *Edge) watchPressure() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	e.wg.Go(func() {
		select {
		case <-e.stop:
			cancel()
		case <-ctx.Done():
		}
	})
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			timer.Reset(e.pressure.Step(ctx))
		case <-e.stop:
			return
		}
	}
}
