// Package spawn clones a process straight into new namespaces without copying the
// caller's address space, and runs a short list of system calls in it before exec.
//
// The standard library's fork cannot do this: with a new user namespace it copies the
// page tables of the whole edge, and it cannot let the child join cgroup v1 hierarchies
// itself, which is the only way that does not wait for an RCU grace period (6 ms here;
// kernel 6.18: a lone thread moving itself takes no global lock).
//
// The child shares memory with the parent until it execs (CLONE_VM) and executes no
// compiled Go: it is a loop of a few instructions over a [Program]. The package must
// know nothing of sandboxes. Start reading at spawn.go; the loop is in
// clone_amd64.s.
package spawn
