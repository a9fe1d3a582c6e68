package lazy

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"sort"

	"dsec/api/v1/errs"
)

const (
	phase     = "image.lazy"
	maxChunks = 1 << 26
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// bitmap has one bit per chunk.
type bitmap []byte

func newBitmap(n int) bitmap { return make(bitmap, (n+7)/8) }

func (m bitmap) has(i int) bool { return m[i/8]&(1<<(i%8)) != 0 }
func (m bitmap) set(i int)      { m[i/8] |= 1 << (i % 8) }
func (m bitmap) clear(i int)    { m[i/8] &^= 1 << (i % 8) }

// table says how a blob is cut into chunks: chunk i is [bounds[i], bounds[i+1]).
type table struct {
	bounds []int64
	hole   bitmap
	sum    uint32 // of the encoding: saved states name it
}

func (t *table) n() int           { return len(t.bounds) - 1 }
func (t *table) size() int64      { return t.bounds[t.n()] }
func (t *table) len(i int) int64  { return t.bounds[i+1] - t.bounds[i] }
func (t *table) is(o *table) bool { return t.sum == o.sum && t.n() == o.n() && t.size() == o.size() }

// chunks returns the chunks [i, j) that cover n bytes from off, clipped to the blob.
func (t *table) chunks(off, n int64) (i, j int) {
	end := off + n
	if off < 0 || end < off || end > t.size() {
		end = t.size()
	}
	off = max(off, 0)
	if off >= end {
		return 0, 0
	}
	i = sort.Search(t.n(), func(k int) bool { return t.bounds[k+1] > off })
	j = i + sort.Search(t.n()-i, func(k int) bool { return t.bounds[i+k] >= end })
	return i, j
}

// newTable takes a filler's chunks and checks them.
func newTable(f Filler, size int64) (*table, error) {
	b := f.Bounds()
	n := len(b) - 1
	if n < 1 || n > maxChunks || b[0] != 0 || b[n] != size {
		return nil, errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("%d chunk boundaries do not cut a blob of %d bytes", len(b), size))
	}
	t := &table{bounds: b, hole: newBitmap(n)}
	for i := range n {
		if b[i+1] <= b[i] {
			return nil, errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("chunk %d ends at %d and begins at %d", i, b[i+1], b[i]))
		}
		if f.Hole(i) {
			t.hole.set(i)
		}
	}
	t.encode()
	return t, nil
}

const tableMagic = "DSECchk1"

func (t *table) encode() []byte {
	p := append(make([]byte, 0, 32+3*t.n()), tableMagic...)
	p = binary.AppendUvarint(p, uint64(t.size()))
	p = binary.AppendUvarint(p, uint64(t.n()))
	for i := range t.n() {
		v := uint64(t.len(i)) << 1
		if t.hole.has(i) {
			v |= 1
		}
		p = binary.AppendUvarint(p, v)
	}
	t.sum = crc32.Checksum(p, castagnoli)
	return binary.LittleEndian.AppendUint32(p, t.sum)
}

func badState(what string) error {
	return errs.New(errs.ImageCorrupt, phase, "saved state: "+what)
}

func decodeTable(p []byte) (*table, error) {
	if len(p) < len(tableMagic)+4 || string(p[:len(tableMagic)]) != tableMagic {
		return nil, badState("no chunk table")
	}
	sum := binary.LittleEndian.Uint32(p[len(p)-4:])
	p = p[:len(p)-4]
	if crc32.Checksum(p, castagnoli) != sum {
		return nil, badState("chunk table damaged")
	}
	p = p[len(tableMagic):]
	next := func() (uint64, bool) {
		v, k := binary.Uvarint(p)
		if k <= 0 {
			return 0, false
		}
		p = p[k:]
		return v, true
	}
	size, ok1 := next()
	n, ok2 := next()
	if !ok1 || !ok2 || n < 1 || n > uint64(len(p)) || n > maxChunks || size > 1<<62 {
		return nil, badState("chunk table of impossible size")
	}
	t := &table{bounds: make([]int64, 1, n+1), hole: newBitmap(int(n)), sum: sum}
	end := uint64(0)
	for i := range int(n) {
		v, ok := next()
		if !ok || v>>1 == 0 || v>>1 > size-end {
			return nil, badState("chunk of impossible length")
		}
		end += v >> 1
		t.bounds = append(t.bounds, int64(end))
		if v&1 != 0 {
			t.hole.set(i)
		}
	}
	if end != size || len(p) != 0 {
		return nil, badState("chunks do not cover the blob")
	}
	return t, nil
}
