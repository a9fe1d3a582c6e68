package bench

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// maxSamples is how many different errors a result shows.
const maxSamples = 5

// Load is how much to do: N operations, or as many as Duration allows.
type Load struct {
	N        int
	Duration time.Duration // used when N is 0
	Parallel int
}

func (l Load) validate() error {
	switch {
	case l.Parallel < 1:
		return fmt.Errorf("parallel is %d; it must be at least 1", l.Parallel)
	case l.N < 0 || l.Duration < 0:
		return fmt.Errorf("count and duration must not be negative")
	case l.N == 0 && l.Duration == 0:
		return fmt.Errorf("say how much: a count or a duration")
	}
	return nil
}

// op does operation i on behalf of one worker and returns how long what is measured took.
type op func(ctx context.Context, worker, i int) (time.Duration, error)

// run does the load: each worker starts an operation when its last one has ended. What a
// cancelled context cut short is not counted.
func run(ctx context.Context, name, target string, l Load, do op) (Result, error) {
	if err := l.validate(); err != nil {
		return Result{}, err
	}
	r := Result{Name: name, Target: target, Parallel: l.Parallel, Host: ReadHost()}
	deadline := time.Now().Add(l.Duration)
	var next atomic.Int64
	workers := make([]worker, l.Parallel)
	cpu, start := cpuSeconds(), time.Now()
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if l.N > 0 && i >= l.N || l.N == 0 && time.Now().After(deadline) {
					return
				}
				d, err := do(ctx, w, i)
				if err != nil && ctx.Err() != nil {
					return
				}
				workers[w].note(d, err)
			}
		})
	}
	wg.Wait()
	r.Seconds = time.Since(start).Seconds()
	r.ClientCPUSeconds = cpuSeconds() - cpu
	r.sum(workers)
	return r, ctx.Err()
}

// worker holds one goroutine's measurements, so that none waits for another.
type worker struct {
	ok      []time.Duration
	errors  int
	samples []string
	first   error
}

func (w *worker) note(d time.Duration, err error) {
	if err == nil {
		w.ok = append(w.ok, d)
		return
	}
	w.errors++
	if w.first == nil {
		w.first = err
	}
	if len(w.samples) < maxSamples {
		w.samples = append(w.samples, err.Error())
	}
}

func (r *Result) sum(workers []worker) {
	var all []time.Duration
	seen := map[string]bool{}
	for _, w := range workers {
		all = append(all, w.ok...)
		r.Errors += w.errors
		if r.first == nil {
			r.first = w.first
		}
		for _, s := range w.samples {
			if !seen[s] && len(r.ErrorSamples) < maxSamples {
				seen[s] = true
				r.ErrorSamples = append(r.ErrorSamples, s)
			}
		}
	}
	r.OK = len(all)
	r.N = r.OK + r.Errors
	r.Latency = latencies(all)
	if r.Seconds > 0 {
		r.RatePerS = float64(r.OK) / r.Seconds
	}
}

func (r *Result) extra(key string, v float64) {
	if r.Extra == nil {
		r.Extra = map[string]float64{}
	}
	r.Extra[key] = v
}

func timed(f func() error) (time.Duration, error) {
	start := time.Now()
	err := f()
	return time.Since(start), err
}

// orSilent is a progress function that may be called.
func orSilent(progress func(stage string, done, total int64)) func(stage string, done, total int64) {
	if progress == nil {
		return func(string, int64, int64) {}
	}
	return progress
}
