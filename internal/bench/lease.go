package bench

import (
	"context"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/client"
)

// DefaultLease is what a benchmark's sandboxes have: long enough that the renewals of
// thousands do not show in what is measured.
const DefaultLease = 5 * time.Minute

const (
	leaseRenewals = 4  // in the time of a lease: some may fail
	leaseParallel = 16 // renewals at once
)

// Hold gives the sandboxes that d makes from now on a lease and renews it until release,
// so that they end when this process is killed. One goroutine renews all: what a
// benchmark measures on this machine should not hold one for each.
func (d DSec) Hold(ctx context.Context, lease time.Duration) (held DSec, release func()) {
	d.Spec.Lease = v1.Seconds(lease.Seconds())
	d.leases = &leases{held: map[*client.Sandbox]struct{}{}}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.leases.run(ctx, lease/leaseRenewals)
	}()
	return d, func() { cancel(); <-done }
}

// leases are those of a benchmark's sandboxes.
type leases struct {
	mu   sync.Mutex
	held map[*client.Sandbox]struct{}
}

func (l *leases) add(sb *client.Sandbox) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held[sb] = struct{}{}
}

func (l *leases) drop(sb *client.Sandbox) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.held, sb)
}

// clear drops all.
func (l *leases) clear() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.held)
}

func (l *leases) run(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			l.renew(ctx, every)
		case <-ctx.Done():
			return
		}
	}
}

// renew renews all. A failure is left to the next round: if all fail, the operations of
// the benchmark do, and say why.
func (l *leases) renew(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	l.mu.Lock()
	next := make(chan *client.Sandbox, len(l.held))
	for sb := range l.held {
		next <- sb
	}
	l.mu.Unlock()
	close(next)
	var wg sync.WaitGroup
	for range min(leaseParallel, len(next)) {
		wg.Go(func() {
			for sb := range next {
				_ = sb.Renew(ctx)
			}
		})
	}
	wg.Wait()
}
