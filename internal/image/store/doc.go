// Package store is what one node has of images: a cache of layers that are kept in an
// object store, and the making of new ones. A layer whose objects are known, as the
// catalogue and every sandbox know them, can be mounted with nothing of it on the node.
//
//	DIR/lock                 held while a process has the store open
//	DIR/meta/HEX             metadata blobs, fetched whole and verified
//	DIR/data/                data blobs, sparse, filled when they are read (package lazy)
//	DIR/maps/                of what chunks data blobs are, as in the object store
//	DIR/layers/HEX.json      where the layers that are here are in the object store
//	DIR/images/HEX.json      images that were made or used here: a note, for placement
//	DIR/own/RANDOM.json      images made here within the last hour
//	DIR/tmp/                 imports under way; emptied by Open
//
// All but own is a cache: lost, it is fetched again, and nothing of it is synced but where
// a torn file would be taken for a whole one.
//
// An image is made in this order: its layers are put into the object store under a lease
// (a chunk.Session), the image is recorded in own, synced, and the leases are given up. The
// collector of the object store asks for what own has ([Store.Roots]), so that nothing is
// deleted between here and the catalogue, which has an image within seconds or never. A
// crash before the record leaves objects that nobody needs, which the collector removes.
//
// Start reading at layer.go (a layer into the object store), image.go (an image of
// layers), import.go (both, from a source), then use.go and mounts.go (a layer to be
// read). It must not know names (the catalogue has them) nor who uses an image: refusing
// to delete one in use is its caller's part.
package store
