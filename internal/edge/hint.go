package edge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// Costs are what a pause and a resume cost, by which hints are judged: the sandbox is paused if that costs less than
// holding its memory until the next call. The times are where an edge begins; it measures its own.
type Costs struct {
	CPUPrice     float64       // of a CPU second, in GiB·s of memory; 0: 3.11 (the chapter on resource planning: $14 and $4.5 a million)
	Pause        time.Duration // of a sandbox without memory; 0: 10 ms
	PausePerGiB  time.Duration // 0: 4 s
	Resume       time.Duration // 0: 50 ms
	ResumePerGiB time.Duration // 0: 1 s
	Memory       int64         // of the machine, of which what is free says what memory is worth; 0: that never changes
}

const (
	// costShare of each new measurement is in the running average.
	costShare = 1.0 / 8
	// smallGiB is the memory from which a measurement is one of moving it, not of the rest.
	smallGiB = 1.0 / 32
	// At evenShare of the machine's memory free, a GiB is worth its price; less is worth more, within bounds.
	evenShare          = 0.25
	minWorth, maxWorth = 0.25, 4
	// aheadTime is what a sandbox is resumed early, beside what resuming it takes.
	aheadTime = 100 * time.Millisecond
)

// costs are Costs that learn.
type costs struct {
	mu sync.Mutex
	Costs
}

func newCosts(c Costs) *costs {
	set := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	if c.CPUPrice == 0 {
		c.CPUPrice = 14 / 4.5
	}
	set(&c.Pause, 10*time.Millisecond)
	set(&c.PausePerGiB, 4*time.Second)
	set(&c.Resume, 50*time.Millisecond)
	set(&c.ResumePerGiB, time.Second)
	return &costs{Costs: c}
}

func gib(bytes int64) float64 { return float64(bytes) / (1 << 30) }

// paused and resumed note what moving so much memory took.
func (c *costs) paused(bytes int64, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	learn(&c.Pause, &c.PausePerGiB, gib(bytes), took)
}

func (c *costs) resumed(bytes int64, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	learn(&c.Resume, &c.ResumePerGiB, gib(bytes), took)
}

func learn(base, perGiB *time.Duration, size float64, took time.Duration) {
	if size < smallGiB {
		*base += time.Duration(costShare * float64(took-*base))
		return
	}
	rate := time.Duration(float64(max(0, took-*base)) / size)
	*perGiB += time.Duration(costShare * float64(rate-*perGiB))
}

// verdict is what a pause until the next call would cost and save.
type verdict struct {
	pays          bool
	hold, move    float64       // GiB·s
	pause, resume time.Duration // that it would take
	why           string
}

// judge compares what it costs to hold memory until the next call with what it costs to move it out and in
// again: p_M·M·G > C, where G is that time less what moving takes, in which the memory is held too.
// As CPU time of the moves counts what they take, which is at least that.
func (c *costs) judge(bytes int64, next time.Duration, free int64) verdict {
	c.mu.Lock()
	k := c.Costs
	c.mu.Unlock()
	m := gib(bytes)
	worth, share := 1.0, ""
	if k.Memory > 0 {
		f := float64(free) / float64(k.Memory)
		worth = min(max(evenShare/max(f, 1e-6), minWorth), maxWorth)
		share = fmt.Sprintf(", each GiB counting %.2f since %.0f %% of the node's memory is free,", worth, 100*f)
	}
	v := verdict{
		pause:  k.Pause + time.Duration(m*float64(k.PausePerGiB)),
		resume: k.Resume + time.Duration(m*float64(k.ResumePerGiB)),
	}
	moving := (v.pause + v.resume).Seconds()
	v.hold = worth * m * next.Seconds()
	v.move = moving*k.CPUPrice + worth*m*moving
	v.pays = v.hold > v.move
	v.why = fmt.Sprintf("holding %d MiB for %.1f s%s costs %.2f GiB·s; to pause and resume takes %.2f s and %.2f s here and costs %.2f",
		bytes>>20, next.Seconds(), share, v.hold, v.pause.Seconds(), v.resume.Seconds(), v.move)
	if m > 0 {
		seconds := v.move / (worth * m)
		v.why += fmt.Sprintf(", which pays from %.1f s on", seconds)
	}
	return v
}

// hint does what is best for a sandbox that will be used in so long.
func (e *Edge) hint(ctx context.Context, req *v1.EdgeHint) (r v1.HintResult, err error) {
	r = v1.HintResult{ID: req.ID, Action: "keep"}
	if req.NextCall < 0 || req.NextCall > v1.MaxTime {
		return r, errs.New(errs.BadRequest, "edge.hint", fmt.Sprintf("next_call_s: %v is not between 0 and %d", float64(req.NextCall), int64(v1.MaxTime))).With("field", "next_call_s")
	}
	s := e.get(req.ID)
	if s == nil {
		return r, e.absent(req.ID)
	}
	if err := s.adopted(ctx); err != nil {
		return r, err
	}
	next := req.NextCall.Duration()
	due := time.Now().Add(next)
	s.forgetHint()
	var seen use
	var v v1.Sandbox
	var instance backend.Instance
	for {
		seen = s.seen()
		s.mu.Lock()
		m := s.move
		v, instance = s.view, s.instance
		s.mu.Unlock()
		if m == nil || !m.resume {
			break
		}
		if err := m.wait(ctx); err != nil {
			return r, err
		}
	}
	defer func() {
		if err == nil {
			v := s.snapshot()
			r.Sandbox = &v
		}
	}()
	if v.State != v1.StateRunning && s.standing() {
		r.Action, r.Why = "pause", "it is "+string(v.State)+" already"
		e.wakeAhead(s, due, e.costs.judge(0, next, 0).resume)
		return r, nil
	}
	if v.State != v1.StateRunning || instance == nil {
		return r, notRunning(v)
	}
	u, err := counters(ctx, instance)
	if err != nil {
		return r, s.name(err)
	}
	_, free := e.admit.freeSpace()
	j := e.costs.judge(u.MemoryBytes, next, free)
	r.MemoryBytes, r.HoldCost, r.MoveCost, r.Why = u.MemoryBytes, j.hold, j.move, j.why
	switch {
	case !j.pays:
		return r, nil
	case seen.open > 0:
		r.Why = fmt.Sprintf("it is in use: %d operations or streams are open; else %s", seen.open, j.why)
		return r, nil
	case e.works(s):
		r.Why = "a command runs in it; else " + j.why
		return r, nil
	}
	_, err = e.pause(ctx, req.ID, v1.PauseHint, &seen)
	for _, code := range []error{errs.StateConflict, errs.NotSupported, errs.SwapFull} {
		if errors.Is(err, code) { // it is no request to pause, and nothing is wrong with the sandbox
			r.Why = "it cannot be paused now (" + errs.Of(err).Message + "); else " + j.why
			return r, nil
		}
	}
	if err != nil {
		return r, err
	}
	r.Action = "pause"
	e.wakeAhead(s, due, j.resume)
	return r, nil
}

// wakeAhead resumes a sandbox that a hint paused shortly before it is used, so that the call does not wait, unless
// something else happens to it first.
func (e *Edge) wakeAhead(s *sandbox, due time.Time, resume time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.view.State != v1.StatePaused || s.view.PauseReason != v1.PauseHint {
		return
	}
	generation := s.view.Generation
	s.ahead = time.AfterFunc(max(0, time.Until(due)-resume-aheadTime), func() { e.resumeAhead(s, generation) })
}

func (e *Edge) resumeAhead(s *sandbox, generation uint64) {
	if v := s.snapshot(); v.Generation != generation || e.stopping.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(s.life, resumeTime)
	defer cancel()
	if err := e.wake(ctx, s); err != nil && s.life.Err() == nil { // the call will say so
		e.cfg.Log.Info("resume a sandbox ahead of its next call", "sandbox", s.snapshot().ID, "err", err)
	}
}

// forgetHint ends what the last hint would do later.
func (s *sandbox) forgetHint() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ahead != nil {
		s.ahead.Stop()
		s.ahead = nil
	}
}

func (e *Edge) serveHint(ctx context.Context, _ *aether.Stream, d *msg.Document) (*msg.Document, error) {
	var req v1.EdgeHint
	if err := json.Unmarshal(d.Json, &req); err != nil {
		return nil, errs.Wrap(errs.BadRequest, "edge.hint", "decode the request", err)
	}
	r, err := e.hint(ctx, &req)
	if err != nil {
		return nil, err
	}
	return document(r)
}
