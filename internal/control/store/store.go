// Package store says what the control plane keeps durably, and nothing else: edges'
// registrations and epochs, tokens (hashed), the image catalogue and the cluster's
// signing key. Nothing is kept per sandbox, but for minutes the idempotency key of one
// that was created with such a key.
//
// It must not know of HTTP, Aether or placement, and imports no etcd: package etcd
// beside it is the real implementation, storetest holds the conformance suite and an
// in-memory one for tests. Start at [Store].
package store

import (
	"context"
	"slices"
	"strconv"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Store is everything that is kept. Consumers ask for the part they need.
//
// Failures of the storage itself are of class errs.Unavailable or errs.Deadline.
type Store interface {
	Nodes
	Tokens
	Images
	Keys
	Claims
	// Ping returns nil if the storage answers.
	Ping(ctx context.Context) error
	Close() error
}

// Change is one step of a followed set. A Reset step holds the whole set in Put:
// whatever is not in it does not exist.
type Change[T any] struct {
	Reset  bool
	Put    map[string]T
	Delete []string
}

// Nodes holds the registrations of edges. A registration lives as long as its edge
// keeps a lease alive.
type Nodes interface {
	// AllocateEpoch returns the next epoch of a node: 1, 2, …; no two calls get the same. It
	// is above the one given, which the node knows of a store that was lost.
	AllocateEpoch(ctx context.Context, nodeID string, above uint64) (uint64, error)

	// Register publishes node and keeps it published in the background until Withdraw,
	// through losses of its lease and of the storage. A registration of a later epoch
	// ends it (errs.StateConflict): an edge that was replaced must not come back.
	Register(ctx context.Context, node v1.Node) (Registration, error)

	// FollowNodes calls apply with a Reset, then with each change, until ctx ends
	// (the error is then ctx's) or apply fails. Interruptions of the storage are bridged
	// with another Reset.
	FollowNodes(ctx context.Context, apply func(Change[v1.Node]) error) error
}

// Registration is a published node.
type Registration interface {
	// Update publishes a changed description (same id and epoch).
	Update(ctx context.Context, node v1.Node) error
	// Withdraw removes the registration at once. Idempotent.
	Withdraw(ctx context.Context) error
	// Superseded is closed when a later epoch of the node was registered.
	Superseded() <-chan struct{}
}

// TokenRecord is a token as kept: without its secret, but with the secret's SHA-256.
type TokenRecord struct {
	Token v1.Token `json:"token"`
	Hash  []byte   `json:"sha256"`
}

// Tokens holds credentials by id.
type Tokens interface {
	// PutToken creates or replaces a token. record.Token.Secret must be empty.
	PutToken(ctx context.Context, record TokenRecord) error
	// DeleteToken fails with errs.TokenNotFound if there is none.
	DeleteToken(ctx context.Context, id string) error
	// FollowTokens is as FollowNodes.
	FollowTokens(ctx context.Context, apply func(Change[TokenRecord]) error) error
}

// Images is the catalogue: names that point at manifests.
type Images interface {
	// PutImage points image.Name at image, and returns what it pointed at before, or nil.
	PutImage(ctx context.Context, image v1.Image) (*v1.Image, error)
	// SwapImage points next.Name at next if what it points at has old's digest and layers;
	// errs.ImageNotFound, or StateConflict if it has others.
	SwapImage(ctx context.Context, old, next v1.Image) error
	// DeleteImage removes the name and returns what it pointed at; errs.ImageNotFound.
	DeleteImage(ctx context.Context, name string) (v1.Image, error)
	// FollowImages is as FollowNodes.
	FollowImages(ctx context.Context, apply func(Change[v1.Image]) error) error
}

// Keys holds what a cluster has one of: its secret, and the id of its object store.
type Keys interface {
	// SigningKey returns the key of capability tokens, made on first use; all callers of
	// one cluster get the same.
	SigningKey(ctx context.Context) ([]byte, error)
	// ObjectStore says which object store has the catalogue's images: id, if none is
	// recorded yet; with an empty id nothing is recorded and the answer may be empty.
	ObjectStore(ctx context.Context, id string) (string, error)
}

// Claims lets one apiserver of all create under an idempotency key.
type Claims interface {
	// Claim takes key for the request with that fingerprint. If it is taken for the same
	// one, Claim waits until that create has ended. It returns a Claim, or what is there
	// instead: the sandbox made under the key, or the other request that uses it.
	Claim(ctx context.Context, key, request string) (Claim, *Claimed, error)
}

// Claim is the right to create under a key. It ends with Settle, with Release, or some
// seconds after the death of this process.
type Claim interface {
	// Settle keeps for a time which sandbox was made.
	Settle(ctx context.Context, sandbox string, ttl time.Duration) error
	// Release gives the key up, after a create that failed.
	Release(ctx context.Context) error
}

// Claimed is what a key was used for.
type Claimed struct {
	Request string    `json:"request"`
	Sandbox string    `json:"sandbox,omitempty"` // empty: under way
	Until   time.Time `json:"until,omitzero"`    // of a settled one
}

// Over says whether a settled claim has lived out its time.
func (c *Claimed) Over(now time.Time) bool { return c.Sandbox != "" && !now.Before(c.Until) }

// SameLayers tells whether two images are one, of the same layers at the same places.
func SameLayers(a, b v1.Image) bool { return a.Digest == b.Digest && slices.Equal(a.Layers, b.Layers) }

// Replaced is the error of a name that points at something else by now.
func Replaced(name string) error {
	return errs.New(errs.StateConflict, "store.image", "the image "+strconv.Quote(name)+" was replaced meanwhile; ask again")
}
