// Package edges talks to edges: a small pool of Aether connections to each, and the
// operations that an edge serves for the control plane as Go calls.
//
// It must not know why a call is made. Start at pool.go, then calls.go.
package edges
