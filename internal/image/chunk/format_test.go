package chunk

import (
	"bytes"
	"errors"
	"testing"

	"dsec/api/v1/errs"
)

func seedMap() *Map {
	b := newMapBuilder(1 << 20)
	b.add(0, 32<<10, digest{1}, place{id{1}, headerLen, 20_000})
	b.add(32<<10, 64<<10, digest{2}, place{id{1}, headerLen + 20_000, 64 << 10})
	b.add(512<<10, 256<<10, digest{3}, place{id{2}, 5000, 100})
	b.add(768<<10, 256<<10, digest{1}, place{id{1}, headerLen, 7})
	return &b.m
}

func wantCorrupt(t *testing.T, err error) {
	if err != nil && !errors.Is(err, errs.StoreCorrupt) {
		t.Fatalf("damage is typed as %v", err)
	}
}

func TestMapCodec(t *testing.T) {
	t.Parallel()
	m := seedMap()
	b := m.encode()
	got, err := parseMap("map/x", b)
	if err != nil || !bytes.Equal(got.encode(), b) || got.Len() != 4 || got.Chunk(2) != m.Chunk(2) {
		t.Fatalf("%+v, %v", got, err)
	}
	for i := range b {
		c := bytes.Clone(b)
		c[i] ^= 4
		if _, err := parseMap("map/x", c); !errors.Is(err, errs.StoreCorrupt) {
			t.Errorf("byte %d: %v", i, err)
		}
		if _, err := parseMap("map/x", b[:i]); !errors.Is(err, errs.StoreCorrupt) {
			t.Errorf("cut at %d: %v", i, err)
		}
	}
	if i, j := m.Range(100<<10, 300<<10); i != 2 || j != 2 {
		t.Errorf("a range in a hole: %d to %d", i, j)
	}
	if i, j := m.Range(100<<10, 500<<10); i != 2 || j != 3 {
		t.Errorf("a range out of a hole: %d to %d", i, j)
	}
	if i, j := m.Range(1<<20, 1); i != 4 || j != 4 {
		t.Errorf("a range beyond the end: %d to %d", i, j)
	}
}

// resum makes the checksum right, so that fuzzing gets behind it.
func resum(b []byte) []byte {
	if len(b) < 32 {
		return b
	}
	return append(bytes.Clone(b[:len(b)-32]), sum256(b[:len(b)-32])...)
}

func FuzzParseMap(f *testing.F) {
	f.Add(seedMap().encode())
	f.Add((&Map{}).encode())
	f.Add([]byte(mapMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, b := range [][]byte{b, resum(b)} {
			m, err := parseMap("map/x", b)
			wantCorrupt(t, err)
			if err != nil {
				continue
			}
			if !bytes.Equal(m.encode(), b) {
				t.Fatal("a map has two encodings")
			}
			end := int64(0)
			for i := range m.Len() {
				c, p := m.Chunk(i), m.place(i)
				if c.Off < end || c.Len <= 0 || c.Len > maxChunk || c.Stored <= 0 || c.Stored > c.Len || p.off < headerLen {
					t.Fatalf("impossible chunk %+v", c)
				}
				end = c.Off + int64(c.Len)
			}
			if end > m.Size() {
				t.Fatal("chunks beyond the end")
			}
		}
	})
}

func FuzzParseIndex(f *testing.F) {
	p := newPack(id{7}, nil)
	p.add(digest{1}, make([]byte, 100), 4096)
	p.add(digest{2}, make([]byte, 4096), 4096)
	f.Add(p.finish())
	f.Add(newPack(id{7}, nil).finish())
	f.Fuzz(func(t *testing.T, b []byte) {
		_, start, err := parseTrailer(id{7}, int64(len(b)), b)
		wantCorrupt(t, err)
		if err != nil {
			return
		}
		tail := bytes.Clone(b[start:])
		for range 2 {
			entries, err := parseIndex(id{7}, int64(len(b)), tail)
			wantCorrupt(t, err)
			if err == nil {
				for _, e := range entries {
					if int64(e.off)+int64(e.stored) > start || e.off < headerLen {
						t.Fatalf("impossible chunk %+v", e)
					}
				}
			}
			n := len(tail) - trailerLen
			sum := indexSum(id{7}, tail[:n], tail[n:n+24])
			copy(tail[n+24:], sum[:])
		}
	})
}

func FuzzParseMoved(f *testing.F) {
	m := &moved{from: id{1}, to: id{2}, offs: [][2]uint32{{32, 32}, {500, 70}}}
	f.Add(m.encode())
	f.Add([]byte{})
	key := m.key()
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, b := range [][]byte{b, resum(b)} {
			m, err := parseMoved(key, b)
			wantCorrupt(t, err)
			if err != nil {
				continue
			}
			if !bytes.Equal(m.encode(), b) {
				t.Fatal("a table has two encodings")
			}
			for _, o := range m.offs {
				if to, ok := m.find(o[0]); !ok || to != o[1] {
					t.Fatalf("%v is not found", o)
				}
			}
		}
	})
}

func FuzzParseCondemnation(f *testing.F) {
	b := []byte(`{"keys":["pack/00"],"leases":["x"]}`)
	f.Add(append(b, sum256(b)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, b := range [][]byte{b, resum(b)} {
			c, err := parseCondemnation("condemned/x.1", b)
			wantCorrupt(t, err)
			if err == nil && c == nil {
				t.Fatal("nothing")
			}
		}
	})
}

func FuzzParseNames(f *testing.F) {
	f.Add(contentKey(mapClass, digest{1}, id{2}))
	f.Add((&moved{from: id{1}, to: id{2}}).key())
	f.Add("map/")
	f.Fuzz(func(t *testing.T, key string) {
		if d, err := parseContentKey(mapClass, key); err == nil && key[:len(contentPrefix(mapClass, d))] != contentPrefix(mapClass, d) {
			t.Fatalf("%q is read as %x", key, d)
		}
		if from, to, ok := parseMovedKey(key); ok && (&moved{from: from, to: to}).key() != key && movedClass+key != (&moved{from: from, to: to}).key() {
			t.Fatalf("%q is read as %v, %v", key, from, to)
		}
	})
}
