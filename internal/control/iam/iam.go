package iam

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/store"
)

const (
	secretPrefix  = "dsec_"
	minRootSecret = 16
	rootTokenID   = "root"
)

// Config of an IAM.
type Config struct {
	Tokens store.Tokens
	Now    func() time.Time // nil: time.Now
	Rand   io.Reader        // nil: crypto/rand
}

// IAM authenticates and manages tokens.
type IAM struct {
	cfg   Config
	ready chan struct{} // closed once the cache was filled

	mu     sync.RWMutex
	byID   map[string]*entry
	byHash map[[sha256.Size]byte]*entry
	// Ids revoked here of which the watch has not yet told: a put of the same token that
	// is still on its way must not bring it back. Token ids are never reused.
	revoked map[string]struct{}
	filled  bool
}

type entry struct {
	record    store.TokenRecord
	principal Principal
}

// New returns an IAM that knows nobody until Run has filled it.
func New(cfg Config) *IAM {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Rand == nil {
		cfg.Rand = rand.Reader
	}
	return &IAM{
		cfg: cfg, ready: make(chan struct{}),
		byID: map[string]*entry{}, byHash: map[[sha256.Size]byte]*entry{}, revoked: map[string]struct{}{},
	}
}

// Run keeps the cache current until ctx ends.
func (m *IAM) Run(ctx context.Context) error {
	return m.cfg.Tokens.FollowTokens(ctx, func(c store.Change[store.TokenRecord]) error {
		m.apply(c)
		return nil
	})
}

// Ready is closed once Run has filled the cache.
func (m *IAM) Ready() <-chan struct{} { return m.ready }

func (m *IAM) apply(c store.Change[store.TokenRecord]) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c.Reset {
		for id := range m.byID {
			if _, still := c.Put[id]; !still {
				m.drop(id)
			}
		}
		for id := range m.revoked {
			if _, still := c.Put[id]; !still {
				delete(m.revoked, id)
			}
		}
	}
	for id, r := range c.Put {
		if _, gone := m.revoked[id]; !gone {
			m.keep(r)
		}
	}
	for _, id := range c.Delete {
		delete(m.revoked, id)
		m.drop(id)
	}
	if !m.filled {
		m.filled = true
		close(m.ready)
	}
}

func (m *IAM) keep(r store.TokenRecord) {
	if len(r.Hash) != sha256.Size {
		return
	}
	m.drop(r.Token.ID)
	e := &entry{record: r, principal: Principal{TokenID: r.Token.ID, Name: r.Token.Name, Project: r.Token.Project, rights: r.Token.Rights, hash: [sha256.Size]byte(r.Hash)}}
	m.byID[r.Token.ID] = e
	m.byHash[[sha256.Size]byte(r.Hash)] = e
}

func (m *IAM) drop(id string) {
	if e, ok := m.byID[id]; ok {
		delete(m.byID, id)
		delete(m.byHash, [sha256.Size]byte(e.record.Hash))
	}
}

// Authenticate returns the caller that secret belongs to. Errors: errs.BadToken.
func (m *IAM) Authenticate(secret string) (*Principal, error) {
	if secret == "" {
		return nil, errs.New(errs.BadToken, "iam.authenticate", "no token: the request has no 'Authorization: Bearer' header")
	}
	hash := sha256.Sum256([]byte(secret))
	m.mu.RLock()
	e := m.byHash[hash]
	m.mu.RUnlock()
	// The map is keyed by the hash, about which its timing tells nothing useful; the
	// comparison that decides takes constant time.
	if e == nil || subtle.ConstantTimeCompare(e.record.Hash, hash[:]) != 1 {
		return nil, errs.New(errs.BadToken, "iam.authenticate", "the token is unknown or was revoked")
	}
	if exp := e.record.Token.ExpiresAt; exp != nil && !m.cfg.Now().Before(*exp) {
		return nil, errs.New(errs.BadToken, "iam.authenticate", "the token expired at "+exp.Format(time.RFC3339))
	}
	return &e.principal, nil
}

// EnsureRoot makes secret the root token's, whatever it was before.
func (m *IAM) EnsureRoot(ctx context.Context, secret string) error {
	if len(secret) < minRootSecret || strings.TrimSpace(secret) != secret {
		return errs.New(errs.BadRequest, "iam.root", fmt.Sprintf("the root token needs at least %d characters and no white space around them", minRootSecret))
	}
	hash := sha256.Sum256([]byte(secret))
	m.mu.RLock()
	cur := m.byID[rootTokenID]
	m.mu.RUnlock()
	if cur != nil && bytes.Equal(cur.record.Hash, hash[:]) {
		return nil
	}
	return m.put(ctx, store.TokenRecord{
		Token: v1.Token{ID: rootTokenID, Name: "root", Project: RootProject, Rights: []v1.Right{v1.RightAdmin}, CreatedAt: m.cfg.Now().UTC()},
		Hash:  hash[:],
	})
}

func (m *IAM) put(ctx context.Context, r store.TokenRecord) error {
	if err := m.cfg.Tokens.PutToken(ctx, r); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.keep(r)
	return nil
}

// Create makes a token; its secret is in the answer and nowhere else.
func (m *IAM) Create(ctx context.Context, project string, req v1.TokenRequest) (v1.Token, error) {
	bad := func(field, why string) error {
		return errs.New(errs.BadRequest, "token.create", field+": "+why).With("field", field)
	}
	if req.Name == "" || len(req.Name) > 100 {
		return v1.Token{}, bad("name", "has 1 to 100 characters")
	}
	if len(req.Rights) == 0 {
		return v1.Token{}, bad("rights", "at least one of read, sandbox, image, admin")
	}
	rights := slices.Clone(req.Rights)
	slices.Sort(rights)
	rights = slices.Compact(rights)
	for _, r := range rights {
		if !knownRight(r) {
			return v1.Token{}, bad("rights", fmt.Sprintf("unknown right %q; known: read, sandbox, image, admin", r))
		}
	}
	if req.TTL < 0 || req.TTL > v1.Seconds(100*365*24*3600) {
		return v1.Token{}, bad("ttl_s", "is between 0 and a hundred years")
	}
	raw := make([]byte, 8+24)
	if _, err := io.ReadFull(m.cfg.Rand, raw); err != nil {
		return v1.Token{}, errs.Wrap(errs.InternalError, "token.create", "read randomness", err)
	}
	now := m.cfg.Now().UTC()
	t := v1.Token{ID: hex.EncodeToString(raw[:8]), Name: req.Name, Project: project, Rights: rights, CreatedAt: now}
	if req.TTL > 0 {
		exp := now.Add(req.TTL.Duration())
		t.ExpiresAt = &exp
	}
	secret := secretPrefix + hex.EncodeToString(raw[8:])
	hash := sha256.Sum256([]byte(secret))
	if err := m.put(ctx, store.TokenRecord{Token: t, Hash: hash[:]}); err != nil {
		return v1.Token{}, err
	}
	t.Secret = secret
	return t, nil
}

// Revoke ends a token. The root token cannot be revoked, only replaced at a start.
func (m *IAM) Revoke(ctx context.Context, id string) error {
	if id == rootTokenID {
		return errs.New(errs.BadRequest, "token.revoke", "the root token cannot be revoked; start the server with another one")
	}
	if err := m.cfg.Tokens.DeleteToken(ctx, id); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, known := m.byID[id]; known {
		m.revoked[id] = struct{}{}
		m.drop(id)
	}
	return nil
}

// List returns all tokens, oldest first, without secrets.
func (m *IAM) List() []v1.Token {
	m.mu.RLock()
	defer m.mu.RUnlock()
	out := make([]v1.Token, 0, len(m.byID))
	for _, e := range m.byID {
		out = append(out, e.record.Token)
	}
	slices.SortFunc(out, func(a, b v1.Token) int {
		if c := a.CreatedAt.Compare(b.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out
}

// Check says whether a principal that was authenticated before still is: errs.BadToken
// once its token is revoked, replaced or expired.
func (m *IAM) Check(p *Principal) error {
	m.mu.RLock()
	e := m.byID[p.TokenID]
	m.mu.RUnlock()
	if e == nil || [sha256.Size]byte(e.record.Hash) != p.hash {
		return errs.New(errs.BadToken, "iam.check", "the token was revoked")
	}
	if exp := e.record.Token.ExpiresAt; exp != nil && !m.cfg.Now().Before(*exp) {
		return errs.New(errs.BadToken, "iam.check", "the token expired at "+exp.Format(time.RFC3339))
	}
	return nil
}
