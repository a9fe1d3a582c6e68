package edge

import (
	"context"
	"errors"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// limit starts what ends a sandbox's time, whether it still runs then or has failed: its
// time to live, its idle time, and its lease; the last two begin anew when this process does. Renewals are on
// no record: a node that was away cannot know who would have renewed.
func (e *Edge) limit(s *sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.view.State == v1.StateStopping || s.view.State == v1.StateStopped {
		return
	}
	now := e.cfg.Now()
	if expires := s.view.ExpiresAt; expires != nil {
		s.expiry = time.AfterFunc(max(0, expires.Sub(now)), func() { e.expire(s, v1.EndTTL) })
	}
	if lease := s.view.Spec.Lease.Duration(); lease > 0 {
		s.renewed = now
		s.lease = time.AfterFunc(lease, func() { e.checkLease(s, lease) })
	}
	s.lastUse.Store(now.UnixNano())
	if idle := s.view.Spec.IdleTTL.Duration(); idle > 0 {
		s.idle = time.AfterFunc(idle, func() { e.checkIdle(s, idle) })
	}
}

// checkLease ends the sandbox if nobody renewed its lease, or looks again when it would
// end. A renewal only notes its time: there may be thousands in a second.
func (e *Edge) checkLease(s *sandbox, lease time.Duration) {
	s.mu.Lock()
	left := s.renewed.Add(lease).Sub(e.cfg.Now())
	if left > 0 {
		s.lease.Reset(left)
	}
	s.mu.Unlock()
	if left <= 0 {
		e.expire(s, v1.EndLease)
	}
}

// renew notes that the sandbox's owner is there. Without a lease it changes nothing.
func (e *Edge) renew(id string) error {
	s := e.get(id)
	if s == nil {
		return e.absent(id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.view.State == v1.StateStopping || s.view.State == v1.StateStopped {
		return notRunning(s.view) // too late
	}
	s.renewed = e.cfg.Now()
	return nil
}

// unlimit stops the timers.
func (s *sandbox) unlimit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range []*time.Timer{s.expiry, s.lease, s.idle, s.ahead} {
		if t != nil {
			t.Stop()
		}
	}
}

func (e *Edge) expire(s *sandbox, why v1.EndReason) {
	if e.stopping.Load() { // the next process has its own timers
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeTime)
	defer cancel()
	id := s.snapshot().ID
	e.cfg.Log.Info("removing a sandbox", "sandbox", id, "why", why)
	if _, err := e.remove(ctx, id, why); err != nil && !errors.Is(err, errs.SandboxGone) {
		e.cfg.Log.Error("remove an expired sandbox", "sandbox", id, "err", err)
	}
}
