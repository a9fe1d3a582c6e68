// Package controltest is a fake edge for tests of the control plane and of clients: it
// registers like a real one and serves an edge's Aether methods on a Unix socket, with
// sandboxes that are map entries and guests that only echo. Start at edge.go.
package controltest
