package clock

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// world is a machine whose sandbox can stand still: its clock goes on then, while nothing of
// the sandbox runs.
type world struct {
	*Clock
	ahead atomic.Int64
}

func newWorld() *world {
	w := &world{}
	w.Clock = New(func() time.Time { return time.Now().Add(time.Duration(w.ahead.Load())) })
	return w
}

func (w *world) freeze(d time.Duration) { w.ahead.Add(int64(d)) }

func TestTimers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		start := time.Now() // the bubble's time does not pass while the sandbox stands still
		var at time.Duration
		set := func(d time.Duration) *Timer {
			at = -1
			start = time.Now()
			return w.AfterFunc(d, func() { at = time.Since(start) })
		}
		want := func(what string, d time.Duration) {
			t.Helper()
			time.Sleep(time.Hour)
			synctest.Wait()
			if at != d {
				t.Errorf("%s: went off after %v, want %v", what, at, d)
			}
		}
		set(3 * time.Second)
		want("without a pause", 3*time.Second)

		set(3 * time.Second)
		time.Sleep(time.Second)
		w.freeze(5 * time.Minute)
		w.Stood(5 * time.Minute)
		want("a pause that was told at once", 3*time.Second)

		set(3 * time.Second)
		for range 200 {
			time.Sleep(10 * time.Millisecond)
			w.freeze(2 * time.Second)
			w.Stood(2 * time.Second)
		}
		want("many pauses", 3*time.Second)

		// Due during the pause, so it goes off before the message is read.
		set(time.Second)
		time.Sleep(time.Second - time.Nanosecond)
		w.freeze(5 * time.Hour)
		time.Sleep(10 * time.Millisecond)
		w.Stood(5*time.Hour + 5*time.Millisecond)
		want("a message that comes later", time.Second+10*time.Millisecond-time.Nanosecond)

		set(3 * time.Second)
		time.Sleep(time.Second)
		w.freeze(5 * time.Hour)
		time.Sleep(2*time.Second + Patience/2)
		w.Stood(5 * time.Hour)
		want("a message that comes while a late timer waits", 3*time.Second+Patience/2)

		set(3 * time.Second)
		w.freeze(5 * time.Hour)
		want("no message", 3*time.Second+Patience)

		// What begins after the thaw and before the message did not stand still.
		w.freeze(time.Hour)
		set(3 * time.Second)
		time.Sleep(10 * time.Millisecond)
		w.Stood(time.Hour)
		want("begun before the message", 3*time.Second)

		x := set(3 * time.Second)
		time.Sleep(time.Second)
		x.Stop()
		want("stopped", -1)

		x = set(3 * time.Second)
		time.Sleep(time.Second)
		x.Reset(time.Minute)
		w.freeze(time.Hour)
		w.Stood(time.Hour)
		want("set again", 61*time.Second)

		x = set(3 * time.Second)
		w.freeze(time.Hour)
		time.Sleep(3*time.Second + Patience/2) // it waits for a message
		x.Reset(time.Minute)
		want("set again while it waited", 63*time.Second+Patience/2)
	})
}

func TestSince(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		first := w.Now()
		for i := range 2 * maxPauses {
			mark := w.Now()
			w.freeze(time.Minute)
			w.Stood(time.Minute)
			time.Sleep(time.Second)
			if d := w.Since(mark); d != time.Second {
				t.Fatalf("over pause %d: %v", i, d)
			}
		}
		if d := w.Since(first); d != 2*maxPauses*time.Second {
			t.Errorf("over all pauses: %v", d)
		}
		if len(w.pauses) > maxPauses {
			t.Errorf("%d pauses are kept", len(w.pauses))
		}
		if d := w.Since(w.Now() + 5); d != 0 {
			t.Errorf("since the future: %v", d)
		}
	})
}

func TestWithTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		ctx, cancel := w.WithTimeout(t.Context(), time.Second)
		defer cancel()
		w.freeze(time.Hour)
		w.Stood(time.Hour)
		time.Sleep(time.Second - 1)
		synctest.Wait()
		if ctx.Err() != nil {
			t.Fatal("it ended early")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if context.Cause(ctx) != context.DeadlineExceeded {
			t.Fatal(context.Cause(ctx))
		}
		ctx, cancel = w.WithTimeout(t.Context(), time.Second)
		cancel()
		if context.Cause(ctx) != context.Canceled {
			t.Fatal(context.Cause(ctx))
		}
	})
}
