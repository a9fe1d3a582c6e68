package chunk

import "sync"

// Damage is what Readers found damaged, for Writers not to rely on: what is put again is
// then stored again. It lasts as long as the process; a pack that another process found
// damaged is found once more when it is read. It is safe for concurrent use, and nil
// remembers nothing.
type Damage struct {
	mu    sync.Mutex
	packs map[id]struct{} // a pack stays; there are few, of 16 bytes
}

func (d *Damage) note(p id) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.packs == nil {
		d.packs = map[id]struct{}{}
	}
	d.packs[p] = struct{}{}
}

func (d *Damage) has(p id) bool {
	if d == nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	_, ok := d.packs[p]
	return ok
}
