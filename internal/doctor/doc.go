// Package doctor looks at a machine from outside: whether a node can work on it
// (check.go), and what of sandboxes is on it, down to the last namespace, mount and file
// (audit.go). The audit trusts no record of ours: it reads the kernel. It must not
// change anything that it did not make itself.
package doctor
