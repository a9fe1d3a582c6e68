package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"dsec/api/v1/errs"
	"dsec/internal/control/store"
)

// leases are shared by all claims of a Store, so that a create with a key costs one write
// before it and one after.
type leases struct {
	mu      sync.Mutex
	session *concurrency.Session // of creates under way: ends with this process
	settled clientv3.LeaseID     // of those that are over
	fresh   time.Time            // until then settled outlives the ttl that it was taken for
	ttl     time.Duration
}

type claim struct {
	s       *Store
	key     string
	rev     int64 // of our put: what is there is ours as long as it has this
	request string
}

// Claim implements store.Claims.
func (s *Store) Claim(ctx context.Context, key, request string) (store.Claim, *store.Claimed, error) {
	key = prefixClaims + key
	mine, err := json.Marshal(store.Claimed{Request: request})
	if err != nil {
		return nil, nil, errs.Wrap(errs.InternalError, "store.claim", "encode", err)
	}
	replace := int64(0) // revision of what may be replaced; 0: nothing
	for {
		txn, err := s.tryClaim(ctx, key, string(mine), replace)
		if err != nil {
			return nil, nil, err
		}
		if txn.Succeeded {
			return &claim{s, key, txn.Header.Revision, request}, nil, nil
		}
		replace = 0
		kvs := txn.Responses[0].GetResponseRange().Kvs
		if len(kvs) == 0 {
			continue // it went this moment
		}
		held := new(store.Claimed)
		if json.Unmarshal(kvs[0].Value, held) != nil || held.Over(time.Now()) {
			replace = kvs[0].ModRevision
			continue
		}
		if held.Sandbox != "" || held.Request != request {
			return nil, held, nil
		}
		if err := s.awaitChange(ctx, key, txn.Header.Revision); err != nil {
			return nil, nil, err
		}
	}
}

// tryClaim writes value if what is there is of revision replace, or reads it.
func (s *Store) tryClaim(ctx context.Context, key, value string, replace int64) (*clientv3.TxnResponse, error) {
	if ctx.Err() != nil {
		return nil, unavailable("store.claim", "wait", ctx.Err())
	}
	// Not given up half-way, since then nobody would know whether it was written.
	ctx, cancel := s.limit(context.WithoutCancel(ctx))
	defer cancel()
	session, err := s.session(ctx)
	if err != nil {
		return nil, err
	}
	txn, err := s.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", replace)).
		Then(clientv3.OpPut(key, value, clientv3.WithLease(session.Lease()))).
		Else(clientv3.OpGet(key)).Commit()
	if err != nil {
		s.leases.mu.Lock()
		if s.leases.session == session {
			s.leases.session = nil
		}
		s.leases.mu.Unlock()
		session.Orphan() // it may have been written: then it ends by itself
		return nil, unavailable("store.claim", "write", err)
	}
	return txn, nil
}

// session returns the lease of creates under way, kept alive in the background.
func (s *Store) session(ctx context.Context) (*concurrency.Session, error) {
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	if x := s.leases.session; x != nil {
		select {
		case <-x.Done(): // lost
		default:
			return x, nil
		}
	}
	lease, err := s.cli.Grant(ctx, max(1, int64(s.cfg.LeaseTTL/time.Second)))
	if err != nil {
		return nil, unavailable("store.claim", "grant a lease", err)
	}
	x, err := concurrency.NewSession(s.cli, concurrency.WithLease(lease.ID))
	if err != nil {
		return nil, unavailable("store.claim", "keep the lease", err)
	}
	s.leases.session = x
	return x, nil
}

// settledLease returns a lease that ends in ttl at the earliest.
func (s *Store) settledLease(ctx context.Context, ttl time.Duration) (clientv3.LeaseID, error) {
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	now := time.Now()
	if s.leases.settled != 0 && s.leases.ttl == ttl && now.Before(s.leases.fresh) {
		return s.leases.settled, nil
	}
	lease, err := s.cli.Grant(ctx, 2*max(1, int64(ttl/time.Second)))
	if err != nil {
		return 0, unavailable("store.claim", "grant a lease", err)
	}
	s.leases.settled, s.leases.ttl, s.leases.fresh = lease.ID, ttl, now.Add(ttl)
	return lease.ID, nil
}

// awaitChange returns once key has changed after revision rev, or might have.
func (s *Store) awaitChange(ctx context.Context, key string, rev int64) error {
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for res := range s.cli.Watch(clientv3.WithRequireLeader(wctx), key, clientv3.WithRev(rev+1)) {
		if res.Err() == nil && len(res.Events) > 0 {
			return nil
		}
	}
	t := time.NewTimer(followRetry) // the watch broke
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return unavailable("store.claim", "wait for a create with the same key", ctx.Err())
	}
}

// Settle implements store.Claim.
func (c *claim) Settle(ctx context.Context, sandbox string, ttl time.Duration) error {
	raw, err := json.Marshal(store.Claimed{Request: c.request, Sandbox: sandbox, Until: time.Now().Add(ttl)})
	if err != nil {
		return errs.Wrap(errs.InternalError, "store.claim", "encode", err)
	}
	ctx, cancel := c.s.limit(ctx)
	defer cancel()
	lease, err := c.s.settledLease(ctx, ttl)
	if err != nil {
		return err
	}
	return c.end(ctx, clientv3.OpPut(c.key, string(raw), clientv3.WithLease(lease)))
}

// Release implements store.Claim.
func (c *claim) Release(ctx context.Context) error {
	ctx, cancel := c.s.limit(ctx)
	defer cancel()
	return c.end(ctx, clientv3.OpDelete(c.key))
}

// end does op if the claim is still ours.
func (c *claim) end(ctx context.Context, op clientv3.Op) error {
	txn, err := c.s.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(c.key), "=", c.rev)).Then(op).Commit()
	if err != nil {
		return unavailable("store.claim", "write", err)
	}
	if !txn.Succeeded {
		return errs.New(errs.StateConflict, "store.claim", "the claim was lost: etcd did not answer for longer than its lease")
	}
	return nil
}

// closeClaims ends those of creates under way.
func (s *Store) closeClaims() error {
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	if s.leases.session == nil {
		return nil
	}
	err := s.leases.session.Close()
	s.leases.session = nil
	if errors.Is(err, context.DeadlineExceeded) { // then they end by themselves
		return nil
	}
	return unavailable("store.close", "end the lease of claims", err)
}
