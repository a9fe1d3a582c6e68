// Package chunk keeps image layers in an object store: data blobs cut into chunks
// that are compressed and stored once however many images and snapshots have them, and
// metadata blobs whole. It reads them back by chunk, verified, and deletes what no layer
// needs.
//
// Start reading at session.go (what a writer does), reader.go (what a reader does) and
// collect.go (what a collector does); cut.go says where chunks end, map.go and pack.go
// what is stored, put.go how a blob gets there. The package must not know of images,
// names, sandboxes or the kernel; it knows a store only as [object.Store].
//
// # What is stored
//
//	meta/SHA256.NONCE   a metadata blob, compressed, named by the digest of the blob
//	map/SHA256.NONCE    a data blob's Map, named by its own digest
//	pack/ID             32 MiB of chunks and their index
//	moved/ID.ID         where the chunks of a pack went that was rewritten
//	lease/ID.N          someone is writing
//	condemned/ID.N      what a collector is about to delete
//
// A blob of zeros costs nothing, 10⁵ small files are one pack. A Map holds, for each
// chunk, its digest and where it is stored, about 36 bytes a chunk (0.035 % of the data),
// so that a reader needs the Map and the packs and nothing else: no index, no listing.
// Packs, maps and metadata never change. Everything that is read is checked: a Map and
// a metadata blob against the digest in their name, each chunk against the digest in the
// Map, a pack's index against its checksum. What fails that is read once more and then is
// store_corrupt; nothing of it is handed out. What is put again is then stored again: a
// [Writer] compares the Maps and metadata that it finds with what it would put, and relies
// on no pack that is in the [Damage] of this process's Readers.
//
// # Memory
//
// A [Writer] finds chunks with an index of 9 to 18 bytes a chunk: 100 to 200 MB for 1 TB
// of different data in chunks of 96 KiB, at most Options.IndexMemory, and 100 MB for the
// full indexes of packs used last. To load it once it reads the end of every pack (48 KiB
// of 32 MiB). A PutData takes some 64 MiB and (Uploads+1) packs; a Map in memory 56 bytes a
// chunk, 0.6 MB for 1 GiB. A [Collector] takes 8 bytes for each chunk that is needed: 85 MB
// for 1 TB.
//
// # How nothing is deleted that is needed
//
// Writers on many machines put chunks, and rely on chunks that others put, while a
// collector deletes. There are no locks; no clock but the store's is compared with
// another; any of them can die at any point.
//
// Names never come again: packs have random ids, and content that is stored again after
// it was deleted has another nonce. So whoever deletes a name can only mean that object.
//
// A session (1) takes a lease, (2) reads the condemned, and only then (3) looks what is
// in the store. It relies on an object only if that is there in (3) and not among
// the condemned of (2). When the caller has recorded the layers, it (4) confirms that the
// lease is there still, and gives it up.
//
// A collector (a) puts a list of what no root needs, condemned/ID.1; (b) in a later pass,
// when everyone would see the list, adds the leases that there are, condemned/ID.2; (c) when
// all of those have ended, asks for the roots again, goes through their maps, and
// deletes what is on the list and still not needed; and puts condemned/ID.3. Then:
//
//   - A session whose lease was put after (b) sees the list, and relies on nothing that
//     is on it.
//   - A session whose lease was put before (b) has ended before the roots of (c) are read: if
//     it was committed its layers are among them.
//   - A lease that was not renewed for its time is deleted by the collector before
//     it counts as ended. A session confirms after its layers were recorded: if it finds its
//     lease, then it was recorded before the roots were read; if not, Commit fails with
//     lease_lost, and the caller takes the record back. A renewal does not hide
//     this: each puts a new object and looks for the one before.
//   - A layer that was taken out of the roots must not be put back without a new Put,
//     which is the caller's part.
//
// The list stays as condemned/ID.3 until no other collector is at work, since one that
// read it as ID.2 may be deleting. Collectors should be one at a time all the same: two
// are safe unless one stops between looking at its lease and sending a delete for longer
// than its lease lasts.
//
// Packs that are mostly not needed (or small and many) are rewritten: the collector, under
// a lease of its own, copies what is needed into a new pack, then puts moved/OLD.NEW, and
// condemns OLD as above; it is deleted only if every chunk that is needed of it is found
// through tables whose last pack is there. Readers look for tables when a pack is gone.
//
// A kill leaves objects that nobody needs (packs without a map, tables without a pack,
// leases), which are condemned like all others; a pass that ended halfway is gone on with.
// If a Map of a root cannot be read, a pass deletes nothing.
//
// Network file systems show new files late: CollectOptions.Settle must be twice what a
// listing can be behind (on NFS acdirmax, 60 s by default). S3 and local directories never
// are.
package chunk
