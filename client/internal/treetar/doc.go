// Package treetar turns directory trees into tar streams and back, on the client's
// machine: owners, modes, times, symlinks, hard links, devices and extended attributes
// are kept.
//
// Start at pack.go. A stream from a sandbox is not trusted: unpack.go writes through
// an os.Root and can touch nothing outside it. The package must not know where a
// stream comes from or goes to.
package treetar
