package edge

import (
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/backend"
)

// A round of looking for what memory limits killed begins oomEvery after the last, and
// pauses after each oomBatch sandboxes: however many there are, it takes about a hundredth
// of a core. A sandbox that ends is looked at once more.
const (
	oomEvery = time.Second
	oomBatch = 16
	oomPause = 10 * time.Millisecond
)

// lookForOOM notes OOM kills of running sandboxes until the edge stops.
func (e *Edge) lookForOOM() {
	wait := time.NewTimer(oomEvery)
	defer wait.Stop()
	pause := func(d time.Duration) bool {
		wait.Reset(d)
		select {
		case <-wait.C:
			return true
		case <-e.stop:
			return false
		}
	}
	for pause(oomEvery) {
		e.mu.Lock()
		all := make([]*sandbox, 0, len(e.sandboxes))
		for _, s := range e.sandboxes {
			all = append(all, s)
		}
		e.mu.Unlock()
		for i, s := range all {
			if i%oomBatch == oomBatch-1 && !pause(oomPause) {
				return
			}
			e.noteOOM(s)
		}
	}
}

// noteOOM tells those who watch if the sandbox's memory limit has killed more processes
// than was known.
func (e *Edge) noteOOM(s *sandbox) {
	s.mu.Lock()
	instance, known := s.instance, s.view.OOMKills
	s.mu.Unlock()
	counter, ok := instance.(backend.OOMCounter)
	if !ok {
		return
	}
	n, err := counter.OOMKills()
	if err != nil || n <= known { // an error: the sandbox has ended
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n <= s.view.OOMKills || s.view.State != v1.StateRunning {
		return
	}
	v := s.view
	v.OOMKills = n
	v.Generation++
	if err := e.journal.note(s.recordAs(v)); err != nil {
		e.cfg.Log.Error("journal an OOM kill", "sandbox", v.ID, "err", err)
	}
	e.show(s, v)
}
