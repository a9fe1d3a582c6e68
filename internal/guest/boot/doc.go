// Package boot is what the guest does first as PID 1 of a container: it makes the
// mounts it was handed its root, gives up what it no longer needs, and makes itself
// safe from the processes that it will run. Linked into every sandbox's guest, so it
// uses system calls and little else. The edge's half is internal/backend/container.
// Start reading at container.go.
package boot
