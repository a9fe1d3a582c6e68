// Package file does the sandbox's file operations: paths, contents, trees, watches.
//
// Each operation acts with the permissions of the user it names. Paths are resolved by
// the kernel inside the guest's own root, so nothing outside the sandbox can be named;
// what has to be kept from a caller is the guest itself: a link of the sandbox may lead
// to PID 1's memory, environment or descriptors, so the guest follows no magic link and
// opens no file of procfs that is its own (open.go).
//
// The package must not know the protocol. Start at open.go, then read.go and write.go.
package file
