package lazy

import (
	"context"
	"sync"
	"time"

	"dsec/api/v1/errs"
)

// Range is one run of bytes that readers wanted.
type Range struct {
	Off  int64 `json:"off"`
	Len  int64 `json:"len"`
	AtMS int64 `json:"at_ms"` // after the recording began
}

// Trace is what a start needed of one blob, in order.
type Trace []Range

const maxTrace = 1 << 16

// Recorder records one trace.
type Recorder struct {
	b     *blob
	start time.Time
	end   time.Time

	mu    sync.Mutex
	trace Trace
}

// Record records what readers want of the blob from now on for d. Only reads that
// reach the blob are seen: not those of the kernel's cache, nor any after the blob
// is complete.
func (h *Blob) Record(d time.Duration) *Recorder {
	now := h.b.c.opts.Now()
	r := &Recorder{b: h.b, start: now, end: now.Add(d)}
	h.b.mu.Lock()
	h.b.rec = append(h.b.rec, r)
	h.b.mu.Unlock()
	return r
}

// Trace returns what was recorded so far.
func (r *Recorder) Trace() Trace {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append(Trace(nil), r.trace...)
}

// Stop ends the recording early and returns it.
func (r *Recorder) Stop() Trace {
	b := r.b
	b.mu.Lock()
	for i, x := range b.rec {
		if x == r {
			b.rec = append(b.rec[:i:i], b.rec[i+1:]...)
			break
		}
	}
	b.mu.Unlock()
	return r.Trace()
}

// Record is [Blob.Record] for a blob that someone has a handle of; nil if there is no such
// blob, or all of it is there.
func (c *Cache) Record(digest string, d time.Duration) *Recorder {
	c.mu.Lock()
	b := c.blobs[digest]
	c.mu.Unlock()
	if b == nil {
		return nil
	}
	b.op.Lock()
	defer b.op.Unlock()
	if b.gone || b.st == nil || b.complete() {
		return nil
	}
	return (&Blob{b: b}).Record(d)
}

func (b *blob) record(off, n int64) {
	b.mu.Lock()
	recs := b.rec
	b.mu.Unlock()
	if len(recs) == 0 {
		return
	}
	now := b.c.opts.Now()
	for _, r := range recs {
		if now.After(r.end) {
			r.Stop()
			continue
		}
		r.add(off, n, now)
	}
}

func (r *Recorder) add(off, n int64, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if k := len(r.trace); k > 0 {
		last := &r.trace[k-1]
		if last.Off <= off && off <= last.Off+last.Len && n <= maxJoin-last.Len {
			last.Len = max(last.Len, off+n-last.Off)
			return
		}
	}
	if len(r.trace) < maxTrace {
		r.trace = append(r.trace, Range{Off: off, Len: n, AtMS: now.Sub(r.start).Milliseconds()})
	}
}

const maxJoin = 8 << 20

// Warm fetches what a trace says, in its order, and returns when it is there.
// Ranges outside the blob are left out.
func (h *Blob) Warm(ctx context.Context, trace Trace) error {
	t := h.b.t
	var spans []span
	for _, r := range trace {
		if r.Off < 0 || r.Len <= 0 || r.Off >= t.size() {
			continue
		}
		i, j := t.chunks(r.Off, min(r.Len, t.size()-r.Off))
		spans = append(spans, span{i, j})
	}
	return h.b.fetchAll(ctx, spans)
}

// Fill fetches all that is missing.
func (h *Blob) Fill(ctx context.Context) error {
	return h.b.fetchAll(ctx, []span{{0, h.b.t.n()}})
}

// fetchAll fetches spans in order behind what readers wait for, as much at a time
// as keeps the gate busy.
func (b *blob) fetchAll(ctx context.Context, spans []span) error {
	width := max(1, b.c.opts.Parallel-b.c.opts.Parallel/4)
	work := make(chan span)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for range width {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for s := range work {
				if ctx.Err() != nil {
					continue
				}
				if err := b.ensure(ctx, "", s.i, s.j, false); err != nil {
					cancel(err)
				}
			}
		}()
	}
	for _, s := range spans {
		for i := s.i; i < s.j; {
			j := i + 1
			for j < s.j && b.t.bounds[j+1]-b.t.bounds[i] <= b.c.opts.MaxFetch {
				j++
			}
			select {
			case work <- span{i, j}:
			case <-ctx.Done():
				j = s.j
			}
			i = j
		}
	}
	close(work)
	wg.Wait()
	return errs.Wrap(errs.RequestCanceled, phase, "fetch blob "+b.digest, context.Cause(ctx))
}
