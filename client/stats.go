package client

import (
	"context"
	"sync"
	"time"

	v1 "dsec/api/v1"
)

// Stat is a sandbox with its usage at a moment, or why it cannot be read.
type Stat struct {
	ID      string
	At      time.Time
	Sandbox *v1.Sandbox
	Err     error
}

// statsParallel is how many sandboxes Stats asks for at once.
const statsParallel = 16

// Stats reads what sandboxes use, in the order of ids.
func (c *Client) Stats(ctx context.Context, ids ...string) []Stat {
	out := make([]Stat, len(ids))
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(statsParallel, len(ids)) {
		wg.Go(func() {
			for i := range next {
				sb, err := c.Get(ctx, ids[i])
				out[i] = Stat{ID: ids[i], At: time.Now(), Sandbox: sb, Err: err}
			}
		})
	}
	for i := range ids {
		next <- i
	}
	close(next)
	wg.Wait()
	return out
}
