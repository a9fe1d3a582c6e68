package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"iter"
	"maps"
	"time"

	v1 "dsec/api/v1"
)

// JobOptions says what Job does besides its sandboxes.
type JobOptions struct {
	Touched int64         // bytes that each touches
	Settle  time.Duration // wait before the machine's memory is read
	Check   bool          // resume the first ones at the end, and compare their memory
	// Available reads what memory the server's machine has left; nil: it is another machine.
	Available func() (int64, error)
	Progress  func(stage string, done, total int64)
}

// jobLabel is the label that one call pauses all by.
const jobLabel = "bench-job"

// Job makes l.N sandboxes that touch memory each, pauses all by one call, and has as many new ones do the same
// meanwhile. With Check the first are then resumed, again by one call, when the new ones are gone.
func Job(ctx context.Context, d DSec, l Load, o JobOptions) (out []Result, err error) {
	if err := l.validate(); err != nil {
		return nil, err
	}
	if l.N < 1 || o.Touched < 1 {
		return nil, errors.New("job needs a number of sandboxes and bytes to touch")
	}
	o.Progress = orSilent(o.Progress)
	d.Spec.MemoryBytes = room(d.Spec.MemoryBytes, o.Touched)
	firsts := d
	firsts.Spec.Labels = maps.Clone(d.Spec.Labels)
	if firsts.Spec.Labels == nil {
		firsts.Spec.Labels = map[string]string{}
	}
	firsts.Spec.Labels[jobLabel] = rand.Text()
	var b boxes
	defer func() {
		rm, rerr := b.remove(ctx, d.Name(), l.Parallel)
		rm.Name = "rm of the paused"
		if o.Check {
			rm.Name = "rm"
		}
		out = append(out, rm)
		if err == nil {
			err = rerr
		}
	}()
	r, err := touchers(ctx, firsts, l, o, &b, "create and touch")
	out = append(out, r)
	if err != nil {
		return out, err
	}
	usedBefore, err := memoryOf(ctx, d.Client, b.all)
	if err != nil {
		return out, err
	}
	freeBefore, err := o.available(ctx)
	if err != nil {
		return out, err
	}
	o.Progress("one call pauses all", 0, 0)
	selected := v1.PauseRequest{Labels: map[string]string{jobLabel: firsts.Spec.Labels[jobLabel]}}
	r, err = called("pause of all by one call", d.Name(), l.N, d.Client.PauseMany(ctx, selected))
	if err != nil {
		return out, err
	}
	usedAfter, err := memoryOf(ctx, d.Client, b.all)
	if err != nil {
		return append(out, r), err
	}
	freeAfter, err := o.available(ctx)
	if err != nil {
		return append(out, r), err
	}
	r.extra("memory_back_percent", percent(usedBefore, usedAfter))
	r.extra("memory_before_MiB", float64(usedBefore)/(1<<20))
	r.extra("memory_after_MiB", float64(usedAfter)/(1<<20))
	if o.Available != nil {
		r.extra("MemAvailable_back_percent_of_touched", 100*float64(freeAfter-freeBefore)/float64(int64(l.N)*o.Touched))
	}
	out = append(out, r)

	var more boxes
	r, err = touchers(ctx, d, l, o, &more, "create and touch as many more")
	out = append(out, r)
	rm, rerr := more.remove(ctx, d.Name(), l.Parallel)
	rm.Name = "rm of the new"
	out = append(out, rm)
	if err = errors.Join(err, rerr); err != nil || !o.Check {
		return out, err
	}
	o.Progress("one call resumes all", 0, 0)
	r, err = called("resume of all by one call", d.Name(), l.N, d.Client.ResumeMany(ctx, selected))
	if err != nil {
		return out, err
	}
	out = append(out, r)
	r, err = run(ctx, "memory compared", d.Name(), l, func(ctx context.Context, _, i int) (time.Duration, error) {
		return timed(func() error { return intact(ctx, b.all[i].(dsecBox).sb) })
	})
	return append(out, r), err
}

// touchers makes sandboxes that hold memory.
func touchers(ctx context.Context, d DSec, l Load, o JobOptions, b *boxes, name string) (Result, error) {
	r, err := run(ctx, name, d.Name(), l, func(ctx context.Context, _, i int) (time.Duration, error) {
		o.Progress(name, int64(i), int64(l.N))
		return timed(func() error {
			x, err := d.Create(ctx)
			if err != nil {
				return err
			}
			b.add(x)
			return touch(ctx, x.(dsecBox).sb, o.Touched)
		})
	})
	if err == nil && r.Errors > 0 {
		err = fmt.Errorf("%s: %d of %d failed; the first: %w", name, r.Errors, r.N, r.first)
	}
	return r, err
}

// called is the result of one call for n sandboxes: its latencies are those that the call says each took.
func called(name, target string, n int, outcomes iter.Seq2[v1.PauseResult, error]) (Result, error) {
	r := Result{Name: name, Target: target, Parallel: 1, Host: ReadHost()}
	var w worker
	start := time.Now()
	for x, err := range outcomes {
		if err != nil {
			return r, fmt.Errorf("%s: %w", name, err)
		}
		w.note(time.Duration(x.TookMS*float64(time.Millisecond)), x.Error.Err())
	}
	r.Seconds = time.Since(start).Seconds()
	r.sum([]worker{w})
	if r.N != n {
		return r, fmt.Errorf("%s: %d outcomes for %d sandboxes", name, r.N, n)
	}
	return r, nil
}

func (o *JobOptions) available(ctx context.Context) (int64, error) {
	if o.Available == nil {
		return 0, nil
	}
	select {
	case <-time.After(o.Settle):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	return o.Available()
}
