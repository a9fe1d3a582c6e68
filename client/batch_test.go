package client

import (
	"testing"
	"time"
)

func TestBatchTimeoutFollowsItsOperations(t *testing.T) {
	t.Parallel()
	s := &Sandbox{id: "s"}
	for name, c := range map[string]struct {
		parallel int
		limits   []time.Duration // of commands; 0: none
		set      time.Duration
		want     time.Duration
	}{
		"one":                {1, []time.Duration{0}, 0, batchOpTime + guestGrace},
		"in order":           {0, []time.Duration{0, 5 * time.Minute}, 0, batchOpTime + 5*time.Minute + guestGrace},
		"at once":            {4, []time.Duration{0, 0, 0, 14 * time.Minute}, 0, 25*time.Minute + guestGrace},
		"at once, but one":   {4, []time.Duration{time.Second}, 0, time.Second + guestGrace},
		"at most":            {1, []time.Duration{1 << 62, 1 << 62, 1 << 62}, 0, maxBatchTime},
		"as the caller says": {1, []time.Duration{0}, 3 * time.Hour, 3 * time.Hour},
	} {
		b := (&Client{}).Batch(c.parallel, false)
		b.Timeout = c.set
		for _, limit := range c.limits {
			b.Exec(s, Cmd{Path: "true", Timeout: limit})
		}
		if got := b.timeout(); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
