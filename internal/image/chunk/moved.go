package chunk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"sort"
	"strings"

	"dsec/internal/image/object"
)

// When a collector has copied what is needed of a pack to another, an object
// moved/FROM.TO says where each chunk went, so that maps, which never change, stay
// right after FROM is deleted:
//
//	"DSECMOVE" version(1) 0(7) from(16) to(16)
//	chunks   per chunk, ordered: offset in FROM(4), offset in TO(4)
//	SHA-256(32) of all before it
//
// There may be several of one pack: chunks went to several packs, or two collectors
// did the same; one whose TO is gone means nothing.
const (
	movedMagic   = "DSECMOVE"
	movedVersion = 1
	movedHeader  = 48

	maxMoved = 64 << 20
	maxHops  = 64 // a chunk that has moved so often is in a circle
)

type moved struct {
	from, to id
	offs     [][2]uint32
}

func movedPrefix(from id) string { return movedClass + from.String() + "." }

func (m *moved) key() string { return movedPrefix(m.from) + m.to.String() }

func parseMovedKey(key string) (from, to id, ok bool) {
	f, t, dot := strings.Cut(strings.TrimPrefix(key, movedClass), ".")
	from, ok1 := parseID(f)
	to, ok2 := parseID(t)
	return from, to, dot && ok1 && ok2
}

func (m *moved) encode() []byte {
	b := make([]byte, movedHeader, movedHeader+8*len(m.offs)+sha256.Size)
	copy(b, movedMagic)
	b[8] = movedVersion
	copy(b[16:], m.from[:])
	copy(b[32:], m.to[:])
	for _, o := range m.offs {
		b = binary.LittleEndian.AppendUint32(b, o[0])
		b = binary.LittleEndian.AppendUint32(b, o[1])
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

func parseMoved(key string, b []byte) (*moved, error) {
	from, to, ok := parseMovedKey(key)
	n := len(b) - movedHeader - sha256.Size
	if !ok || n < 0 || n%8 != 0 {
		return nil, corrupt(key, "it is no table of moved chunks", nil)
	}
	body := b[:len(b)-sha256.Size]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:], b[len(body):]) {
		return nil, corrupt(key, "its checksum is wrong", nil)
	}
	m := &moved{from: from, to: to, offs: make([][2]uint32, n/8)}
	head := (&moved{from: from, to: to}).encode()[:movedHeader]
	if !bytes.Equal(head, b[:movedHeader]) {
		return nil, corrupt(key, "its header is wrong", nil)
	}
	for i := range m.offs {
		m.offs[i] = [2]uint32{binary.LittleEndian.Uint32(b[movedHeader+8*i:]), binary.LittleEndian.Uint32(b[movedHeader+8*i+4:])}
		if i > 0 && m.offs[i][0] <= m.offs[i-1][0] || m.offs[i][1] < headerLen {
			return nil, corrupt(key, "it is not ordered", nil)
		}
	}
	return m, nil
}

func (m *moved) find(off uint32) (uint32, bool) {
	i := sort.Search(len(m.offs), func(i int) bool { return m.offs[i][0] >= off })
	if i == len(m.offs) || m.offs[i][0] != off {
		return 0, false
	}
	return m.offs[i][1], true
}

// loadMoved reads where the chunks of a pack went.
func loadMoved(ctx context.Context, s object.Store, from id) ([]*moved, error) {
	var keys []string
	err := s.List(ctx, movedPrefix(from), func(i object.Info) error {
		if _, _, ok := parseMovedKey(i.Key); ok {
			keys = append(keys, i.Key)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	sort.Strings(keys)
	var all []*moved
	for _, k := range keys {
		var m *moved
		_, err := readTwice(ctx, s, k, maxMoved, func(b []byte) (err error) {
			m, err = parseMoved(k, b)
			return err
		})
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}
