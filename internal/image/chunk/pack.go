package chunk

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"dsec/internal/image/object"

	"github.com/klauspost/compress/zstd"
)

// A pack object:
//
//	header   "DSECPACK" version(1) 0(7) id(16)
//	chunks   stored bytes, one after the other
//	index    per chunk: digest(32) stored(4) length(4)
//	trailer  chunks(4) 0(4) offset of the index(8) "DSECPEND" SHA-256(32) of id, index and the trailer before it
//
// Numbers are little-endian. Chunks are where the lengths before them say.
const (
	packMagic   = "DSECPACK"
	packEnd     = "DSECPEND"
	packVersion = 1

	headerLen  = 32
	entryLen   = 40
	trailerLen = 56

	// defaultPack is the size at which a pack is full. The largest has one chunk more.
	defaultPack = 32 << 20
	maxPack     = 1 << 30
	firstTail   = 48 << 10 // what of a pack is read to find its index: the index of 1,200 chunks
)

// place is where a chunk is stored. A chunk whose stored length is its length is
// stored raw.
type place struct {
	pack   id
	off    uint32
	stored uint32
}

type packEntry struct {
	digest digest
	off    uint32
	stored uint32
	length uint32
}

func packHeader(pack id) []byte {
	h := make([]byte, headerLen)
	copy(h, packMagic)
	h[8] = packVersion
	copy(h[16:], pack[:])
	return h
}

func checkHeader(pack id, h []byte) error {
	if string(h) != string(packHeader(pack)) {
		return corrupt(pack.packKey(), "the header is damaged", nil)
	}
	return nil
}

// packBuilder assembles a pack in memory.
type packBuilder struct {
	id      id
	buf     []byte
	entries []packEntry
}

func newPack(pack id, buf []byte) *packBuilder {
	return &packBuilder{id: pack, buf: append(buf[:0], packHeader(pack)...)}
}

func (b *packBuilder) add(d digest, stored []byte, length int) place {
	e := packEntry{digest: d, off: uint32(len(b.buf)), stored: uint32(len(stored)), length: uint32(length)}
	b.buf = append(b.buf, stored...)
	b.entries = append(b.entries, e)
	return place{pack: b.id, off: e.off, stored: e.stored}
}

// finish adds the index and returns the pack.
func (b *packBuilder) finish() []byte {
	start := len(b.buf)
	for _, e := range b.entries {
		b.buf = append(b.buf, e.digest[:]...)
		b.buf = binary.LittleEndian.AppendUint32(b.buf, e.stored)
		b.buf = binary.LittleEndian.AppendUint32(b.buf, e.length)
	}
	index := b.buf[start:]
	var t [trailerLen]byte
	binary.LittleEndian.PutUint32(t[:], uint32(len(b.entries)))
	binary.LittleEndian.PutUint64(t[8:], uint64(start))
	copy(t[16:], packEnd)
	sum := indexSum(b.id, index, t[:24])
	copy(t[24:], sum[:])
	b.buf = append(b.buf, t[:]...)
	return b.buf
}

func indexSum(pack id, index, trailer []byte) (d digest) {
	h := sha256.New()
	h.Write(pack[:])
	h.Write(index)
	h.Write(trailer)
	h.Sum(d[:0])
	return d
}

// parseTrailer returns the number of chunks and where the index begins, of a pack of
// size bytes that ends with tail.
func parseTrailer(pack id, size int64, tail []byte) (chunks int, index int64, err error) {
	if size < headerLen+trailerLen || size > maxPack || len(tail) < trailerLen {
		return 0, 0, corrupt(pack.packKey(), fmt.Sprintf("%d bytes are no pack", size), nil)
	}
	t := tail[len(tail)-trailerLen:]
	n := int64(binary.LittleEndian.Uint32(t))
	at := binary.LittleEndian.Uint64(t[8:])
	if string(t[16:24]) != packEnd || binary.LittleEndian.Uint32(t[4:]) != 0 || at < headerLen || at > uint64(size) || int64(at)+n*entryLen+trailerLen != size {
		return 0, 0, corrupt(pack.packKey(), "the trailer is damaged", nil)
	}
	return int(n), int64(at), nil
}

// parseIndex reads index and trailer, which are the end of the pack from the index's
// offset on.
func parseIndex(pack id, size int64, b []byte) ([]packEntry, error) {
	n, start, err := parseTrailer(pack, size, b)
	if err != nil {
		return nil, err
	}
	if int64(len(b)) != size-start {
		return nil, corrupt(pack.packKey(), "the index has another length", nil)
	}
	index, trailer := b[:n*entryLen], b[n*entryLen:]
	if sum := indexSum(pack, index, trailer[:24]); string(sum[:]) != string(trailer[24:]) {
		return nil, corrupt(pack.packKey(), "the index is damaged", nil)
	}
	entries := make([]packEntry, n)
	off := int64(headerLen)
	for i := range entries {
		p := index[i*entryLen:]
		e := &entries[i]
		copy(e.digest[:], p)
		e.off = uint32(off)
		e.stored = binary.LittleEndian.Uint32(p[32:])
		e.length = binary.LittleEndian.Uint32(p[36:])
		if e.length == 0 || e.length > maxChunk || e.stored == 0 || e.stored > e.length {
			return nil, corrupt(pack.packKey(), "the index has an impossible chunk", nil)
		}
		off += int64(e.stored)
	}
	if off != start {
		return nil, corrupt(pack.packKey(), "the index does not add up", nil)
	}
	return entries, nil
}

// loadIndex reads the index of the pack, of size bytes, from the store.
func loadIndex(ctx context.Context, s object.Store, pack id, size int64) ([]packEntry, error) {
	from := max(size-firstTail, 0)
	tail, err := object.ReadAll(ctx, s, pack.packKey(), from, size-from, firstTail)
	if err != nil {
		return nil, err
	}
	if int64(len(tail)) != size-from {
		return nil, corrupt(pack.packKey(), "it is shorter than it was", nil)
	}
	_, start, err := parseTrailer(pack, size, tail)
	if err != nil {
		return nil, err
	}
	if start < from {
		rest, err := object.ReadAll(ctx, s, pack.packKey(), start, from-start, from-start)
		if err != nil {
			return nil, err
		}
		tail, from = append(rest, tail...), start
	}
	return parseIndex(pack, size, tail[start-from:])
}

// decoder checks chunks against the index of their pack.
type decoder struct {
	z       *zstd.Decoder
	entries map[uint32]packEntry
	buf     []byte
}

func (d *decoder) use(entries []packEntry) (err error) {
	if d.z == nil {
		if d.z, err = newDecoder(); err != nil {
			return err
		}
		d.buf = make([]byte, maxChunk)
	}
	d.entries = make(map[uint32]packEntry, len(entries))
	for _, e := range entries {
		d.entries[e.off] = e
	}
	return nil
}

func (d *decoder) check(pack id, e packEntry, stored []byte) error {
	_, err := unpack(d.z, &mapChunk{digest: e.digest}, int(e.length), place{pack, e.off, e.stored}, stored, d.buf)
	return err
}
