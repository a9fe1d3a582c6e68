package chunk

import (
	"container/list"
	"context"
	"encoding/binary"
	"errors"
	"math/bits"
	"strings"
	"sync"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
)

// index finds the packs that may have a chunk. It keeps eight bytes per chunk in
// open-addressed tables: four of the digest and the pack's number; what it finds is
// looked up in the pack's own index, of which it keeps those used last.
type index struct {
	store object.Store
	limit int // chunks

	mu     sync.RWMutex
	packs  []packState
	byID   map[id]uint32
	shards [256]shard
	chunks int // slots in use
	gone   int // of them, those of packs that are gone

	cache packCache
}

type packState struct {
	id     id
	size   int64
	chunks int // slots in use
	gone   bool
}

// shard has a power of two of slots, found by the high bits of a fingerprint.
type shard struct {
	slots []slot
	used  int
}

// slot is free if pack is 0; else the pack's number is one less.
type slot struct{ print, pack uint32 }

func newIndex(s object.Store, bytes int64) *index {
	return &index{
		store: s,
		limit: int(bytes / 18), // tables are 7/16 full at least
		byID:  map[id]uint32{},
		cache: packCache{max: 1 << 20, byID: map[id]*list.Element{}},
	}
}

func fingerprint(d digest) (sh int, print uint32) {
	return int(d[0]), binary.LittleEndian.Uint32(d[1:])
}

func (s *shard) start(print uint32) int {
	return int(print >> (33 - bits.Len(uint(len(s.slots)))))
}

// add enters a slot unless the same one is there.
func (s *shard) add(v slot) bool {
	if len(s.slots) == 0 {
		s.slots = make([]slot, 16)
	}
	if s.used*8 >= len(s.slots)*7 {
		old := s.slots
		s.slots, s.used = make([]slot, 2*len(old)), 0
		for _, o := range old {
			if o.pack != 0 {
				s.add(o)
			}
		}
	}
	for i := s.start(v.print); ; i = (i + 1) & (len(s.slots) - 1) {
		switch s.slots[i] {
		case v:
			return false
		case slot{}:
			s.slots[i] = v
			s.used++
			return true
		}
	}
}

// addPack makes a pack's chunks findable. Past the limit they are not.
func (x *index) addPack(pack id, size int64, entries []packEntry) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if _, ok := x.byID[pack]; ok {
		return
	}
	n := uint32(len(x.packs))
	x.packs = append(x.packs, packState{id: pack, size: size})
	x.byID[pack] = n
	if x.chunks+len(entries) > x.limit {
		return
	}
	for _, e := range entries {
		sh, print := fingerprint(e.digest)
		if x.shards[sh].add(slot{print, n + 1}) {
			x.chunks++
			x.packs[n].chunks++
		}
	}
}

// drop forgets a pack that is no longer in the store.
func (x *index) drop(pack id) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if n, ok := x.byID[pack]; ok {
		x.packs[n].gone = true
		delete(x.byID, pack)
		if x.gone += x.packs[n].chunks; x.gone > 4096 && x.gone > x.chunks/4 {
			x.compact()
		}
	}
}

// compact takes out the slots of packs that are gone.
func (x *index) compact() {
	x.chunks, x.gone = 0, 0
	for i := range x.shards {
		old := x.shards[i].slots
		x.shards[i] = shard{}
		for _, o := range old {
			if o.pack != 0 && !x.packs[o.pack-1].gone && x.shards[i].add(o) {
				x.chunks++
			}
		}
	}
}

func (x *index) candidates(d digest, buf []packState) []packState {
	x.mu.RLock()
	defer x.mu.RUnlock()
	sh, print := fingerprint(d)
	s := &x.shards[sh]
	if len(s.slots) == 0 {
		return buf
	}
	for i := s.start(print); s.slots[i] != (slot{}); i = (i + 1) & (len(s.slots) - 1) {
		if v := s.slots[i]; v.print == print {
			if p := x.packs[v.pack-1]; !p.gone {
				buf = append(buf, p)
			}
		}
	}
	return buf
}

// find returns where a chunk is, in a pack for which usable is true.
func (x *index) find(ctx context.Context, d digest, usable func(context.Context, id) (bool, error)) (place, bool, error) {
	var buf [4]packState
	for _, p := range x.candidates(d, buf[:0]) {
		ok, err := usable(ctx, p.id)
		if err != nil {
			return place{}, false, err
		}
		if !ok {
			continue
		}
		m, err := x.pack(ctx, p)
		if errors.Is(err, errs.ObjectNotFound) || errors.Is(err, errs.StoreCorrupt) {
			x.drop(p.id) // what it has is stored again
			continue
		}
		if err != nil {
			return place{}, false, err
		}
		if e, ok := m[d]; ok {
			return place{pack: p.id, off: e.off, stored: e.stored}, true, nil
		}
	}
	return place{}, false, nil
}

type packMap map[digest]packEntry

func (x *index) pack(ctx context.Context, p packState) (packMap, error) {
	if m, ok := x.cache.get(p.id); ok {
		return m, nil
	}
	entries, err := loadIndex(ctx, x.store, p.id, p.size)
	if err != nil {
		return nil, err
	}
	return x.cache.put(p.id, entries), nil
}

// refresh makes the index know the packs that are in the store: it reads the indexes
// of those that it does not know yet.
func (x *index) refresh(ctx context.Context, parallel int) error {
	var fresh []packState
	seen := map[id]bool{}
	x.mu.RLock()
	known := make([]id, 0, len(x.byID)) // before listing: a pack put meanwhile is not missed in it
	for p := range x.byID {
		known = append(known, p)
	}
	x.mu.RUnlock()
	err := x.store.List(ctx, packClass, func(i object.Info) error {
		p, ok := parseID(strings.TrimPrefix(i.Key, packClass))
		if !ok {
			return nil
		}
		seen[p] = true
		x.mu.RLock()
		_, ok = x.byID[p]
		x.mu.RUnlock()
		if !ok {
			fresh = append(fresh, packState{id: p, size: i.Size})
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, p := range known {
		if !seen[p] {
			x.drop(p)
		}
	}
	return each(ctx, parallel, fresh, func(ctx context.Context, p packState) error {
		entries, err := loadIndex(ctx, x.store, p.id, p.size)
		if errors.Is(err, errs.ObjectNotFound) || errors.Is(err, errs.StoreCorrupt) {
			return nil // deleted meanwhile; or nothing of it is used
		}
		if err != nil {
			return err
		}
		x.addPack(p.id, p.size, entries)
		return nil
	})
}

// packCache keeps the indexes of the packs used last, up to max chunks in all.
type packCache struct {
	mu     sync.Mutex
	max    int
	chunks int
	order  list.List // of *cached, the one used last in front
	byID   map[id]*list.Element
}

type cached struct {
	id id
	m  packMap
}

func (c *packCache) get(p id) (packMap, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.byID[p]
	if !ok {
		return nil, false
	}
	c.order.MoveToFront(e)
	return e.Value.(*cached).m, true
}

func (c *packCache) put(p id, entries []packEntry) packMap {
	m := make(packMap, len(entries))
	for _, e := range entries {
		m[e.digest] = e
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.byID[p]; ok {
		return e.Value.(*cached).m
	}
	c.byID[p] = c.order.PushFront(&cached{p, m})
	c.chunks += len(m)
	for c.chunks > c.max && c.order.Len() > 1 {
		e := c.order.Back()
		old := c.order.Remove(e).(*cached)
		delete(c.byID, old.id)
		c.chunks -= len(old.m)
	}
	return m
}
