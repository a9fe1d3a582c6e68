package etcd

import (
	"context"
	"encoding/json"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"dsec/internal/control/store"
)

const followRetry = 200 * time.Millisecond

// follow reads all values under prefix, then watches from the revision of that read,
// so that nothing falls between. A watch that breaks (compaction, lost cluster) starts
// over with another Reset.
func follow[T any](ctx context.Context, s *Store, prefix string, apply func(store.Change[T]) error) error {
	for {
		err := followOnce(ctx, s, prefix, apply)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if applyErr, ok := err.(applyError); ok {
			return applyErr.error
		}
		if err != nil {
			s.cfg.Log.Debug("watch interrupted", "prefix", prefix, "err", err)
		}
		t := time.NewTimer(followRetry)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		}
	}
}

// applyError marks a failure of the consumer, which ends the follow.
type applyError struct{ error }

func followOnce[T any](ctx context.Context, s *Store, prefix string, apply func(store.Change[T]) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the watch
	rctx, rcancel := s.limit(ctx)
	got, err := s.cli.Get(rctx, prefix, clientv3.WithPrefix())
	rcancel()
	if err != nil {
		return err
	}
	reset := store.Change[T]{Reset: true, Put: make(map[string]T, len(got.Kvs))}
	for _, kv := range got.Kvs {
		decode(s, &reset, string(kv.Key[len(prefix):]), kv.Value)
	}
	if err := apply(reset); err != nil {
		return applyError{err}
	}
	// WithRequireLeader: a member cut off from the cluster ends the watch instead of
	// staying silent.
	watch := s.cli.Watch(clientv3.WithRequireLeader(ctx), prefix, clientv3.WithPrefix(), clientv3.WithRev(got.Header.Revision+1))
	for res := range watch {
		if err := res.Err(); err != nil {
			return err
		}
		// One call for each event keeps a put and a delete of one key in order.
		for _, ev := range res.Events {
			c := store.Change[T]{}
			id := string(ev.Kv.Key[len(prefix):])
			if ev.Type == clientv3.EventTypeDelete {
				c.Delete = []string{id}
			} else {
				c.Put = make(map[string]T, 1)
				decode(s, &c, id, ev.Kv.Value)
			}
			if err := apply(c); err != nil {
				return applyError{err}
			}
		}
	}
	return ctx.Err()
}

// decode skips a value that does not parse: one bad record must not hide the others.
func decode[T any](s *Store, c *store.Change[T], id string, raw []byte) {
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		s.cfg.Log.Warn("unreadable record in etcd", "id", id, "err", err)
		return
	}
	c.Put[id] = v
}
