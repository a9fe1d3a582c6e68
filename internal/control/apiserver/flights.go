package apiserver

import (
	"context"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/store"
	"dsec/internal/control/watcher"
)

const syncTimeout = 5 * time.Second

// flights makes creates under one idempotency key happen once: requests that come while
// one is under way share it, later ones get what it made, for the life of the key.
//
// Among apiservers, a claim in the store says which of them may create. Keys of before a
// restart are also found in the registry, which has them from the edges.
type flights struct {
	now func() time.Time
	ttl time.Duration
	wg  sync.WaitGroup

	mu     sync.Mutex
	byKey  map[string]*flight // by scope
	landed []*flight          // successes in the order of their end, to be forgotten
}

type flight struct {
	key     watcher.Key
	done    chan struct{} // closed when sb or err is set
	sb      *v1.Sandbox
	err     error
	waiting int
	cancel  context.CancelFunc
	ended   time.Time

	// A flight that failed, or that all who waited have left, gives its key away only when nothing
	// is left of what it may have made: who comes in between would get a sandbox that is about to go.
	leaving bool
	over    chan struct{} // closed then
}

func newFlights(now func() time.Time, ttl time.Duration) *flights {
	return &flights{now: now, ttl: ttl, byKey: map[string]*flight{}}
}

func (f *flights) do(ctx context.Context, key watcher.Key, s *Server, w wanted) (*v1.Sandbox, error) {
	if err := s.awaitKeys(ctx); err != nil {
		return nil, err
	}
	var fl *flight
	for {
		f.mu.Lock()
		f.forget()
		if fl = f.byKey[key.Scope]; fl == nil || !fl.leaving {
			break
		}
		f.mu.Unlock()
		select {
		case <-fl.over:
		case <-ctx.Done():
			return nil, errs.Wrap(errs.RequestCanceled, "sandbox.create", "wait for the end of an earlier create with this key", ctx.Err())
		}
	}
	if fl == nil {
		if sb, fingerprint, ok := s.cfg.Registry.KeyHolder(key.Scope); ok {
			f.mu.Unlock()
			if fingerprint != key.Fingerprint {
				return nil, reused()
			}
			return sb, nil
		}
		// The create outlives the request that began it as long as another one waits.
		run, cancel := context.WithCancel(context.WithoutCancel(ctx))
		fl = &flight{key: key, done: make(chan struct{}), over: make(chan struct{}), cancel: cancel}
		f.byKey[key.Scope] = fl
		f.wg.Go(func() { f.fly(run, fl, s, w) })
	}
	if fl.key.Fingerprint != key.Fingerprint {
		f.mu.Unlock()
		return nil, reused()
	}
	fl.waiting++
	f.mu.Unlock()

	var gone error
	select {
	case <-fl.done:
	case <-ctx.Done():
		gone = errs.Wrap(errs.RequestCanceled, "sandbox.create", "the client went away", ctx.Err())
	}
	f.mu.Lock()
	fl.waiting--
	if gone != nil && fl.waiting == 0 && fl.ended.IsZero() { // nobody wants it any more
		fl.leaving = true
		fl.cancel()
	}
	f.mu.Unlock()
	switch {
	case gone != nil:
		return nil, gone
	case fl.err != nil:
		return nil, fl.err
	}
	return s.current(fl.sb)
}

// fly runs the create and lands it.
func (f *flights) fly(ctx context.Context, fl *flight, s *Server, w wanted) {
	claim, sb, err := s.claim(ctx, fl.key)
	found := sb != nil
	var removals []removal
	if err == nil && !found {
		sb, removals, err = s.createNow(ctx, w, fl.key.String())
	}
	f.mu.Lock()
	if err == nil && ctx.Err() != nil { // all who waited have left
		if !found {
			removals = append(removals, s.reaper.reap(sb.Node, sb.ID))
		}
		err = errs.Wrap(errs.RequestCanceled, "sandbox.create", "the client went away", ctx.Err())
	}
	fl.sb, fl.err, fl.ended = sb, err, f.now()
	if err != nil {
		fl.leaving = true
	} else {
		f.landed = append(f.landed, fl)
	}
	fl.cancel()
	close(fl.done)
	f.mu.Unlock()
	// After the answer, which need not wait for it: until then others do.
	for _, r := range removals {
		<-r
	}
	if claim != nil {
		f.settle(ctx, claim, fl, s)
	}
	if err != nil {
		f.mu.Lock()
		delete(f.byKey, fl.key.Scope)
		close(fl.over)
		f.mu.Unlock()
	}
}

// settle tells the store how a flight ended.
func (f *flights) settle(ctx context.Context, claim store.Claim, fl *flight, s *Server) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), syncTimeout)
	defer cancel()
	var err error
	if fl.err == nil {
		err = claim.Settle(ctx, fl.sb.ID, f.ttl)
	} else {
		err = claim.Release(ctx)
	}
	if err != nil {
		s.cfg.Log.Warn("the claim of an idempotency key ends only by itself", "err", err)
	}
}

// claim takes the right to create under key, or finds what was made under it.
func (s *Server) claim(ctx context.Context, key watcher.Key) (store.Claim, *v1.Sandbox, error) {
	claim, held, err := s.cfg.Claims.Claim(ctx, key.Scope, key.Fingerprint)
	switch {
	case err != nil:
		return nil, nil, err
	case held == nil:
		// A holder that died may have made it; the registry has heard since.
		sb, fingerprint, ok := s.cfg.Registry.KeyHolder(key.Scope)
		if ok && fingerprint != key.Fingerprint {
			return claim, nil, reused()
		}
		return claim, sb, nil
	case held.Request != key.Fingerprint:
		return nil, nil, reused()
	}
	// Another apiserver made it, perhaps before our watch of its edge has told of it.
	out, err := s.get(ctx, nil, &idInput{held.Sandbox})
	if err != nil {
		return nil, nil, err
	}
	return nil, out.Body, nil
}

// wait returns once all claims have ended.
func (f *flights) wait() { f.wg.Wait() }

// forget drops what has outlived its key.
func (f *flights) forget() {
	now := f.now()
	for len(f.landed) > 0 && now.Sub(f.landed[0].ended) >= f.ttl {
		fl := f.landed[0]
		f.landed = f.landed[1:]
		if f.byKey[fl.key.Scope] == fl {
			delete(f.byKey, fl.key.Scope)
		}
	}
}

// awaitKeys waits until the registry has heard of all edges' keys. After the start that
// is always so at once.
func (s *Server) awaitKeys(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	return s.cfg.Registry.WaitSynced(ctx)
}

// current returns a sandbox as it is now.
func (s *Server) current(sb *v1.Sandbox) (*v1.Sandbox, error) {
	if now, ok := s.cfg.Registry.Get(sb.ID); ok {
		return now, nil
	}
	if _, _, err := s.cfg.Registry.Locate(sb.ID); err != nil {
		return nil, err
	}
	return sb, nil
}

func reused() error {
	return errs.New(errs.IdempotencyReuse, "sandbox.create", "the idempotency key was used with another request")
}
