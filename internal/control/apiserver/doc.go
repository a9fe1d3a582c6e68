// Package apiserver is the platform's entrance: the management API as REST, and Aether
// connections by HTTP upgrade, relayed to the edge that a sandbox's id names.
//
// It owns requests: who sends them (iam decides), their limits, how errors look, the
// OpenAPI document, idempotency of creates, metrics. It keeps no state that a second
// apiserver would need. It must not run sandboxes nor store anything itself. Start at
// server.go; routes.go lists the operations, create.go is the path that must be fast.
package apiserver
