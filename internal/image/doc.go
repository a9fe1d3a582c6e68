// Package image holds what the parts of image handling share: the description
// of a stored image ([Image]) and mounting a layer ([Mount]).
//
// The parts: package source reads directories, tars, docker-archives and OCI
// layouts; package registry pulls from and pushes to registries; package layer
// encodes a tree as EROFS metadata and data, and reads it back; package export
// writes layers as tars and images as archives; package store keeps images by
// digest and shares their mounts; package build makes root file systems from
// recipes. Read store/import.go to see them together.
//
// It must not know of catalogues, names or sandboxes.
package image
