// Package watcher knows what is alive: it follows every registered edge and keeps a
// versioned in-memory registry of sandboxes and nodes that can be listed and watched.
//
// It has no durable state and rebuilds everything after a restart; revisions start from
// the clock, so that they never go backwards. It must not know of HTTP, nor how an edge
// is reached (Source does). Start at registry.go (what is kept), then follow.go (where it
// comes from).
package watcher
