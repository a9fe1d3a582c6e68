package apiserver

import (
	"context"
	"sync"
	"time"

	"dsec/internal/control/iam"
)

// sessionCheck bounds how long a revoked or expired token goes on in a request that was
// already open.
const sessionCheck = 500 * time.Millisecond

// sessions are requests that stay open: followers of events, Aether connections.
type sessions struct {
	mu   sync.Mutex
	open map[*session]struct{}
}

type session struct {
	principal *iam.Principal
	cancel    context.CancelCauseFunc
}

// add enters a session and returns what leaves it.
func (s *sessions) add(p *iam.Principal, cancel context.CancelCauseFunc) (leave func()) {
	e := &session{p, cancel}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		s.open = map[*session]struct{}{}
	}
	s.open[e] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.open, e)
	}
}

// checkSessions ends sessions whose token no longer holds.
func (s *Server) checkSessions(ctx context.Context) {
	t := time.NewTicker(sessionCheck)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		s.sessions.mu.Lock()
		for e := range s.sessions.open {
			if err := s.cfg.IAM.Check(e.principal); err != nil {
				e.cancel(err)
			}
		}
		s.sessions.mu.Unlock()
	}
}
