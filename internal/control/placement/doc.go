// Package placement chooses the edge for a new sandbox: filter, sample a few, take the
// least loaded, go on to the next when an edge refuses.
//
// It counts its own creates in flight on top of what the registry knows, so that a burst
// neither oversells a node nor piles onto one. The edge has the last word. It must not know
// how an edge is reached: the caller's attempt does. Start at placement.go.
package placement
