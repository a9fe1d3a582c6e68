// Package iam decides who a request comes from and what it may do.
//
// It owns tokens: their secrets' form, their cache (no request reads the store; the
// store's watch keeps the cache current, so that a revoked token stops working at
// once here and within a watch's delay elsewhere), their expiry. It must not know of
// HTTP. Start at iam.go.
package iam
