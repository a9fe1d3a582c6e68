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
// [Reader] (read.go) reads back what was built, trusting none of it.
//
// The package has its own encoder because the EROFS library in go.mod (v0.3.1)
// cannot express what images need: it has no operation for a second name of an
// inode, so hard links become copies; with a data file every one-byte file costs
// a block, since nothing is inlined; and holes are written out. It also points
// the device table at the superblock itself. Its reader serves as a second opinion
// in the tests.
//
// It must not know where trees come from (package source) nor where blobs are
// kept (package store).
package layer
