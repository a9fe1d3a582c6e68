// Package up runs all of DSec on one machine: embedded etcd, the control plane and one
// edge, which talk over the same interfaces as on a thousand. It owns the layout of the
// data directory and the order of starting and stopping; every part it starts knows
// nothing of it.
//
//	DIR/lock          held by the running process
//	DIR/run.json      where it answers
//	DIR/root.token    the root token's secret
//	DIR/etcd          projects, tokens, image names
//	DIR/store         images, unless they are kept elsewhere
//	DIR/images        this node's cache of images
//	DIR/keeper        sockets and logs of the keepers, which hold descriptors for the cache
//	DIR/edge          the edge's identity and journal of sandboxes
//	DIR/container     the guest's binary and log
//	DIR/swap          the node's own swap, from the first pause on (package swap)
//	DIR/writable      sandboxes' own layers (or DIR/scratch, see package scratch)
//
// Start reading at up.go; objects.go has where images are and the
// keepers; down.go is the way back.
package up
