package lazy

import (
	"errors"
	"os"
	"sort"
	"time"

	"golang.org/x/sys/unix"
)

// trim evicts until the cache is down to target bytes, or nothing more can go:
// first whole blobs that no one has open, the longest unused first, then cold
// chunks of those that are.
func (c *Cache) trim(target int64) {
	c.trimMu.Lock()
	defer c.trimMu.Unlock()
	type cand struct {
		b    *blob
		used time.Time
	}
	var idle []cand
	c.mu.Lock()
	for _, b := range c.blobs {
		if b.refs == 0 {
			b.mu.Lock()
			idle = append(idle, cand{b, b.used})
			b.mu.Unlock()
		}
	}
	c.mu.Unlock()
	sort.Slice(idle, func(i, j int) bool { return idle[i].used.Before(idle[j].used) })
	for _, x := range idle {
		if c.used.Load() <= target {
			return
		}
		c.remove(x.b)
	}
	c.trimCold(target)
}

// remove removes a whole blob if it is neither wanted nor open.
func (c *Cache) remove(b *blob) bool {
	b.op.Lock()
	defer b.op.Unlock()
	if b.gone || b.st == nil || b.broken || b.dev != nil && b.dev.mounted() {
		return false
	}
	data := b.data
	if data == nil {
		f, err := os.OpenFile(b.file(), os.O_RDWR, 0)
		if err != nil {
			return false
		}
		defer f.Close()
		data = f
	}
	release, ok := lease(data)
	if !ok {
		return false
	}
	defer release()
	c.mu.Lock()
	if b.refs > 0 {
		c.mu.Unlock()
		return false
	}
	c.mu.Unlock()
	b.gone = true // who comes from here on waits for b.op and makes it anew
	b.mu.Lock()
	n := b.bytes
	b.mu.Unlock()
	if b.dev != nil {
		c.release(b, true)
	}
	// The claims go first: half a removal claims nothing.
	for _, name := range []string{safeFile, liveFile, tableFile} {
		os.Remove(b.dir + "/" + name)
	}
	if err := os.RemoveAll(b.dir); err != nil {
		c.log.Warn("evicted blob not removed", "blob", b.digest, "error", err)
	}
	c.shrink(b)
	b.stats.evicted.Add(n)
	c.evicted.Add(n)
	counts := b.counts()
	c.mu.Lock()
	delete(c.blobs, b.digest)
	c.gone.add(counts)
	c.mu.Unlock()
	return true
}

// shrink takes b's bytes off the cache's count and closes its files.
func (c *Cache) shrink(b *blob) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c.used.Add(-b.bytes)
	b.bytes = 0
	if b.st != nil && b.st.live != nil {
		b.st.live.Close()
	}
	if b.data != nil {
		b.data.Close()
		b.data = nil
	}
}

// trimCold punches out chunks of open blobs, the coldest first, if they have been
// cold for long.
func (c *Cache) trimCold(target int64) {
	type cold struct {
		b    *blob
		k    int
		when uint32
	}
	var list []cold
	now := c.seconds()
	minAge := uint32(c.opts.ColdAfter / time.Second)
	if now < minAge {
		return
	}
	c.mu.Lock()
	blobs := make([]*blob, 0, len(c.blobs))
	for _, b := range c.blobs {
		blobs = append(blobs, b)
	}
	c.mu.Unlock()
	for _, b := range blobs {
		b.mu.Lock()
		if b.dev != nil && !b.unsure {
			for k := range b.chunk {
				if b.chunk[k] == filled && !b.t.hole.has(k) && b.touched[k] <= now-minAge {
					list = append(list, cold{b, k, b.touched[k]})
				}
			}
		}
		b.mu.Unlock()
	}
	sort.SliceStable(list, func(i, j int) bool { return list[i].when < list[j].when })
	for len(list) > 0 && c.used.Load() > target && c.ctx.Err() == nil {
		// One blob's chunks at a time, as many as are needed.
		b, need := list[0].b, c.used.Load()-target
		var mine []int
		rest := list[:0]
		for _, x := range list {
			if x.b == b && need > 0 {
				mine = append(mine, x.k)
				need -= b.t.len(x.k)
			} else {
				rest = append(rest, x)
			}
		}
		list = rest
		sort.Ints(mine)
		if err := b.evict(mine); err != nil {
			c.log.Warn("chunks not evicted", "blob", b.digest, "error", err)
		}
	}
}

// evict punches out chunks of a blob that may be read at the same time; doc.go
// says why no reader sees the holes.
func (b *blob) evict(chunks []int) error {
	b.op.Lock()
	defer b.op.Unlock()
	if b.gone || b.dev == nil {
		return nil
	}
	b.st.mu.Lock()
	out := b.withdraw(chunks)
	var err error
	claimed := false
	safe := append(bitmap(nil), b.st.safe...)
	for _, k := range out {
		claimed = claimed || safe.has(k)
		safe.clear(k)
	}
	if claimed {
		err = b.st.writeSafe(safe)
	}
	b.st.mu.Unlock()

	var freed int64
	for x := 0; x < len(out) && err == nil; {
		y := x + 1
		for y < len(out) && out[y] == out[y-1]+1 {
			y++
		}
		off := b.t.bounds[out[x]]
		n := b.t.bounds[out[y-1]+1] - off
		if err = unix.Fallocate(int(b.data.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n); err == nil {
			freed += n
		}
		x = y
	}
	b.mu.Lock()
	for _, k := range out {
		// Not claimed any more, whatever became of the bytes.
		b.chunk[k] = missing
		b.bytes -= b.t.len(k)
		b.c.used.Add(-b.t.len(k))
		close(b.wake[k])
		delete(b.wake, k)
	}
	b.mu.Unlock()
	b.stats.evicted.Add(freed)
	b.c.evicted.Add(freed)
	return diskError("evict chunks", err)
}

// withdraw takes from readers those of the chunks that no one reads, and takes
// back the claim that they are filled.
func (b *blob) withdraw(chunks []int) []int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.unsure {
		return nil
	}
	for key := range b.pins {
		if threadGone(key) {
			delete(b.pins, key)
			b.dev.unpinned(key)
		}
	}
	held := newBitmap(b.t.n())
	for _, s := range b.pins {
		for k := s.i; k < s.j; k++ {
			held.set(k)
		}
	}
	var out []int
	for _, k := range chunks {
		if b.chunk[k] == filled && !held.has(k) && !b.t.hole.has(k) {
			b.have.clear(k)
			out = append(out, k)
		}
	}
	for x, k := range out {
		if err := b.st.note(b.have, k, k+1); err != nil {
			for _, k := range out[x:] {
				b.have.set(k)
			}
			out = out[:x]
			break
		}
		b.chunk[k] = evicting
		b.left++
		b.wake[k] = make(chan struct{})
	}
	return out
}

// threadGone says whether a pin's reader, a thread, has ended. Keys of FUSE
// requests are never threads.
func threadGone(key uint64) bool {
	return key < 1<<32 && errors.Is(unix.Kill(int(key), 0), unix.ESRCH)
}
