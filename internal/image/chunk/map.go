package chunk

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"sort"

	"dsec/internal/image/object"
)

// A map object:
//
//	"DSECMAP" version(1) size(8) chunks(4) packs(4)
//	packs    id(16) each
//	chunks   per chunk:
//	         byte     bits 0-5: blocks-1; bit 6: not behind the chunk before, in its pack; bit 7: behind a hole
//	         [uvarint blocks of the hole]            with bit 7
//	         [uvarint pack, uvarint offset]          with bit 6, always for the first
//	         uvarint  length - stored length (0: stored raw)
//	         digest(32)
//	SHA-256(32) of all before it
//
// The last chunk of a blob may end within a block. The object is named by the SHA-256
// of all of it.
const (
	mapMagic   = "DSECMAP"
	mapVersion = 1
	mapHeader  = 24

	maxMapChunks = 1 << 28
	maxMapBytes  = 12 << 30 // larger than any of maxMapChunks
)

// Map says of what chunks a data blob is made, and where each is stored. Whatever is
// in no chunk is zeros. A Map does not change and may be used concurrently.
type Map struct {
	size   int64
	packs  []id
	chunks []mapChunk
}

type mapChunk struct {
	digest digest
	block  uint32 // where in the blob
	off    uint32 // in the pack
	stored uint32
	pack   uint32 // index into packs
	blocks uint8
}

// Chunk is one chunk of a Map.
type Chunk struct {
	Off    int64 // in the blob
	Len    int   // bytes
	Stored int   // bytes in the store
	Digest [32]byte
}

// Size is the size of the blob.
func (m *Map) Size() int64 { return m.size }

// Len is the number of chunks.
func (m *Map) Len() int { return len(m.chunks) }

// Chunk returns chunk i; they are ordered by offset and do not overlap.
func (m *Map) Chunk(i int) Chunk {
	c := &m.chunks[i]
	return Chunk{Off: int64(c.block) * block, Len: m.length(c), Stored: int(c.stored), Digest: c.digest}
}

func (m *Map) length(c *mapChunk) int {
	return int(min(int64(c.blocks)*block, m.size-int64(c.block)*block))
}

func (m *Map) place(i int) place {
	c := &m.chunks[i]
	return place{pack: m.packs[c.pack], off: c.off, stored: c.stored}
}

// Range returns the chunks i to j-1 that have bytes of the n from off; i == j if it
// is all a hole. An i before m.Len() is in any case the first chunk that ends after off.
func (m *Map) Range(off, n int64) (i, j int) {
	end := off + n
	if n < 0 || end < off || end > m.size {
		end = m.size
	}
	i = sort.Search(len(m.chunks), func(k int) bool {
		return (int64(m.chunks[k].block)+int64(m.chunks[k].blocks))*block > off
	})
	j = i + sort.Search(len(m.chunks)-i, func(k int) bool { return int64(m.chunks[i+k].block)*block >= end })
	return i, j
}

// mapBuilder collects chunks in the order of the blob.
type mapBuilder struct {
	m     Map
	packs map[id]uint32
}

func newMapBuilder(size int64) *mapBuilder {
	return &mapBuilder{m: Map{size: size}, packs: map[id]uint32{}}
}

func (b *mapBuilder) add(off int64, length int, d digest, p place) {
	n, ok := b.packs[p.pack]
	if !ok {
		n = uint32(len(b.m.packs))
		b.packs[p.pack] = n
		b.m.packs = append(b.m.packs, p.pack)
	}
	b.m.chunks = append(b.m.chunks, mapChunk{
		digest: d, block: uint32(off / block), blocks: uint8((length + block - 1) / block),
		off: p.off, stored: p.stored, pack: n,
	})
}

func (m *Map) encode() []byte {
	b := make([]byte, 0, mapHeader+len(m.packs)*16+len(m.chunks)*37+sha256.Size)
	b = append(b, mapMagic...)
	b = append(b, mapVersion)
	b = binary.LittleEndian.AppendUint64(b, uint64(m.size))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.chunks)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.packs)))
	for _, p := range m.packs {
		b = append(b, p[:]...)
	}
	next, pack, off := uint32(0), ^uint32(0), uint32(0)
	for i := range m.chunks {
		c := &m.chunks[i]
		kind := c.blocks - 1
		if c.pack != pack || c.off != off {
			kind |= 1 << 6
		}
		if c.block != next {
			kind |= 1 << 7
		}
		b = append(b, kind)
		if kind&(1<<7) != 0 {
			b = binary.AppendUvarint(b, uint64(c.block-next))
		}
		if kind&(1<<6) != 0 {
			b = binary.AppendUvarint(b, uint64(c.pack))
			b = binary.AppendUvarint(b, uint64(c.off))
		}
		b = binary.AppendUvarint(b, uint64(m.length(c)-int(c.stored)))
		b = append(b, c.digest[:]...)
		next, pack, off = c.block+uint32(c.blocks), c.pack, c.off+c.stored
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

// parseMap reads what encode wrote; key is for messages.
func parseMap(key string, b []byte) (*Map, error) {
	bad := func(what string) (*Map, error) { return nil, corrupt(key, what, nil) }
	if len(b) < mapHeader+sha256.Size || string(b[:len(mapMagic)]) != mapMagic {
		return bad("it is no map")
	}
	if b[7] != mapVersion {
		return bad(fmt.Sprintf("it is a map of version %d, which this program does not know", b[7]))
	}
	body := b[:len(b)-sha256.Size]
	if sum := sha256.Sum256(body); string(sum[:]) != string(b[len(body):]) {
		return bad("its checksum is wrong")
	}
	size := binary.LittleEndian.Uint64(b[8:])
	chunks, packs := uint64(binary.LittleEndian.Uint32(b[16:])), uint64(binary.LittleEndian.Uint32(b[20:]))
	r := mapReader{b: body[mapHeader:]}
	// No chunk takes less than 34 bytes, so that what is allocated is bounded by what was read.
	if size > 1<<44 || chunks > maxMapChunks || packs > chunks || uint64(len(r.b)) < packs*16+chunks*34 {
		return bad("its header is impossible")
	}
	m := &Map{size: int64(size), packs: make([]id, packs), chunks: make([]mapChunk, chunks)}
	for i := range m.packs {
		copy(m.packs[i][:], r.bytes(16))
	}
	var prev mapChunk
	prev.pack = ^uint32(0)
	for i := range m.chunks {
		c := &m.chunks[i]
		if err := r.chunk(m, c, &prev); err != "" {
			return bad(fmt.Sprintf("chunk %d: %s", i, err))
		}
		prev = *c
	}
	if r.short || len(r.b) > 0 {
		return bad("its length is not what its header says")
	}
	// Who writes maps writes them in one way only, so that equal maps have equal digests.
	if !slices.Equal(m.encode(), b) {
		return bad("it is not encoded as a map is")
	}
	return m, nil
}

type mapReader struct {
	b     []byte
	short bool
}

func (r *mapReader) bytes(n int) []byte {
	if len(r.b) < n {
		r.short, r.b = true, nil
		return make([]byte, n)
	}
	p := r.b[:n]
	r.b = r.b[n:]
	return p
}

func (r *mapReader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.short, r.b = true, nil
		return 0
	}
	r.b = r.b[n:]
	return v
}

// chunk reads c, which comes after prev, and says what is wrong with it.
func (r *mapReader) chunk(m *Map, c, prev *mapChunk) string {
	kind := r.bytes(1)[0]
	c.blocks = kind&63 + 1
	at := uint64(prev.block) + uint64(prev.blocks)
	if kind&(1<<7) != 0 {
		at += min(r.uvarint(), 1<<40)
	}
	end := (at + uint64(c.blocks)) * block
	if end >= uint64(m.size)+block {
		return "it is outside of the blob"
	}
	c.block = uint32(at)
	pack, off := uint64(prev.pack), uint64(prev.off)+uint64(prev.stored)
	if kind&(1<<6) != 0 {
		pack, off = r.uvarint(), r.uvarint()
	}
	if pack >= uint64(len(m.packs)) || off < headerLen || off > maxPack {
		return "it is outside of its pack"
	}
	c.pack, c.off = uint32(pack), uint32(off)
	length := m.length(c)
	saved := r.uvarint()
	if saved >= uint64(length) {
		return "its stored length is impossible"
	}
	c.stored = uint32(length - int(saved))
	copy(c.digest[:], r.bytes(len(c.digest)))
	return ""
}

// LoadMap reads the map named name, as a [Layer] has it, and checks that it is what
// was stored. Errors: store_corrupt, object_not_found and the store's own.
func LoadMap(ctx context.Context, s object.Store, name string) (*Map, error) {
	want, err := parseContentKey(mapClass, name)
	if err != nil {
		return nil, err
	}
	b, err := readTwice(ctx, s, name, maxMapBytes, func(b []byte) error {
		if sha256.Sum256(b) != want {
			return corrupt(name, "it is not what its name says", nil)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return parseMap(name, b)
}

// readTwice reads an object, and once more if check says that it is damaged: it may
// have been so on the way only.
func readTwice(ctx context.Context, s object.Store, key string, limit int64, check func([]byte) error) ([]byte, error) {
	for last := false; ; last = true {
		b, err := object.ReadAll(ctx, s, key, 0, -1, limit)
		if err != nil {
			return nil, err
		}
		if err = check(b); err == nil || last {
			return b, err
		}
	}
}
