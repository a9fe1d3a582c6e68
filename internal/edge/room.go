package edge

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

const (
	// roomEvery is how often it is looked for what would free room, however many do not fit.
	roomEvery = time.Second
	// roomNames are at most named.
	roomNames = 8
)

// room is what would make room: running sandboxes that nobody uses, best-effort ones and then
// those that are idle for longest first.
type room struct {
	mu    sync.Mutex
	at    time.Time
	ids   []string
	count int
	sum   v1.Resources
}

// inItsPlace adds to the refusal of a resume what would free room for it.
func (e *Edge) inItsPlace(err error) error {
	if !errors.Is(err, errs.NodeFull) {
		return err
	}
	ids, count, sum := e.idlers()
	best := e.admit.bestEffort()
	x := *errs.Of(err)
	x.Details = nil
	for k, v := range errs.Of(err).Details {
		x.With(k, v)
	}
	bytes := func(n int64) string { return strconv.FormatInt(n, 10) }
	x.With("idle_sandboxes", strconv.Itoa(count)).With("idle_cpu_millis", bytes(sum.CPUMillis)).With("idle_memory_bytes", bytes(sum.MemoryBytes)).
		With("be_cpu_millis", bytes(best.CPUMillis)).With("be_memory_bytes", bytes(best.MemoryBytes))
	x.Message += fmt.Sprintf("; the sandbox stays paused. Running sandboxes that nobody uses hold %d thousandths of a core and %d MiB", sum.CPUMillis, sum.MemoryBytes>>20)
	if len(ids) > 0 {
		list := strings.Join(ids, " ")
		x.With("idle", list)
		x.Message += ", which pausing or removing them frees: " + list
		if count > len(ids) {
			x.Message += fmt.Sprintf(" and %d more", count-len(ids))
		}
	}
	return &x
}

// idlers returns the first of the running sandboxes that nobody uses, and what all of them count for,
// as it was a moment ago.
func (e *Edge) idlers() (ids []string, count int, sum v1.Resources) {
	r := &e.room
	r.mu.Lock()
	defer r.mu.Unlock()
	now := e.cfg.Now()
	if !r.at.IsZero() && now.Sub(r.at) < roomEvery {
		return r.ids, r.count, r.sum
	}
	type idler struct {
		id   string
		best bool
		last time.Time
	}
	var all []idler
	r.at, r.sum = now, v1.Resources{}
	e.mu.Lock()
	for id, s := range e.sandboxes {
		if seen := s.seen(); s.awake.Load() && seen.open == 0 {
			all = append(all, idler{id, s.share.best, seen.last})
			r.sum.CPUMillis += s.share.need.CPUMillis
			r.sum.MemoryBytes += s.share.need.MemoryBytes
		}
	}
	e.mu.Unlock()
	slices.SortFunc(all, func(a, b idler) int {
		if a.best != b.best {
			if a.best {
				return -1
			}
			return 1
		}
		return cmp.Or(a.last.Compare(b.last), cmp.Compare(a.id, b.id))
	})
	r.ids, r.count = nil, len(all)
	for _, i := range all[:min(len(all), roomNames)] {
		r.ids = append(r.ids, i.id)
	}
	return r.ids, r.count, r.sum
}
