// Package container runs sandboxes as Linux containers, cloned straight from the edge
// into their namespaces, with a root made of shared read-only layers and a writable
// directory, and no helper process.
//
// It owns, for each sandbox, everything named after its id: one directory under the
// data directory, one group in each cgroup hierarchy, and one process tree (whose
// namespaces and mounts die with it). It must not know of records, admission or the
// API. Start reading at create.go, then delete.go, adopt.go and pause.go.
package container
