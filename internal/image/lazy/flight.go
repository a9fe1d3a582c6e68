package lazy

import (
	"context"
	"fmt"
	"time"

	"dsec/api/v1/errs"
)

// flight fetches the missing chunks of [i, j); no other flight has them.
type flight struct {
	b     *blob
	owner string // on whose account
	i, j  int
	place *ticket
	pos   []int64       // how far each chunk has been written
	came  bool          // something was written
	step  chan struct{} // closed and replaced when a chunk is filled, closed at the end
	err   error         // set at the end
}

// fly starts a flight. b.mu is held.
func (b *blob) fly(owner string, i, j int, size int64, urgent bool) {
	f := &flight{b: b, owner: owner, i: i, j: j, pos: make([]int64, j-i), step: make(chan struct{}), place: &ticket{ready: make(chan struct{}), urgent: urgent}}
	for k := i; k < j; k++ {
		if b.chunk[k] == missing {
			b.flight[k] = f
		}
	}
	b.c.inflight.Add(size)
	b.c.tasks.Add(1)
	go func() {
		defer b.c.tasks.Done()
		defer b.c.inflight.Add(-size)
		f.run()
	}()
}

func (f *flight) run() {
	c := f.b.c
	ctx, cancel := context.WithTimeout(c.ctx, f.patience())
	defer cancel()
	err := c.gate.enter(ctx, f.place)
	if err == nil {
		err = f.attempts(ctx)
		c.gate.leave()
	}
	if c.ctx.Err() != nil {
		err = errs.New(errs.ShuttingDown, phase, "the cache is closed")
	}
	f.end(errs.Wrap(errs.InternalError, phase, "fetch blob "+f.b.digest, err))
}

// A read that failed is asked for again at once by the kernel (first ahead, then alone) and by many
// programs: what nothing came of is waited for in full only once in a while.
const (
	againWithin = 5 * time.Second
	againShare  = 10 // the part of the deadline that it then has
)

// patience is how long the flight may take.
func (f *flight) patience() time.Duration {
	b := f.b
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.c.opts.Now()
	for k := f.i; k < f.j; k++ {
		if at, ok := b.failed[k]; ok && b.flight[k] == f && now.Sub(at) < againWithin {
			return b.c.opts.Deadline / againShare
		}
	}
	return b.c.opts.Deadline
}

func (f *flight) end(err error) {
	b := f.b
	now := b.c.opts.Now()
	b.mu.Lock()
	f.err = err
	for k := f.i; k < f.j; k++ {
		if err != nil && !f.came && errs.Of(err).Retryable {
			b.failed[k] = now
		} else {
			delete(b.failed, k)
		}
		if b.flight[k] == f {
			delete(b.flight, k)
		}
	}
	close(f.step)
	complete := b.left == 0
	b.mu.Unlock()
	if err != nil && b.c.ctx.Err() == nil {
		b.c.log.Warn("blob not fetched", "blob", b.digest, "offset", b.t.bounds[f.i], "end", b.t.bounds[f.j], "error", err)
	}
	if complete {
		b.c.completed(b)
	}
}

// attempts fetches until all is there, the error is final, or time is up.
func (f *flight) attempts(ctx context.Context) error {
	filler, err := f.b.getFiller(ctx)
	if err != nil {
		return err
	}
	for pause, full := f.b.c.opts.RetryPause, false; ; pause = min(2*pause, 2*time.Second) {
		err := f.once(ctx, filler)
		switch {
		case err == nil:
			return nil
		case isDiskFull(err):
			if full || !f.b.c.makeRoom(f.b.t.bounds[f.j]-f.b.t.bounds[f.i]) {
				return err
			}
			full = true
			continue
		case !errs.Of(err).Retryable:
			return err
		}
		t := time.NewTimer(pause/2 + time.Duration(f.b.c.opts.Random()*float64(pause)))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return err
		}
	}
}

// once fetches each run of what is still missing.
func (f *flight) once(ctx context.Context, filler Filler) error {
	for i := f.i; i < f.j; {
		a, j := f.next(i)
		if a == j {
			return nil
		}
		f.b.stats.fetches.Add(1)
		if err := filler.Fetch(ctx, a, j, f.put); err != nil {
			return err
		}
		if k, _ := f.next(a); k < j {
			return f.fault(fmt.Sprintf("fetch of chunks %d to %d ended without chunk %d", a, j, k))
		}
		i = j
	}
	return nil
}

// next returns the next run of missing chunks from i on, with holes inside it.
func (f *flight) next(i int) (a, j int) {
	b := f.b
	b.mu.Lock()
	defer b.mu.Unlock()
	for i < f.j && b.flight[i] != f {
		i++
	}
	a, j = i, i
	for k := i; k < f.j && (b.flight[k] == f || b.t.hole.has(k)); k++ {
		if b.flight[k] == f {
			f.pos[k-f.i] = b.t.bounds[k]
			j = k + 1
		}
	}
	return a, j
}

// fault is a filler's mistake: trying again would repeat it.
func (f *flight) fault(what string) error {
	e := errs.New(errs.InternalError, phase, "blob "+f.b.digest+": "+what)
	e.Retryable = false
	return e
}

// put takes verified bytes: each chunk's in order, from its start to its end.
func (f *flight) put(off int64, p []byte) error {
	b, t := f.b, f.b.t
	i, j := t.chunks(off, int64(len(p)))
	if len(p) == 0 {
		return nil
	}
	end := off + int64(len(p))
	if i < f.i || j > f.j || end > t.bounds[j] {
		return f.fault(fmt.Sprintf("%d bytes at %d were not asked for", len(p), off))
	}
	for k := i; k < j; k++ {
		if f.pos[k-f.i] != max(off, t.bounds[k]) || t.hole.has(k) {
			return f.fault(fmt.Sprintf("bytes at %d are out of order", off))
		}
	}
	if _, err := b.data.WriteAt(p, off); err != nil {
		return diskError("fill blob "+b.digest, err)
	}
	b.stats.fetched.Add(int64(len(p)))
	if acct := b.c.opts.Accountant; acct != nil {
		acct.Count(f.owner, b.digest, Use{Fetched: int64(len(p))})
	}
	f.came = true
	for k := i; k < j; k++ {
		f.pos[k-f.i] = min(end, t.bounds[k+1])
	}
	if end < t.bounds[j] {
		j--
	}
	if i >= j {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.markFilled(i, j); err != nil {
		return err
	}
	close(f.step)
	f.step = make(chan struct{})
	return nil
}
