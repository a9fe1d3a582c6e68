package registry

import "sync"

const tellEvery = 256 << 10

// teller passes progress on, one call at a time and thinned out.
type teller struct {
	to   func(Progress)
	mu   sync.Mutex
	now  map[string]*Progress
	told map[string]int64
}

// begin tells of a phase.
func (t *teller) begin(phase string, total int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.now == nil {
		t.now, t.told = map[string]*Progress{}, map[string]int64{}
	}
	t.now[phase] = &Progress{Phase: phase, Total: total}
	if t.to != nil {
		t.to(*t.now[phase])
	}
}

// add counts bytes of a phase that has begun.
func (t *teller) add(phase string, n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.now[phase]
	p.Done += n
	if t.to != nil && (p.Done-t.told[phase] >= tellEvery || p.Done == p.Total) {
		t.told[phase] = p.Done
		t.to(*p)
	}
}

// done returns the bytes of a phase so far.
func (t *teller) done(phase string) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.now[phase]; p != nil {
		return p.Done
	}
	return 0
}
