package edge

import (
	"sync"

	v1 "dsec/api/v1"
	"dsec/internal/snapshot"
)

// lastPack is what a sandbox's last pack saw and the image that came of it: the next one
// reads only what changed since, and goes on top of it. It is in memory alone: after a
// restart the next pack has all again.
type lastPack struct {
	image v1.Image
	seen  *snapshot.Seen
}

// maxSeen bounds the names that all sandboxes' packs remember together, of about 150 bytes.
const maxSeen = 2_000_000

// memory counts what is remembered.
type memory struct {
	mu   sync.Mutex
	used int
}

// hold takes n names on and gives back what freed were.
func (m *memory) hold(n, freed int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.used -= freed
	if m.used+n > maxSeen {
		return false
	}
	m.used += n
	return true
}

func (l *lastPack) entries() int {
	if l == nil {
		return 0
	}
	return l.seen.Entries()
}

// temporary tells whether an image is a fork's.
func temporary(img *v1.Image) bool { return img.Snapshot != nil && img.Snapshot.Temporary }

// rememberPack keeps what a pack saw for the next one. A fork's image goes with the children, so that
// it takes the place of no other. With the sandbox's token.
func (e *Edge) rememberPack(s *sandbox, l *lastPack) {
	if l != nil && l.entries() > 0 && temporary(&l.image) && s.last != nil && !temporary(&s.last.image) {
		return
	}
	freed := s.last.entries()
	if !e.packMemory.hold(l.entries(), freed) || l.entries() == 0 {
		l = nil
	}
	e.setLast(s, l)
}

// forgetPack is called when no pack can begin any more.
func (e *Edge) forgetPack(s *sandbox) {
	e.packMemory.hold(0, s.last.entries())
	e.setLast(s, nil)
}

func (e *Edge) setLast(s *sandbox, l *lastPack) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s.last = l
}
