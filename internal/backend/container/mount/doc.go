// Package mount makes a container's file systems as detached mounts, through the new
// mount API (kernel ≥ 6.13 for layers by descriptor): nothing is attached on the
// host, so nothing can leak there and no mount table grows with the number of
// sandboxes. The guest attaches them in its own namespace (internal/guest/boot).
// Start reading at mount.go.
package mount
