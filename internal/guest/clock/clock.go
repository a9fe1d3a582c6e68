package clock

import (
	"context"
	"sync"
	"time"
)

const (
	// Patience is how long a late timer waits to be told of a pause.
	Patience = time.Second
	// late is from where a timer may have been due during a pause; less is of no account.
	late = 100 * time.Millisecond
	// maxPauses is how many pauses are kept one by one. For what began before older ones,
	// these are as one that ended with the last of them.
	maxPauses = 1024
)

// Instant is a moment of the clock, in nanoseconds since its making.
type Instant int64

// pause is a time that the sandbox stood still.
type pause struct {
	middle Instant // what is after it began after the pause
	length time.Duration
}

// Clock is a sandbox's. Its methods are safe for concurrent use.
type Clock struct {
	now  func() time.Time
	base time.Time

	mu     sync.Mutex
	pauses []pause       // oldest first
	told   chan struct{} // closed at the next pause that is told; nil: nobody waits
}

// New returns a clock; now is that of the machine, and must be monotonic.
func New(now func() time.Time) *Clock {
	return &Clock{now: now, base: now()}
}

// Now returns the present.
func (c *Clock) Now() Instant { return Instant(c.now().Sub(c.base)) }

// Since returns for how long the sandbox has run since t, as far as it was told of pauses.
func (c *Clock) Since(t Instant) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.since(t)
}

func (c *Clock) since(t Instant) time.Duration {
	d := time.Duration(c.Now() - t)
	for i := len(c.pauses) - 1; i >= 0 && c.pauses[i].middle > t; i-- {
		d -= c.pauses[i].length
	}
	return max(d, 0)
}

// Stood tells that the sandbox stood still for d until a moment ago.
func (c *Clock) Stood(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d > 0 {
		// What begins between the thaw and now is not of the time before the pause.
		c.pauses = append(c.pauses, pause{c.Now() - Instant(d/2), d})
	}
	if len(c.pauses) > maxPauses {
		c.pauses[1].length += c.pauses[0].length
		c.pauses = append(c.pauses[:0], c.pauses[1:]...)
	}
	if c.told != nil {
		close(c.told)
		c.told = nil
	}
}

func (c *Clock) next() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.told == nil {
		c.told = make(chan struct{})
	}
	return c.told
}

// Timer calls a function once the sandbox has run for a time.
type Timer struct {
	clock *Clock
	f     func()

	mu     sync.Mutex
	timer  *time.Timer
	began  Instant
	length time.Duration
	set    int // how often it was set, so that what is under way for an earlier time knows
	off    bool
}

// AfterFunc calls f, in a goroutine of its own, when the sandbox has run for d.
func (c *Clock) AfterFunc(d time.Duration, f func()) *Timer {
	t := &Timer{clock: c, f: f}
	t.Reset(d)
	return t
}

// Reset makes the timer go off after d from now, and not before.
func (t *Timer) Reset(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.set++
	t.began, t.length, t.off = t.clock.Now(), d, false
	t.arm(d)
}

func (t *Timer) arm(d time.Duration) {
	if t.timer == nil {
		t.timer = time.AfterFunc(d, t.fire)
		return
	}
	t.timer.Reset(d)
}

// Stop keeps the timer from going off; the function may be running already.
func (t *Timer) Stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.off = true
	t.timer.Stop()
}

func (t *Timer) fire() {
	t.mu.Lock()
	began, length, set := t.began, t.length, t.set
	if over := t.clock.Since(began) - length; over >= late && !t.off {
		t.mu.Unlock()
		t.clock.await(began, length+over)
		t.mu.Lock()
	}
	left := length - t.clock.Since(began)
	run := !t.off && t.set == set && left <= 0
	switch {
	case run:
		t.off = true
	case !t.off && t.set == set:
		t.arm(left)
	}
	t.mu.Unlock()
	if run {
		t.f()
	}
}

// await waits for the message of a pause, which may have come since the clock said that ran
// had passed since began.
func (c *Clock) await(began Instant, ran time.Duration) {
	told := c.next()
	if c.Since(began) < ran {
		return
	}
	patience := time.NewTimer(Patience)
	defer patience.Stop()
	select {
	case <-told:
	case <-patience.C:
	}
}

// WithTimeout returns a context that ends when the sandbox has run for d; then its cause is
// context.DeadlineExceeded. It must be cancelled when it is no longer needed.
func (c *Clock) WithTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	t := c.AfterFunc(d, func() { cancel(context.DeadlineExceeded) })
	return ctx, func() {
		t.Stop()
		cancel(nil)
	}
}
