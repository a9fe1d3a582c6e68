// Package layer builds image layers: it collects a file tree in memory, streams
// file contents into a data blob, and encodes everything else as an EROFS
// metadata blob that the kernel mounts with the data blob as its extra device.
//
// Contents go straight to the data blob as they arrive, each file starting on a
// block boundary; only names, attributes and (up to a budget) the contents of
// very small files, which are inlined in the metadata, stay in memory. Output
// is deterministic: the same calls in the same order give the same bytes, with
// no build time and directories sorted.
//
// Start reading at [Builder] (tree.go); data.go writes contents, erofs.go plans
// and encodes the metadata, whiteout.go applies one image layer over another.
//
// The package has its own encoder because the EROFS library in go.mod (v0.3.1)
// cannot express two things images need: several names for one inode (it has no
// link operation and copies hard-linked files), and an inlined small file beside
// a data device (every one-byte file costs a block); it also writes the device
// table's place wrongly (unit of 16 instead of 128 bytes). Its reader serves as
// a second opinion in the tests.
//
// It must not know where trees come from (package source) nor where blobs are
// kept (package store).
package layer
