// Package lifecycle is a test of the states of sandboxes that any node can be put to: many clients do
// what they like with some sandboxes at the same time, and after each burst a model checks that there is an
// order of what they did in which every answer, and the state at rest, is right.
//
// It knows the node by [Driver] alone: an edge in the test's process, or a server with real containers.
package lifecycle
