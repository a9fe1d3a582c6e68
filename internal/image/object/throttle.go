package object

import (
	"context"
	"io"
	"sync"
	"time"

	"dsec/api/v1/errs"
)

// Throttle puts a link in front of a store: every operation takes latency, and all
// bodies together pass at bytesPerSecond, or faster by what passes in [burst] after it had
// less to do. Zero means no limit.
func Throttle(s Store, bytesPerSecond int64, latency time.Duration) Store {
	return &throttled{s: s, rate: bytesPerSecond, latency: latency}
}

// burst is how much of its time a link makes up for: a process sleeps up to 1 ms longer than it
// wants, while a network would go on to send what is under way.
const burst = 5 * time.Millisecond

type throttled struct {
	s       Store
	rate    int64
	latency time.Duration

	mu   sync.Mutex
	free time.Time // when the link has sent what was given to it
}

// pass waits until n bytes are through the link.
func (t *throttled) pass(ctx context.Context, n int) error {
	if t.rate <= 0 || n == 0 {
		return nil
	}
	t.mu.Lock()
	now := time.Now()
	if least := now.Add(-burst); t.free.Before(least) {
		t.free = least
	}
	t.free = t.free.Add(time.Duration(float64(n) / float64(t.rate) * float64(time.Second)))
	wait := t.free.Sub(now)
	t.mu.Unlock()
	return t.wait(ctx, wait)
}

func (t *throttled) wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	return errs.Wrap(errs.StoreUnavailable, phase, "wait for the throttled store", sleep(ctx, d))
}

func (t *throttled) Put(ctx context.Context, key string, size int64, r io.Reader) error {
	if err := t.wait(ctx, t.latency); err != nil {
		return err
	}
	return t.s.Put(ctx, key, size, &throttledReader{t, ctx, r})
}

func (t *throttled) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := t.wait(ctx, t.latency); err != nil {
		return nil, err
	}
	rc, err := t.s.Get(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	return &throttledBody{throttledReader{t, ctx, rc}, rc}, nil
}

func (t *throttled) Stat(ctx context.Context, key string) (Info, error) {
	if err := t.wait(ctx, t.latency); err != nil {
		return Info{}, err
	}
	return t.s.Stat(ctx, key)
}

func (t *throttled) Delete(ctx context.Context, key string) error {
	if err := t.wait(ctx, t.latency); err != nil {
		return err
	}
	return t.s.Delete(ctx, key)
}

func (t *throttled) List(ctx context.Context, prefix string, each func(Info) error) error {
	if err := t.wait(ctx, t.latency); err != nil {
		return err
	}
	return t.s.List(ctx, prefix, each)
}

type throttledReader struct {
	t   *throttled
	ctx context.Context
	r   io.Reader
}

func (r *throttledReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p[:min(len(p), 64<<10)])
	if werr := r.t.pass(r.ctx, n); werr != nil {
		return n, werr
	}
	return n, err
}

type throttledBody struct {
	throttledReader
	io.Closer
}
