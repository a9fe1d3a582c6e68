package etcd

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/store"
)

// Config says which cluster to use.
type Config struct {
	Endpoints []string
	TLS       *tls.Config   // nil: plain
	LeaseTTL  time.Duration // of node registrations; 0: 5 s
	Timeout   time.Duration // of one operation; 0: 5 s
	Rand      io.Reader     // nil: crypto/rand
	Log       *slog.Logger
	// Dir of an embedded etcd: writes are refused before its disk is full, which etcd does
	// not survive.
	Dir string
}

// Store implements store.Store.
type Store struct {
	cli    *clientv3.Client
	cfg    Config
	leases leases
}

var _ store.Store = (*Store)(nil)

// Open connects and checks that the cluster answers.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.LeaseTTL == 0 {
		cfg.LeaseTTL = 5 * time.Second
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 5 * time.Second
	}
	if cfg.Rand == nil {
		cfg.Rand = rand.Reader
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cli, err := clientv3.New(clientv3.Config{
		Endpoints: cfg.Endpoints, TLS: cfg.TLS, DialTimeout: cfg.Timeout,
		DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 5 * time.Second,
		Logger: zap.New(newSlogCore(cfg.Log, new(atomic.Bool))),
	})
	if err != nil {
		return nil, unavailable("store.open", "connect", err)
	}
	s := &Store{cli: cli, cfg: cfg}
	if err := s.Ping(ctx); err != nil {
		cli.Close()
		return nil, err
	}
	return s, nil
}

// Ping implements store.Store.
func (s *Store) Ping(ctx context.Context) error {
	ctx, cancel := s.limit(ctx)
	defer cancel()
	_, err := s.cli.Get(ctx, keySigning, clientv3.WithCountOnly())
	return unavailable("store.ping", "read", err)
}

// Close implements store.Store.
func (s *Store) Close() error {
	err := s.closeClaims()
	if cerr := s.cli.Close(); cerr != nil && !errors.Is(cerr, context.Canceled) {
		err = errors.Join(err, cerr)
	}
	return err
}

func (s *Store) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, s.cfg.Timeout)
}

// leastRoom is far more than any record of ours.
const leastRoom = 1 << 20

// room fails if there is none for a write.
func (s *Store) room(phase string) error {
	var fs unix.Statfs_t
	if s.cfg.Dir == "" || unix.Statfs(s.cfg.Dir, &fs) != nil || int64(fs.Bavail)*fs.Bsize >= leastRoom {
		return nil
	}
	return errs.New(errs.DiskFull, phase, "no space for the control plane's records")
}

// unavailable classifies a failure of etcd; nil stays nil.
func unavailable(phase, action string, err error) error {
	if err == nil {
		return nil
	}
	// Wrap keeps deadline and cancel apart.
	e := errs.Of(errs.Wrap(errs.ConnectionLost, phase, "etcd: "+action, err))
	return e
}

// AllocateEpoch implements store.Nodes.
func (s *Store) AllocateEpoch(ctx context.Context, nodeID string, above uint64) (uint64, error) {
	ctx, cancel := s.limit(ctx)
	defer cancel()
	key := prefixEpochs + nodeID
	for {
		got, err := s.cli.Get(ctx, key)
		if err != nil {
			return 0, unavailable("store.epoch", "read", err)
		}
		var last uint64
		unchanged := clientv3.Compare(clientv3.ModRevision(key), "=", 0)
		if len(got.Kvs) == 1 {
			unchanged = clientv3.Compare(clientv3.ModRevision(key), "=", got.Kvs[0].ModRevision)
			if last, err = strconv.ParseUint(string(got.Kvs[0].Value), 10, 64); err != nil {
				return 0, errs.New(errs.InternalError, "store.epoch", "etcd: "+key+" is not a number").Because(err)
			}
		}
		last = max(last, above)
		if last >= v1.MaxEpoch {
			return 0, errs.New(errs.InternalError, "store.epoch", "node "+nodeID+" has used up its epochs; give it a new id")
		}
		next := strconv.FormatUint(last+1, 10)
		txn, err := s.cli.Txn(ctx).If(unchanged).Then(clientv3.OpPut(key, next)).Commit()
		if err != nil {
			return 0, unavailable("store.epoch", "write", err)
		}
		if txn.Succeeded {
			return last + 1, nil
		}
	}
}

// PutToken implements store.Tokens.
func (s *Store) PutToken(ctx context.Context, r store.TokenRecord) error {
	if r.Token.Secret != "" {
		return errs.New(errs.InternalError, "store.token", "a token's secret must not be stored")
	}
	_, err := s.put(ctx, "store.token", prefixTokens+r.Token.ID, r)
	return err
}

// DeleteToken implements store.Tokens.
func (s *Store) DeleteToken(ctx context.Context, id string) error {
	prev, err := s.remove(ctx, "store.token", prefixTokens+id)
	if err == nil && prev == nil {
		return errs.New(errs.TokenNotFound, "store.token", "no token "+id)
	}
	return err
}

// FollowTokens implements store.Tokens.
func (s *Store) FollowTokens(ctx context.Context, apply func(store.Change[store.TokenRecord]) error) error {
	return follow(ctx, s, prefixTokens, apply)
}

// PutImage implements store.Images.
func (s *Store) PutImage(ctx context.Context, image v1.Image) (*v1.Image, error) {
	prev, err := s.put(ctx, "store.image", prefixImages+image.Name, image)
	if err != nil || prev == nil {
		return nil, err
	}
	old := new(v1.Image)
	if err := json.Unmarshal(prev, old); err != nil {
		return nil, errs.Wrap(errs.InternalError, "store.image", "etcd: parse the replaced image", err)
	}
	return old, nil
}

// SwapImage implements store.Images.
func (s *Store) SwapImage(ctx context.Context, old, next v1.Image) error {
	const phase = "store.image"
	raw, err := json.Marshal(next)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "encode", err)
	}
	if err := s.room(phase); err != nil {
		return err
	}
	ctx, cancel := s.limit(ctx)
	defer cancel()
	key := prefixImages + next.Name
	got, err := s.cli.Get(ctx, key)
	if err != nil {
		return unavailable(phase, "read", err)
	}
	if len(got.Kvs) == 0 {
		return errs.New(errs.ImageNotFound, phase, "no image "+strconv.Quote(next.Name))
	}
	var now v1.Image
	if err := json.Unmarshal(got.Kvs[0].Value, &now); err != nil {
		return errs.Wrap(errs.InternalError, phase, "etcd: parse the image", err)
	}
	if !store.SameLayers(now, old) {
		return store.Replaced(next.Name)
	}
	unchanged := clientv3.Compare(clientv3.ModRevision(key), "=", got.Kvs[0].ModRevision)
	txn, err := s.cli.Txn(ctx).If(unchanged).Then(clientv3.OpPut(key, string(raw))).Commit()
	switch {
	case err != nil:
		return unavailable(phase, "write", err)
	case !txn.Succeeded:
		return store.Replaced(next.Name)
	}
	return nil
}

// DeleteImage implements store.Images.
func (s *Store) DeleteImage(ctx context.Context, name string) (v1.Image, error) {
	var image v1.Image
	prev, err := s.remove(ctx, "store.image", prefixImages+name)
	if err != nil {
		return image, err
	}
	if prev == nil {
		return image, errs.New(errs.ImageNotFound, "store.image", "no image "+strconv.Quote(name))
	}
	return image, errs.Wrap(errs.InternalError, "store.image", "etcd: parse the removed image", json.Unmarshal(prev, &image))
}

// FollowImages implements store.Images.
func (s *Store) FollowImages(ctx context.Context, apply func(store.Change[v1.Image]) error) error {
	return follow(ctx, s, prefixImages, apply)
}

// SigningKey implements store.Keys.
func (s *Store) SigningKey(ctx context.Context) ([]byte, error) {
	fresh := make([]byte, 32)
	if _, err := io.ReadFull(s.cfg.Rand, fresh); err != nil {
		return nil, errs.Wrap(errs.InternalError, "store.key", "read randomness", err)
	}
	return s.once(ctx, "store.key", keySigning, fresh)
}

// ObjectStore implements store.Keys.
func (s *Store) ObjectStore(ctx context.Context, id string) (string, error) {
	if id != "" {
		got, err := s.once(ctx, "store.objects", keyObjects, []byte(id))
		return string(got), err
	}
	ctx, cancel := s.limit(ctx)
	defer cancel()
	got, err := s.cli.Get(ctx, keyObjects)
	if err != nil || len(got.Kvs) == 0 {
		return "", unavailable("store.objects", "read", err)
	}
	return string(got.Kvs[0].Value), nil
}

// once puts a value unless the key has one, and returns what it has then.
func (s *Store) once(ctx context.Context, phase, key string, value []byte) ([]byte, error) {
	ctx, cancel := s.limit(ctx)
	defer cancel()
	txn, err := s.cli.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, string(value))).
		Else(clientv3.OpGet(key)).Commit()
	if err != nil {
		return nil, unavailable(phase, "create", err)
	}
	if txn.Succeeded {
		return value, nil
	}
	kvs := txn.Responses[0].GetResponseRange().Kvs
	if len(kvs) != 1 {
		return nil, errs.New(errs.InternalError, phase, "etcd: "+key+" vanished while it was read")
	}
	return kvs[0].Value, nil
}

func (s *Store) put(ctx context.Context, phase, key string, value any) (prev []byte, err error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "encode", err)
	}
	if err := s.room(phase); err != nil {
		return nil, err
	}
	ctx, cancel := s.limit(ctx)
	defer cancel()
	res, err := s.cli.Put(ctx, key, string(raw), clientv3.WithPrevKV())
	if err != nil {
		return nil, unavailable(phase, "write", err)
	}
	if res.PrevKv == nil {
		return nil, nil
	}
	return res.PrevKv.Value, nil
}

func (s *Store) remove(ctx context.Context, phase, key string) (prev []byte, err error) {
	ctx, cancel := s.limit(ctx)
	defer cancel()
	res, err := s.cli.Delete(ctx, key, clientv3.WithPrevKV())
	if err != nil {
		return nil, unavailable(phase, "delete", err)
	}
	if len(res.PrevKvs) == 0 {
		return nil, nil
	}
	return res.PrevKvs[0].Value, nil
}
