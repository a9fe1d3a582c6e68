package chunk

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
)

// leaseBody is what a lease object says.
type leaseBody struct {
	TTLMS     int64 `json:"ttl_ms"`
	Collector bool  `json:"collector,omitempty"`
}

// unknownTTL is for leases that cannot be read.
const unknownTTL = time.Hour

// lease tells collectors that someone is writing, by objects lease/ID.N of which it
// keeps the last two and puts a new one every fifth of its life. A collector that
// takes it for dead deletes them; the lease notices, since the object before the
// newest must still be there after the newest was put, and is lost for good then.
type lease struct {
	store object.Store
	id    id
	body  leaseBody
	ttl   time.Duration
	now   func() time.Time

	mu      sync.Mutex // of what follows, and held over a renewal
	n       int        // the newest object
	renewed time.Time  // when its Put began
	lost    error

	stop func()
	done chan struct{}
}

func (l *lease) key(n int) string { return fmt.Sprintf("%s%s.%09d", leaseClass, l.id, n) }

func (l *lease) put(ctx context.Context, n int) error {
	b, err := json.Marshal(l.body)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "encode a lease", err)
	}
	return l.store.Put(ctx, l.key(n), int64(len(b)), bytes.NewReader(b))
}

// takeLease puts the first object and keeps it renewed until end is called.
func takeLease(ctx context.Context, s object.Store, i id, body leaseBody, now func() time.Time) (*lease, error) {
	l := &lease{store: s, id: i, body: body, ttl: time.Duration(body.TTLMS) * time.Millisecond, now: now, renewed: now(), done: make(chan struct{})}
	if err := l.put(ctx, 0); err != nil {
		return nil, fmt.Errorf("take a lease of the store: %w", err)
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l.stop = cancel
	go func() {
		defer close(l.done)
		l.keep(run)
	}()
	return l, nil
}

func (l *lease) keep(ctx context.Context) {
	every := l.ttl / 5
	for {
		t := time.NewTimer(every)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
		err := l.renew(ctx)
		if errors.Is(err, errs.LeaseLost) {
			return
		}
		every = l.ttl / 5
		if err != nil {
			every = l.ttl / 20 // the store has trouble: sooner
		}
	}
}

func (l *lease) renew(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost != nil {
		return l.lost
	}
	start := l.now()
	ctx, cancel := context.WithTimeout(ctx, l.ttl/4)
	defer cancel()
	if err := l.put(ctx, l.n+1); err != nil {
		return err
	}
	if err := l.probe(ctx); err != nil {
		return err
	}
	if l.n > 0 {
		l.store.Delete(ctx, l.key(l.n-1)) //nolint:errcheck // end deletes it again
	}
	l.n++
	l.renewed = start
	return nil
}

// probe looks whether the newest object is still there. It reads it, since network
// file systems answer a look from their cache.
func (l *lease) probe(ctx context.Context) error {
	_, err := object.ReadAll(ctx, l.store, l.key(l.n), 0, 1, 1)
	if errors.Is(err, errs.ObjectNotFound) {
		l.lost = errs.New(errs.LeaseLost, phase, "the lease of the store expired while it was written to").Because(err)
		return l.lost
	}
	return err
}

// check is an error if the lease is lost, or may be, by this machine's clock.
func (l *lease) check() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.checkLocked()
}

func (l *lease) checkLocked() error {
	if l.lost == nil && l.now().Sub(l.renewed) > l.ttl*3/4 {
		l.lost = errs.New(errs.LeaseLost, phase, fmt.Sprintf("the lease of the store could not be renewed for %v", l.now().Sub(l.renewed)))
	}
	return l.lost
}

// confirm is nil if no collector has taken or will take the lease for dead that has
// not seen what was recorded before the call.
func (l *lease) confirm(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.checkLocked(); err != nil {
		return err
	}
	return l.probe(ctx)
}

// end stops renewing and deletes the lease's objects; what cannot be deleted expires.
func (l *lease) end(ctx context.Context) {
	l.stop()
	<-l.done
	for n := max(l.n-1, 0); n <= l.n+1; n++ { // one more may have been put without an answer
		l.store.Delete(ctx, l.key(n)) //nolint:errcheck // it expires
	}
}
