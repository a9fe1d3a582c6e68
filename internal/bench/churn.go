package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dsec/client"
)

// ServerSample is what the server's process held when so many cycles had ended.
type ServerSample struct {
	Cycles     int     `json:"cycles"`
	Seconds    float64 `json:"seconds"` // since the first began
	Resident   float64 `json:"resident_bytes"`
	Heap       float64 `json:"heap_bytes"` // in use, garbage included
	Goroutines float64 `json:"goroutines"`
	Threads    float64 `json:"threads"`
	Files      float64 `json:"open_files"`
}

// serverMetrics are where a sample is from.
var serverMetrics = []struct {
	name string
	to   func(*ServerSample) *float64
}{
	{"process_resident_memory_bytes", func(s *ServerSample) *float64 { return &s.Resident }},
	{"go_memstats_heap_inuse_bytes", func(s *ServerSample) *float64 { return &s.Heap }},
	{"go_goroutines", func(s *ServerSample) *float64 { return &s.Goroutines }},
	{"go_threads", func(s *ServerSample) *float64 { return &s.Threads }},
	{"process_open_fds", func(s *ServerSample) *float64 { return &s.Files }},
}

// ChurnOptions says what Churn looks at besides the cycles.
type ChurnOptions struct {
	Samples int           // of the server, on the way
	Settle  time.Duration // for which the audit afterwards may differ from the one before
	// Audit counts what the machine holds for sandboxes, by kind, what the node keeps for itself included. nil: nobody does.
	Audit    func() (map[string]int, error)
	Progress func(stage string, done, total int64)
}

// auditAgain is how often the audit is made until it is as before.
const auditAgain = 500 * time.Millisecond

// Churn makes l.N sandboxes, runs a command in each and removes it, and says what of all that is left: in the
// audit, and in the server's process, of which it takes samples.
func Churn(ctx context.Context, d DSec, l Load, o ChurnOptions) (Result, error) {
	if err := l.validate(); err != nil {
		return Result{}, err
	}
	if l.N < 1 || o.Samples < 2 {
		return Result{}, errors.New("churn needs a number of cycles and two samples at least")
	}
	o.Progress = orSilent(o.Progress)
	// What all share is there before the first sample.
	if _, err := cycle(ctx, d); err != nil {
		return Result{}, err
	}
	var before map[string]int
	var err error
	if o.Audit != nil {
		if before, err = o.Audit(); err != nil {
			return Result{}, fmt.Errorf("audit before: %w", err)
		}
	}
	s := &sampler{c: d.Client, start: time.Now(), every: max(1, l.N/(o.Samples-1))}
	if err := s.take(ctx, 0); err != nil {
		return Result{}, err
	}
	var ended atomic.Int64
	r, err := run(ctx, "churn", d.Name(), l, func(ctx context.Context, _, _ int) (time.Duration, error) {
		took, err := cycle(ctx, d)
		n := int(ended.Add(1))
		if n%s.every == 0 && n < l.N {
			serr := s.take(ctx, n)
			if err == nil {
				err = serr
			}
		}
		o.Progress("cycles", int64(n), int64(l.N))
		return took, err
	})
	if err != nil {
		return r, err
	}
	if err := s.take(ctx, l.N); err != nil {
		return r, err
	}
	r.Samples = s.sorted()
	r.growth()
	r.Notes = append(r.Notes, "the rate includes the removal")
	if o.Audit == nil {
		return r, nil
	}
	more, err := settledAudit(ctx, before, o)
	if err != nil {
		return r, err
	}
	left := 0
	for _, n := range more {
		left += max(0, n)
	}
	r.extra("audit_left", float64(left))
	for _, kind := range slices.Sorted(maps.Keys(more)) {
		r.Notes = append(r.Notes, fmt.Sprintf("audit: %+d of kind %s against before", more[kind], kind))
	}
	if left > 0 {
		return r, fmt.Errorf("the audit afterwards has %d objects more than the one before", left)
	}
	return r, nil
}

// settledAudit audits until it is as before, or the time for that is over, and returns the differences.
func settledAudit(ctx context.Context, before map[string]int, o ChurnOptions) (map[string]int, error) {
	for deadline := time.Now().Add(o.Settle); ; {
		after, err := o.Audit()
		if err != nil {
			return nil, fmt.Errorf("audit after: %w", err)
		}
		more := map[string]int{}
		for kind, n := range after {
			more[kind] += n
		}
		for kind, n := range before {
			more[kind] -= n
		}
		maps.DeleteFunc(more, func(_ string, n int) bool { return n == 0 })
		if len(more) == 0 || time.Now().After(deadline) {
			return more, nil
		}
		select {
		case <-time.After(auditAgain):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// sampler takes samples of the server.
type sampler struct {
	c     *client.Client
	start time.Time
	every int // cycles

	mu  sync.Mutex
	all []ServerSample
}

func (s *sampler) take(ctx context.Context, cycles int) error {
	b, err := s.c.Metrics(ctx)
	if err != nil {
		return err
	}
	x := ServerSample{Cycles: cycles, Seconds: time.Since(s.start).Seconds()}
	for _, m := range serverMetrics {
		if *m.to(&x), err = parseMetric(b, m.name); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, x)
	return nil
}

func (s *sampler) sorted() []ServerSample {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortFunc(s.all, func(a, b ServerSample) int { return a.Cycles - b.Cycles })
	return s.all
}

// growth says what became more between the first sample and the last, and how the second half of them
// slopes: by then what is kept at most so many of is there.
func (r *Result) growth() {
	n := len(r.Samples)
	first, last, half := r.Samples[0], r.Samples[n-1], r.Samples[n/2:]
	for _, m := range []struct {
		name string
		of   func(ServerSample) float64
	}{
		{"resident_KiB", func(s ServerSample) float64 { return s.Resident / 1024 }},
		{"heap_KiB", func(s ServerSample) float64 { return s.Heap / 1024 }},
		{"goroutines", func(s ServerSample) float64 { return s.Goroutines }},
		{"threads", func(s ServerSample) float64 { return s.Threads }},
		{"open_files", func(s ServerSample) float64 { return s.Files }},
	} {
		r.extra("server_"+m.name+"_before", m.of(first))
		r.extra("server_"+m.name+"_after", m.of(last))
		r.extra("server_"+m.name+"_slope_per_1000", 1000*slope(half, m.of))
	}
}

// slope fits a line through samples and returns what it rises by with each cycle.
func slope(samples []ServerSample, of func(ServerSample) float64) float64 {
	var x, y float64
	for _, s := range samples {
		x += float64(s.Cycles) / float64(len(samples))
		y += of(s) / float64(len(samples))
	}
	var xx, xy float64
	for _, s := range samples {
		dx := float64(s.Cycles) - x
		xx += dx * dx
		xy += dx * (of(s) - y)
	}
	if xx == 0 {
		return 0
	}
	return xy / xx
}
