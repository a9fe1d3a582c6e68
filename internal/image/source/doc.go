// Package source reads what images are made from: a directory, a tar (plain or
// compressed), a docker-archive, an OCI layout (a directory or a tar of one). It
// feeds them into a layer.Builder and returns the image's configuration; nothing
// is ever unpacked to disk.
//
// Everything it reads is hostile until proven otherwise: names, links, sizes,
// digests and compressed data are checked, and what does not hold is refused with
// image_corrupt or image_unsupported, saying what and where.
//
// Start reading at [Path] and [Stream] (source.go). It must not know of the store.
package source
