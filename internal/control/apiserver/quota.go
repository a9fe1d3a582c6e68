package apiserver

import (
	"fmt"
	"sync"

	"dsec/api/v1/errs"
)

const (
	// defaultTokenConns and defaultTokenStreams are well below what the server and its
	// connections to one edge can carry, so that one token cannot take all of it.
	defaultTokenConns   = 1024
	defaultTokenStreams = 8192
)

// quotas count what each token has open, by the token's id.
type quotas struct {
	conns, streams int

	mu   sync.Mutex
	used map[string]*quota
}

// quota is what one token uses; it is forgotten when that is nothing.
type quota struct {
	of             *quotas
	token          string
	conns, streams int
}

func newQuotas(conns, streams int) *quotas {
	return &quotas{conns: conns, streams: streams, used: map[string]*quota{}}
}

// connect counts a connection, or another request that stays open, of a token. leave
// must be called once after the last stream of it has ended.
func (q *quotas) connect(token string) (u *quota, leave func(), err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	u = q.used[token]
	if u == nil {
		u = &quota{of: q, token: token}
	}
	if u.conns >= q.conns {
		return nil, nil, tokenLimit("connections", q.conns)
	}
	u.conns++
	q.used[token] = u
	return u, u.leave, nil
}

func (u *quota) leave() {
	u.of.mu.Lock()
	defer u.of.mu.Unlock()
	u.conns--
	u.forget()
}

// Take implements aether.Quota.
func (u *quota) Take() error {
	u.of.mu.Lock()
	defer u.of.mu.Unlock()
	if u.streams >= u.of.streams {
		return tokenLimit("streams", u.of.streams)
	}
	u.streams++
	return nil
}

// Release implements aether.Quota.
func (u *quota) Release() {
	u.of.mu.Lock()
	defer u.of.mu.Unlock()
	u.streams--
	u.forget()
}

// forget needs the lock.
func (u *quota) forget() {
	if u.conns == 0 && u.streams == 0 && u.of.used[u.token] == u {
		delete(u.of.used, u.token)
	}
}

func tokenLimit(what string, limit int) error {
	return errs.New(errs.TokenLimit, "apiserver.quota", fmt.Sprintf("the token has %d %s open, which is the limit", limit, what)).
		With("resource", what).With("limit", fmt.Sprint(limit))
}
