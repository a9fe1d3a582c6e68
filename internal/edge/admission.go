package edge

import (
	"fmt"
	"strconv"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/edge/pressure"
)

// retryFull is when a full node may have room again: sandboxes come and go in seconds.
const retryFull = time.Second

// admission counts what sandboxes were promised. It is the last word on whether a
// sandbox fits; placement elsewhere only guesses.
type admission struct {
	capacity v1.Resources
	largest  v1.Resources // of one sandbox; 0: as capacity
	reserve  Reserve
	free     func() (disk, memory int64)
	level    func() pressure.Level                  // nil: none
	other    func() (resource, text, advice string) // Config.Shortage
	now      func() time.Time

	mu       sync.Mutex
	used     v1.Resources
	best     v1.Resources // of used, without slots, what best-effort sandboxes have
	checked  time.Time    // when free was read: not on every create
	disk     int64
	memory   int64
	shortage *errs.Error // of what was read
}

const freeEvery = 100 * time.Millisecond

func shareOf(s *v1.Spec) share { return share{need: demand(s), best: s.QoS == v1.QoSBest} }

func demand(s *v1.Spec) v1.Resources {
	return v1.Resources{Slots: 1, CPUMillis: s.CPUMillis, MemoryBytes: s.MemoryBytes}
}

// share is what one sandbox counts for. A paused one keeps its slot and gives back the rest.
type share struct {
	need       v1.Resources
	best       bool // it is a best-effort one
	slot, rest bool // which of need is counted; with admission.mu
}

// take admits one sandbox or says which resource is short.
func (a *admission) take(s *share) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.fits(s.need, true); err != nil {
		return err
	}
	a.look()
	if a.shortage != nil {
		return a.shortage
	}
	a.count(s, true, true)
	return nil
}

// rejoin admits a paused sandbox that is to run again. One that has been removed meanwhile counts no more.
func (a *admission) rejoin(s *share) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !s.slot || s.rest {
		return nil
	}
	if err := a.fits(s.need, false); err != nil {
		return err
	}
	a.look()
	if a.memory < a.reserve.MemoryBytes { // it needs no disk
		return a.shortage
	}
	a.count(s, true, true)
	return nil
}

// fits says which resource is short for want. With mu held.
func (a *admission) fits(want v1.Resources, slot bool) error {
	for _, r := range []struct {
		name                      string
		used, want, room, largest int64
	}{
		{"slots", a.used.Slots, want.Slots, a.capacity.Slots, a.largest.Slots},
		{"cpu_millis", a.used.CPUMillis, want.CPUMillis, a.capacity.CPUMillis, a.largest.CPUMillis},
		{"memory_bytes", a.used.MemoryBytes, want.MemoryBytes, a.capacity.MemoryBytes, a.largest.MemoryBytes},
	} {
		if r.name == "slots" && !slot {
			continue
		}
		largest := r.room
		if r.largest > 0 {
			largest = min(largest, r.largest)
		}
		if r.want > largest { // placement says so already, unless it has not heard of our capacity
			return errs.New(errs.SpecTooLarge, "edge.admit", fmt.Sprintf("%s: %d are asked for, and one sandbox of the node has at most %d", r.name, r.want, largest)).
				With("resource", r.name).With("largest", strconv.FormatInt(largest, 10))
		}
		if r.used+r.want > r.room {
			return full(r.name, fmt.Sprintf("%d of %d are taken and %d are asked for", r.used, r.room, r.want))
		}
	}
	return nil
}

// look reads what is free, unless it did so a moment ago. With mu held.
func (a *admission) look() {
	now := a.now()
	if now.Sub(a.checked) < freeEvery {
		return
	}
	a.checked = now
	a.disk, a.memory = a.free()
	a.shortage = nil
	level := pressure.None
	if a.level != nil {
		level = a.level()
	}
	switch {
	case level > pressure.None:
		a.shortage = full("memory_pressure", fmt.Sprintf("the node is short of memory, or was a moment ago: %d MiB are free and it keeps %d", a.memory>>20, a.reserve.MemoryBytes>>20)).
			With("pressure", level.String())
	case a.memory < a.reserve.MemoryBytes:
		a.shortage = full("free_memory", fmt.Sprintf("%d MiB are free and the node keeps %d", a.memory>>20, a.reserve.MemoryBytes>>20))
	case a.disk < a.reserve.DiskBytes:
		a.shortage = full("free_disk", fmt.Sprintf("%d MiB are free and the node keeps %d", a.disk>>20, a.reserve.DiskBytes>>20))
	case a.other != nil:
		if resource, text, advice := a.other(); resource != "" {
			a.shortage = full(resource, text).Advise(advice)
		}
	}
}

// freeSpace is what was free a moment ago.
func (a *admission) freeSpace() (disk, memory int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.look()
	return a.disk, a.memory
}

func full(resource, text string) *errs.Error {
	return errs.New(errs.NodeFull, "edge.admit", "the node is full: "+resource+": "+text).With("resource", resource).
		With("retry_after_ms", strconv.FormatInt(retryFull.Milliseconds(), 10)).After(retryFull)
}

// force counts a sandbox that already runs, or stands still.
func (a *admission) force(s *share, paused bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count(s, true, !paused)
}

// rest gives back what a paused sandbox does not need.
func (a *admission) rest(s *share) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count(s, s.slot, false)
}

// put gives back all: a dead sandbox no longer counts, though its record stays until it is removed.
func (a *admission) put(s *share) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count(s, false, false)
}

// count makes a share count as told, whatever it counted before. With mu held.
func (a *admission) count(s *share, slot, rest bool) {
	if slot != s.slot {
		sign := int64(1)
		if !slot {
			sign = -1
		}
		a.used.Slots += sign * s.need.Slots
	}
	if rest != s.rest {
		sign := int64(1)
		if !rest {
			sign = -1
		}
		a.used.CPUMillis += sign * s.need.CPUMillis
		a.used.MemoryBytes += sign * s.need.MemoryBytes
		if s.best {
			a.best.CPUMillis += sign * s.need.CPUMillis
			a.best.MemoryBytes += sign * s.need.MemoryBytes
		}
	}
	s.slot, s.rest = slot, rest
}

func (a *admission) bestEffort() v1.Resources {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.best
}

func (a *admission) allocated() v1.Resources {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used
}
