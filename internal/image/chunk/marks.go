package chunk

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"dsec/internal/image/object"
)

// marks is what the roots need.
type marks struct {
	mu    sync.Mutex
	keys  map[string]bool // objects other than packs
	packs map[id]*liveSet
	moved map[id][]*moved // tables of the packs that are needed
}

// liveSet has the chunks of one pack that are needed, as offset<<32 | stored length.
type liveSet struct {
	chunks []uint64
	clean  int // so many are sorted and unique
}

func (l *liveSet) add(off, stored uint32) {
	l.chunks = append(l.chunks, uint64(off)<<32|uint64(stored))
	if len(l.chunks) > 2*l.clean+1024 {
		l.sort()
	}
}

func (l *liveSet) sort() {
	if l.clean == len(l.chunks) {
		return
	}
	slices.Sort(l.chunks)
	l.chunks = slices.Compact(l.chunks)
	l.clean = len(l.chunks)
}

func (l *liveSet) bytes() (n int64) {
	if l == nil {
		return 0
	}
	l.sort()
	for _, c := range l.chunks {
		n += int64(uint32(c))
	}
	return n
}

// mark goes through the maps of all roots. It fails if any cannot be read: what is not
// known to be unneeded stays.
func mark(ctx context.Context, s object.Store, roots []Layer, parallel int) (*marks, error) {
	m := &marks{keys: map[string]bool{}, packs: map[id]*liveSet{}, moved: map[id][]*moved{}}
	var maps []string
	for _, l := range roots {
		if _, err := parseContentKey(metaClass, l.Meta); err != nil {
			return nil, err
		}
		m.keys[l.Meta] = true
		if l.Map != "" && !m.keys[l.Map] {
			m.keys[l.Map] = true
			maps = append(maps, l.Map)
		}
	}
	err := each(ctx, parallel, maps, func(ctx context.Context, name string) error {
		lm, err := LoadMap(ctx, s, name)
		if err != nil {
			return fmt.Errorf("mark what %s needs: %w", name, err)
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		for i := range lm.chunks {
			p := lm.place(i)
			m.live(p.pack).add(p.off, p.stored)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return m, m.follow(ctx, s)
}

func (m *marks) live(p id) *liveSet {
	l := m.packs[p]
	if l == nil {
		l = &liveSet{}
		m.packs[p] = l
	}
	return l
}

// follow marks where needed chunks were moved to, wherever that may be.
func (m *marks) follow(ctx context.Context, s object.Store) error {
	tables := map[id]int{}
	err := s.List(ctx, movedClass, func(i object.Info) error {
		if from, _, ok := parseMovedKey(i.Key); ok {
			tables[from]++
		}
		return nil
	})
	if err != nil {
		return err
	}
	var queue []id
	for p := range m.packs {
		queue = append(queue, p)
	}
	for ; len(queue) > 0; queue = queue[1:] {
		p := queue[0]
		if tables[p] == 0 {
			continue
		}
		if m.moved[p] == nil {
			if m.moved[p], err = loadMoved(ctx, s, p); err != nil {
				return err
			}
		}
		from := m.packs[p]
		from.sort()
		for _, t := range m.moved[p] {
			before, to := -1, (*liveSet)(nil)
			for _, c := range from.chunks {
				if off, ok := t.find(uint32(c >> 32)); ok {
					if to == nil {
						to = m.live(t.to)
						to.sort()
						before = len(to.chunks)
					}
					to.add(off, uint32(c))
				}
			}
			if to == nil {
				continue
			}
			m.keys[t.key()] = true
			if to.sort(); len(to.chunks) > before {
				queue = append(queue, t.to)
			}
		}
	}
	return nil
}

// covered says whether all chunks that are needed of a pack can be found although it
// is not there, given the packs that are.
func (m *marks) covered(p id, present map[id]object.Info) bool {
	l := m.packs[p]
	if l == nil {
		return true
	}
	for _, c := range l.chunks {
		if !m.elsewhere(p, uint32(c>>32), present, 0) {
			return false
		}
	}
	return true
}

func (m *marks) elsewhere(p id, off uint32, present map[id]object.Info, hops int) bool {
	if hops > maxHops {
		return false
	}
	for _, t := range m.moved[p] {
		if at, ok := t.find(off); ok {
			if _, ok := present[t.to]; ok || m.elsewhere(t.to, at, present, hops+1) {
				return true
			}
		}
	}
	return false
}

// needed says whether an object must stay.
func (m *marks) needed(key string, present map[id]object.Info) bool {
	if p, ok := strings.CutPrefix(key, packClass); ok {
		i, ok := parseID(p)
		return !ok || !m.covered(i, present)
	}
	return m.keys[key]
}
