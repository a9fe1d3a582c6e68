package edge

import (
	"context"
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/backend"
)

// A look at all sandboxes, for those in which memory limits killed, pauses after each oomBatch of them:
// however many there are, it takes about a hundredth of a core. There is one only if a backend knows that
// something was killed and not where.
const (
	oomBatch = 16
	oomPause = 10 * time.Millisecond
)

// watchOOM notes what is killed for want of memory until the edge stops.
func (e *Edge) watchOOM(w backend.OOMWatcher) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	look := make(chan struct{}, 1)
	e.wg.Go(func() {
		defer cancel()
		for {
			select {
			case <-look:
				e.lookForOOM()
			case <-e.stop:
				return
			}
		}
	})
	err := w.WatchOOM(ctx, func(k backend.OOMKill) {
		if s := e.get(k.Sandbox); s != nil {
			e.noteOOM(s, &k)
		} else if k.Sandbox == "" {
			select {
			case look <- struct{}{}:
			default: // one is due
			}
		}
	})
	if err != nil {
		e.cfg.Log.Error("what memory limits kill is noticed when the sandbox ends, not before", "err", err)
	}
}

func (e *Edge) lookForOOM() {
	e.mu.Lock()
	all := make([]*sandbox, 0, len(e.sandboxes))
	for _, s := range e.sandboxes {
		all = append(all, s)
	}
	e.mu.Unlock()
	for i, s := range all {
		if i%oomBatch == oomBatch-1 {
			select {
			case <-time.After(oomPause):
			case <-e.stop:
				return
			}
		}
		e.noteOOM(s, nil)
	}
}

// noteOOM tells those who watch if more of the sandbox's processes were killed than was known. kill,
// if it is known, may be of a process of another node's.
func (e *Edge) noteOOM(s *sandbox, kill *backend.OOMKill) {
	s.mu.Lock()
	instance := s.instance
	s.mu.Unlock()
	counter, ok := instance.(backend.OOMCounter)
	if !ok {
		return
	}
	n, err := counter.OOMKills()
	if err != nil { // the sandbox has ended
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.view.State {
	case v1.StateRunning, v1.StatePausing, v1.StatePaused, v1.StateResuming:
	default:
		return
	}
	v := s.view
	switch {
	case kill == nil && n > v.OOMKills:
		s.oomTold, v.OOMKills = n, n
	case kill != nil && n > s.oomTold: // one event for each
		s.oomTold++
		v.OOMKills = max(v.OOMKills, s.oomTold)
		v.LastOOM = &v1.OOMKill{Time: e.cfg.Now(), Command: kill.Command, PID: kill.PID, MemoryBytes: kill.MemoryBytes}
		if !kill.Node {
			v.LastOOM.LimitBytes = v.Spec.MemoryBytes
		}
	default:
		return
	}
	v.Generation++
	if err := e.journal.note(s.recordAs(v)); err != nil {
		e.cfg.Log.Error("journal an OOM kill", "sandbox", v.ID, "err", err)
	}
	e.show(s, v)
}
