package pressure

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	v1 "dsec/api/v1"
)

// Candidate is a sandbox that may be paused or evicted.
type Candidate struct {
	ID       string
	QoS      v1.QoS
	Priority int
	Paused   bool
	Active   time.Time // when somebody used it last
	Uses     uint64    // how often somebody did
	Created  time.Time
}

// Node is what a policy acts on.
type Node interface {
	// Read says how much memory is free.
	Read() Reading
	// Candidates calls yield for each sandbox that runs or is paused, in any order. It is called when the node is
	// short of memory only.
	Candidates(yield func(Candidate))
	// Pause pauses a sandbox unless somebody has used it since.
	Pause(ctx context.Context, c Candidate) error
	// Evict removes a sandbox and returns when its memory is free.
	Evict(ctx context.Context, id string) error
}

const (
	// Between two readings, if the node has enough memory and if not.
	calmEvery  = time.Second
	tightEvery = 100 * time.Millisecond

	// A round acts on so many at once before memory is looked at again. Of those that run, one eviction may be
	// enough; those that are paused have little memory left.
	pauseRound       = 8
	evictPausedRound = 8
	evictRound       = 1

	// actTime bounds one pause or eviction, and failTime how long one that failed is left alone.
	actTime  = 15 * time.Second
	failTime = 30 * time.Second
)

// Policy keeps a node from running out of memory. Step is called by one goroutine.
type Policy struct {
	Limits Limits
	Node   Node
	Now    func() time.Time
	// Changed, if set, is told of each change of the level with what was read; Acted of each pause and eviction.
	Changed func(from, to Level, r Reading)
	Acted   func(what Level, c Candidate, err error)

	needed time.Time             // when the present level was needed last
	failed map[attempt]time.Time // until when it is not tried again

	mu    sync.Mutex
	level Level
}

type attempt struct {
	what Level
	id   string
}

// Level is the present one.
func (p *Policy) Level() Level {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.level
}

// Step reads the node's memory, does what is due, and says when to call it again.
func (p *Policy) Step(ctx context.Context) (next time.Duration) {
	switch p.read() {
	case None:
		return calmEvery
	case Pause:
		p.pause(ctx)
	case Evict:
		// What can still be paused is; who is evicted is gone.
		if p.pause(ctx) == 0 {
			p.evict(ctx)
		}
	}
	return tightEvery
}

// read takes a reading and sets the level: up at once, down step by step.
func (p *Policy) read() Level {
	r, now := p.Node.Read(), p.Now()
	from := p.Level()
	to := from
	if wanted := p.Limits.demand(r, 100); wanted > from {
		to, p.needed = wanted, now
	} else if p.Limits.demand(r, 125) >= from {
		p.needed = now
	} else if now.Sub(p.needed) >= hold {
		to, p.needed = from-1, now
	}
	if to != from {
		p.mu.Lock()
		p.level = to
		p.mu.Unlock()
		if p.Changed != nil {
			p.Changed(from, to, r)
		}
	}
	return to
}

// short tells whether the level is needed by what is free now, not only held.
func (p *Policy) short(level Level) bool { return p.Limits.demand(p.Node.Read(), 100) >= level }

// pause pauses the sandboxes of class be that nobody has used for longest, and says how many.
func (p *Policy) pause(ctx context.Context) int {
	if !p.short(Pause) {
		return 0
	}
	chosen := p.choose(Pause, pauseRound, func(c Candidate) bool { return c.QoS == v1.QoSBest && !c.Paused }, func(a, b Candidate) int {
		return cmp.Or(a.Active.Compare(b.Active), cmp.Compare(a.ID, b.ID))
	})
	return p.act(ctx, Pause, chosen, p.Node.Pause)
}

// evict removes those that are paused, and when there are none, of those that run the lowest: be before ls, lower
// priority before higher, younger before older.
func (p *Policy) evict(ctx context.Context) {
	if !p.short(Evict) {
		return
	}
	chosen := p.choose(Evict, evictPausedRound, func(Candidate) bool { return true }, lower)
	n := 0
	for n < len(chosen) && chosen[n].Paused {
		n++
	}
	chosen = chosen[:min(len(chosen), max(n, evictRound))]
	p.act(ctx, Evict, chosen, func(ctx context.Context, c Candidate) error { return p.Node.Evict(ctx, c.ID) })
}

func lower(a, b Candidate) int {
	rank := func(yes bool) int {
		if yes {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(rank(a.Paused), rank(b.Paused)),
		cmp.Compare(rank(a.QoS == v1.QoSBest), rank(b.QoS == v1.QoSBest)),
		cmp.Compare(a.Priority, b.Priority),
		b.Created.Compare(a.Created),
		cmp.Compare(a.ID, b.ID),
	)
}

// choose returns the first n candidates in an order, without those with which it failed a moment ago.
func (p *Policy) choose(what Level, n int, of func(Candidate) bool, order func(a, b Candidate) int) []Candidate {
	now := p.Now()
	for a, until := range p.failed {
		if now.After(until) {
			delete(p.failed, a)
		}
	}
	var first []Candidate // in order, at most n
	p.Node.Candidates(func(c Candidate) {
		if _, failed := p.failed[attempt{what, c.ID}]; failed || !of(c) {
			return
		}
		at, _ := slices.BinarySearchFunc(first, c, order)
		if at >= n {
			return
		}
		first = slices.Insert(first, at, c)
		first = first[:min(len(first), n)]
	})
	return first
}

// act does one thing to all of them at once and says how many times it worked.
func (p *Policy) act(ctx context.Context, what Level, all []Candidate, do func(context.Context, Candidate) error) (worked int) {
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, c := range all {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, actTime)
			defer cancel()
			errs[i] = do(ctx, c)
		})
	}
	wg.Wait()
	for i, c := range all {
		if errs[i] == nil {
			worked++
		} else {
			if p.failed == nil {
				p.failed = map[attempt]time.Time{}
			}
			p.failed[attempt{what, c.ID}] = p.Now().Add(failTime)
		}
		if p.Acted != nil {
			p.Acted(what, c, errs[i])
		}
	}
	return worked
}
