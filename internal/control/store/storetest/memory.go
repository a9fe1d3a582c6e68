package storetest

import (
	"context"
	"crypto/sha256"
	"strconv"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/store"
)

// Memory is a store.Store that lives in the process. It passes the same suite as the
// real one.
type Memory struct {
	mu      sync.Mutex
	epochs  map[string]uint64
	key     []byte
	objects string
	nodes   set[v1.Node]
	tokens  set[store.TokenRecord]
	images  set[v1.Image]
	claims  map[string]*claim
	freed   chan struct{} // closed when a claim ends
	down    error
}

var _ store.Store = (*Memory)(nil)

// NewMemory returns an empty store whose signing key derives from seed.
func NewMemory(seed string) *Memory {
	key := sha256.Sum256([]byte(seed))
	return &Memory{epochs: map[string]uint64{}, key: key[:], claims: map[string]*claim{}, freed: make(chan struct{})}
}

// Break makes Ping and all writes fail with err until Break(nil).
func (m *Memory) Break(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.down = err
}

// set is one followed map.
type set[T any] struct {
	items     map[string]T
	followers map[chan store.Change[T]]struct{}
}

// followBuffer bounds how far a follower may fall behind; tests stay far below it.
const followBuffer = 4096

func (s *set[T]) put(id string, v T) {
	if s.items == nil {
		s.items = map[string]T{}
	}
	s.items[id] = v
	s.tell(store.Change[T]{Put: map[string]T{id: v}})
}

func (s *set[T]) remove(id string) {
	delete(s.items, id)
	s.tell(store.Change[T]{Delete: []string{id}})
}

func (s *set[T]) tell(c store.Change[T]) {
	for ch := range s.followers {
		ch <- c
	}
}

func follow[T any](ctx context.Context, m *Memory, s *set[T], apply func(store.Change[T]) error) error {
	ch := make(chan store.Change[T], followBuffer)
	m.mu.Lock()
	reset := store.Change[T]{Reset: true, Put: make(map[string]T, len(s.items))}
	for id, v := range s.items {
		reset.Put[id] = v
	}
	if s.followers == nil {
		s.followers = map[chan store.Change[T]]struct{}{}
	}
	s.followers[ch] = struct{}{}
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(s.followers, ch)
	}()
	if err := apply(reset); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case c := <-ch:
			if err := apply(c); err != nil {
				return err
			}
		}
	}
}

// AllocateEpoch implements store.Nodes.
func (m *Memory) AllocateEpoch(_ context.Context, nodeID string, above uint64) (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down != nil {
		return 0, m.down
	}
	m.epochs[nodeID] = max(m.epochs[nodeID], above) + 1
	return m.epochs[nodeID], nil
}

// Register implements store.Nodes. The lease never expires by itself.
func (m *Memory) Register(_ context.Context, node v1.Node) (store.Registration, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down != nil {
		return nil, m.down
	}
	if node.ID == "" {
		return nil, errs.New(errs.BadRequest, "store.register", "a node needs an id without '/'")
	}
	if old, ok := m.nodes.items[node.ID]; ok && old.Epoch > node.Epoch {
		return nil, errs.New(errs.StateConflict, "store.register", "a later epoch of the node is registered").With("node", node.ID)
	}
	m.nodes.put(node.ID, node)
	return &registration{m: m, node: node, superseded: make(chan struct{})}, nil
}

type registration struct {
	m          *Memory
	node       v1.Node
	gone       bool
	superseded chan struct{}
}

func (r *registration) Update(_ context.Context, node v1.Node) error {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	switch {
	case r.m.down != nil:
		return r.m.down
	case r.gone:
		return errs.New(errs.StateConflict, "store.register", "the registration was withdrawn")
	case node.ID != r.node.ID || node.Epoch != r.node.Epoch:
		return errs.New(errs.BadRequest, "store.register", "an update keeps id and epoch")
	case r.m.nodes.items[node.ID].Epoch > node.Epoch:
		return errs.New(errs.StateConflict, "store.register", "a later epoch of the node is registered").With("node", node.ID)
	}
	r.node = node
	r.m.nodes.put(node.ID, node)
	return nil
}

func (r *registration) Withdraw(context.Context) error {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	if r.gone {
		return nil
	}
	r.gone = true
	if cur, ok := r.m.nodes.items[r.node.ID]; ok && cur.Epoch == r.node.Epoch {
		r.m.nodes.remove(r.node.ID)
	}
	return nil
}

func (r *registration) Superseded() <-chan struct{} { return r.superseded }

// FollowNodes implements store.Nodes.
func (m *Memory) FollowNodes(ctx context.Context, apply func(store.Change[v1.Node]) error) error {
	return follow(ctx, m, &m.nodes, apply)
}

// PutToken implements store.Tokens.
func (m *Memory) PutToken(_ context.Context, r store.TokenRecord) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down != nil {
		return m.down
	}
	if r.Token.Secret != "" {
		return errs.New(errs.InternalError, "store.token", "a token's secret must not be stored")
	}
	m.tokens.put(r.Token.ID, r)
	return nil
}

// DeleteToken implements store.Tokens.
func (m *Memory) DeleteToken(_ context.Context, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down != nil {
		return m.down
	}
	if _, ok := m.tokens.items[id]; !ok {
		return errs.New(errs.TokenNotFound, "store.token", "no token "+id)
	}
	m.tokens.remove(id)
	return nil
}

// FollowTokens implements store.Tokens.
func (m *Memory) FollowTokens(ctx context.Context, apply func(store.Change[store.TokenRecord]) error) error {
	return follow(ctx, m, &m.tokens, apply)
}

// PutImage implements store.Images.
func (m *Memory) PutImage(_ context.Context, image v1.Image) (*v1.Image, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down != nil {
		return nil, m.down
	}
	old, ok := m.images.items[image.Name]
	m.images.put(image.Name, image)
	if !ok {
		return nil, nil
	}
	return &old, nil
}

// SwapImage implements store.Images.
func (m *Memory) SwapImage(_ context.Context, old, next v1.Image) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down != nil {
		return m.down
	}
	now, ok := m.images.items[next.Name]
	switch {
	case !ok:
		return errs.New(errs.ImageNotFound, "store.image", "no image "+strconv.Quote(next.Name))
	case !store.SameLayers(now, old):
		return store.Replaced(next.Name)
	}
	m.images.put(next.Name, next)
	return nil
}

// DeleteImage implements store.Images.
func (m *Memory) DeleteImage(_ context.Context, name string) (v1.Image, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down != nil {
		return v1.Image{}, m.down
	}
	old, ok := m.images.items[name]
	if !ok {
		return old, errs.New(errs.ImageNotFound, "store.image", "no image "+strconv.Quote(name))
	}
	m.images.remove(name)
	return old, nil
}

// FollowImages implements store.Images.
func (m *Memory) FollowImages(ctx context.Context, apply func(store.Change[v1.Image]) error) error {
	return follow(ctx, m, &m.images, apply)
}

// SigningKey implements store.Keys.
func (m *Memory) SigningKey(context.Context) ([]byte, error) { return m.key, nil }

// ObjectStore implements store.Keys.
func (m *Memory) ObjectStore(_ context.Context, id string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.objects == "" && m.down == nil {
		m.objects = id
	}
	return m.objects, m.down
}

type claim struct {
	m   *Memory
	key string
	is  store.Claimed
}

// Claim implements store.Claims.
func (m *Memory) Claim(ctx context.Context, key, request string) (store.Claim, *store.Claimed, error) {
	for {
		m.mu.Lock()
		freed, held, down := m.freed, m.claims[key], m.down
		var c *claim
		if down == nil && (held == nil || held.is.Over(time.Now())) {
			c = &claim{m: m, key: key, is: store.Claimed{Request: request}}
			m.claims[key] = c
		}
		var is store.Claimed
		if held != nil {
			is = held.is
		}
		m.mu.Unlock()
		switch {
		case down != nil:
			return nil, nil, down
		case c != nil:
			return c, nil, nil
		case is.Sandbox != "" || is.Request != request:
			return nil, &is, nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return nil, nil, errs.Wrap(errs.DeadlineExceeded, "store.claim", "wait for a create with the same key", ctx.Err())
		}
	}
}

// Settle implements store.Claim.
func (c *claim) Settle(_ context.Context, sandbox string, ttl time.Duration) error {
	return c.end(func() { c.is.Sandbox, c.is.Until = sandbox, time.Now().Add(ttl) })
}

// Release implements store.Claim.
func (c *claim) Release(context.Context) error { return c.end(func() { delete(c.m.claims, c.key) }) }

func (c *claim) end(how func()) error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if c.m.down != nil {
		return c.m.down
	}
	if c.m.claims[c.key] != c || c.is.Sandbox != "" {
		return errs.New(errs.StateConflict, "store.claim", "the claim was lost")
	}
	how()
	close(c.m.freed)
	c.m.freed = make(chan struct{})
	return nil
}

// Ping implements store.Store.
func (m *Memory) Ping(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.down
}

// Close implements store.Store.
func (m *Memory) Close() error { return nil }
