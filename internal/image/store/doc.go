// Package store keeps images of one node in a directory: blobs by their digest
// and one small description per image, and shares the mounts of their layers.
//
//	DIR/lock                 held while a process has the store open
//	DIR/blobs/sha256/HEX     metadata and data blobs, immutable
//	DIR/images/HEX.json      an image's description, by its digest
//	DIR/tmp/                 imports under way; emptied by Open
//
// An image is there if and only if its description is: whoever adds one writes and
// syncs the blobs of its layers first and the description last, a delete takes them away
// in the opposite order, and Open removes what a crash left between the two.
//
// Start reading at import.go (an import from source to description), then
// store.go and mounts.go. It must not know names (the catalogue has them) nor
// who uses an image: refusing to delete one in use is its caller's part.
package store
