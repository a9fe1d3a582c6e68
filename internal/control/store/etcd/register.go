package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/store"
)

// registration keeps one node published. The loop owns the lease; Update only hands
// it a new description.
type registration struct {
	s          *Store
	cancel     context.CancelFunc
	done       chan struct{}
	superseded chan struct{}

	mu    sync.Mutex // held over a publish, so that Update and the loop do not interleave
	node  v1.Node
	lease clientv3.LeaseID
	gone  bool
}

// Register implements store.Nodes.
func (s *Store) Register(ctx context.Context, node v1.Node) (store.Registration, error) {
	if node.ID == "" || strings.Contains(node.ID, "/") {
		return nil, errs.New(errs.BadRequest, "store.register", "a node needs an id without '/'")
	}
	r := &registration{s: s, node: node, done: make(chan struct{}), superseded: make(chan struct{})}
	if err := r.renew(ctx); err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r.cancel = cancel
	go r.keep(run)
	return r, nil
}

// renew takes a new lease and publishes under it.
func (r *registration) renew(ctx context.Context) error {
	ctx, cancel := r.s.limit(ctx)
	defer cancel()
	lease, err := r.s.cli.Grant(ctx, max(1, int64(r.s.cfg.LeaseTTL/time.Second)))
	if err != nil {
		return unavailable("store.register", "grant a lease", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lease = lease.ID
	if err := r.publish(ctx); err != nil {
		// Not published: the lease would only expire by itself.
		_, _ = r.s.cli.Revoke(ctx, lease.ID)
		return err
	}
	return nil
}

// publish writes r.node under r.lease unless a later epoch is there.
func (r *registration) publish(ctx context.Context) error {
	raw, err := json.Marshal(r.node)
	if err != nil {
		return errs.Wrap(errs.InternalError, "store.register", "encode", err)
	}
	key := prefixNodes + r.node.ID
	for {
		got, err := r.s.cli.Get(ctx, key)
		if err != nil {
			return unavailable("store.register", "read", err)
		}
		rev := int64(0)
		if len(got.Kvs) == 1 {
			rev = got.Kvs[0].ModRevision
			var other v1.Node
			if json.Unmarshal(got.Kvs[0].Value, &other) == nil && other.Epoch > r.node.Epoch {
				return errs.New(errs.StateConflict, "store.register", "a later epoch of the node is registered").With("node", r.node.ID)
			}
		}
		txn, err := r.s.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
			Then(clientv3.OpPut(key, string(raw), clientv3.WithLease(r.lease))).Commit()
		if err != nil {
			return unavailable("store.register", "write", err)
		}
		if txn.Succeeded {
			return nil
		}
	}
}

// keep holds the lease and takes another when it is lost.
func (r *registration) keep(ctx context.Context) {
	defer close(r.done)
	for ctx.Err() == nil {
		alive, err := r.s.cli.KeepAlive(ctx, r.lease)
		if err == nil {
			for range alive { // ends when the lease is lost or ctx ends
			}
		}
		for ctx.Err() == nil {
			err := r.renew(ctx)
			if err == nil {
				r.s.cfg.Log.Info("node registered again after its lease was lost", "node", r.node.ID)
				break
			}
			if errors.Is(err, errs.StateConflict) {
				close(r.superseded)
				return
			}
			t := time.NewTimer(followRetry)
			select {
			case <-ctx.Done():
				t.Stop()
			case <-t.C:
			}
		}
	}
}

// Update implements store.Registration.
func (r *registration) Update(ctx context.Context, node v1.Node) error {
	ctx, cancel := r.s.limit(ctx)
	defer cancel()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gone {
		return errs.New(errs.StateConflict, "store.register", "the registration was withdrawn")
	}
	if node.ID != r.node.ID || node.Epoch != r.node.Epoch {
		return errs.New(errs.BadRequest, "store.register", "an update keeps id and epoch")
	}
	old := r.node
	r.node = node
	if err := r.publish(ctx); err != nil {
		r.node = old
		return err
	}
	return nil
}

// Withdraw implements store.Registration.
func (r *registration) Withdraw(ctx context.Context) error {
	r.mu.Lock()
	gone := r.gone
	r.gone = true
	r.mu.Unlock()
	if gone {
		return nil
	}
	r.cancel()
	<-r.done
	ctx, cancel := r.s.limit(ctx)
	defer cancel()
	// Revoking removes the key with it, and only if it is still ours.
	_, err := r.s.cli.Revoke(ctx, r.lease)
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return unavailable("store.withdraw", "revoke the lease", err)
}

// Superseded implements store.Registration.
func (r *registration) Superseded() <-chan struct{} { return r.superseded }

// FollowNodes implements store.Nodes.
func (s *Store) FollowNodes(ctx context.Context, apply func(store.Change[v1.Node]) error) error {
	return follow(ctx, s, prefixNodes, apply)
}
