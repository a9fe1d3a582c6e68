package container

import (
	"context"
	"sync"
	"time"

	"dsec/internal/snapshot/freeze"
)

// hurryAfter is how long what the node does with a sandbox of class be may wait for processors that others keep
// busy. Where they do not, nothing takes as long, and nobody is disturbed.
const hurryAfter = 25 * time.Millisecond

// hurry is for what the node waits for of a sandbox's processes: that they begin, stand still or end. Until
// end is called, a sandbox of class be is given processors if that takes long.
func (b *Backend) hurry(id string) (end func()) {
	if !b.cgroups.Idle(id) {
		return func() {}
	}
	var mu sync.Mutex
	ended, calm := false, func() {}
	timer := time.AfterFunc(hurryAfter, func() {
		mu.Lock()
		defer mu.Unlock()
		if !ended {
			calm = b.cgroups.Hurry(id)
		}
	})
	return func() {
		timer.Stop()
		mu.Lock()
		defer mu.Unlock()
		if !ended {
			ended = true
			calm()
		}
	}
}

// freeze lets all processes of a sandbox stand still.
func (b *Backend) freeze(ctx context.Context, id string, l freeze.Limits) (*freeze.Frozen, error) {
	defer b.hurry(id)()
	return b.cgroups.Freezer(id).Freeze(ctx, l)
}
