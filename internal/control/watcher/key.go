package watcher

import (
	"strings"

	v1 "dsec/api/v1"
)

// Key is an idempotency key as edges keep it: which request it was used with, and
// whose it is. Edges treat its text as opaque.
type Key struct {
	Fingerprint string // of the request; no '/'
	Scope       string // project and the client's key
}

func (k Key) String() string {
	if k.Scope == "" {
		return ""
	}
	return k.Fingerprint + "/" + k.Scope
}

// ParseKey reads what String wrote; anything else gives the zero Key.
func ParseKey(s string) Key {
	fingerprint, scope, _ := strings.Cut(s, "/")
	if scope == "" {
		return Key{}
	}
	return Key{fingerprint, scope}
}

// KeyHolder returns the sandbox that was created under a key which still holds, and
// the fingerprint of its request.
func (r *Registry) KeyHolder(scope string) (sb *v1.Sandbox, fingerprint string, ok bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	e := r.sandboxes[r.keys[scope]]
	if e == nil || r.cfg.Now().Sub(e.sb.CreatedAt) >= r.cfg.KeyTTL {
		return nil, "", false
	}
	return e.sb, e.key.Fingerprint, true
}
