package etcd

// Layout of the keyspace.
const (
	prefixNodes  = "/dsec/nodes/"  // + node id: v1.Node, under the edge's lease
	prefixEpochs = "/dsec/epochs/" // + node id: decimal counter
	prefixTokens = "/dsec/tokens/" // + token id: store.TokenRecord
	prefixImages = "/dsec/images/" // + name: v1.Image
	prefixClaims = "/dsec/claims/" // + scope of an idempotency key: store.Claimed, under a lease
	keySigning   = "/dsec/keys/capability"
	keyObjects   = "/dsec/object-store" // its id
)
