// Package edge is the part of DSec that runs on every machine that has sandboxes: it
// admits them, runs their lifecycle over the backends, keeps a record of each in its
// journal, adopts what survived its own restart, and forwards operations to the guests.
//
// It is reached over Aether only (serve.go has the methods) and knows the control plane
// only through the interface [Cluster]. It must not know of REST, tokens of users or
// etcd. Start reading at create.go; then delete.go, start.go, adopt.go and
// sandbox.go (states); pack.go makes snapshots, lastpack.go what the next one of a sandbox begins with, fork.go
// children; use.go says what is use of a sandbox, pause.go lets it stand still and resumes it for that, idle.go and
// hint.go decide when; admission.go counts what fits.
//
// Locks: Edge.tempMu guards the images of forks, and Edge.mu is taken with it held, never the other way round; Edge.mu guards the table of sandboxes and the idempotency keys; sandbox.mu
// one sandbox's state. Edge.mu is never taken with a sandbox.mu held. Who lets a sandbox stand still, or ends that, holds its token (sandbox.packs) and takes sandbox.mu with it held.
package edge
