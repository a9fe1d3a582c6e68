package edge

import (
	"cmp"
	"context"
	"sync"
	"time"

	"dsec/aether"
	v1 "dsec/api/v1"
	"dsec/internal/backend"
)

const (
	usageParallel = 4               // sandboxes that are read at once
	usageFresh    = time.Second     // how old a reading of all may be, at least
	usageShare    = 4               // and at least so many times as old as it took to read
	usageTime     = 5 * time.Second // for one reading
)

// usages keeps the last reading of all sandboxes, so that many who look cost one reading.
type usages struct {
	mu   sync.Mutex // held while reading
	last v1.NodeUsage
	till time.Time
}

// serveUsage tells what sandboxes use. It reads counters of the kernel alone: no guest is asked, and
// no paused sandbox wakes.
func (e *Edge) serveUsage(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.EdgeUsage](s)
	if err != nil {
		return nil, err
	}
	if len(req.IDs) > 0 {
		return inParts(ctx, s, e.readUsage(ctx, req.IDs))
	}
	return inParts(ctx, s, e.allUsage(ctx))
}

// allUsage is a reading of all sandboxes that is fresh.
func (e *Edge) allUsage(ctx context.Context) v1.NodeUsage {
	u := &e.usages
	u.mu.Lock()
	defer u.mu.Unlock()
	began := e.cfg.Now()
	if began.Before(u.till) {
		return u.last
	}
	e.mu.Lock()
	ids := make([]string, 0, len(e.sandboxes))
	for id := range e.sandboxes {
		ids = append(ids, id)
	}
	e.mu.Unlock()
	// It is for others, too, whether or not the first of them waits for it.
	u.last = e.readUsage(context.WithoutCancel(ctx), ids)
	now := e.cfg.Now()
	u.till = now.Add(max(usageFresh, usageShare*now.Sub(began)))
	return u.last
}

// readUsage reads what some sandboxes use.
func (e *Edge) readUsage(ctx context.Context, ids []string) v1.NodeUsage {
	ctx, cancel := context.WithTimeout(ctx, usageTime)
	defer cancel()
	has := e.cfg.Largest
	out := v1.NodeUsage{
		Node: e.Node(), At: e.cfg.Now().UTC(), Items: make([]v1.SandboxUsage, len(ids)),
		CPUMillis: cmp.Or(has.CPUMillis, e.cfg.Capacity.CPUMillis), MemoryBytes: cmp.Or(has.MemoryBytes, e.cfg.Capacity.MemoryBytes),
	}
	if e.cfg.BusyTime != nil {
		out.CPUSeconds = e.cfg.BusyTime().Seconds()
	}
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(usageParallel, len(ids)) {
		wg.Go(func() {
			for i := range next {
				out.Items[i] = e.usageOf(ctx, ids[i])
			}
		})
	}
	for i := range ids {
		next <- i
	}
	close(next)
	wg.Wait()
	return out
}

// usageOf reads what one sandbox uses. One that runs nothing, now or yet, has no usage.
func (e *Edge) usageOf(ctx context.Context, id string) v1.SandboxUsage {
	out := v1.SandboxUsage{ID: id}
	s := e.get(id)
	if s == nil {
		out.Error = v1.ProblemOf(e.absent(id))
		return out
	}
	s.mu.Lock()
	v, instance := s.view, s.instance
	s.mu.Unlock()
	out.State = v.State
	if instance == nil {
		return out
	}
	err := ctx.Err()
	if err == nil {
		var u v1.Usage
		if u, err = counters(ctx, instance); err == nil {
			s.fill(&u, e.cfg.Now())
			s.fill(&u, e.cfg.Now())
			out.Usage = &u
			return out
		}
	}
	if s.snapshot().State == v.State { // else it ended meanwhile
		out.Error = v1.ProblemOf(err)
	}
	return out
}

// counters reads what an instance uses, without its disk where that would need a walk over its files.
func counters(ctx context.Context, i backend.Instance) (v1.Usage, error) {
	if c, ok := i.(backend.Counter); ok {
		return c.Counters(ctx)
	}
	return i.Usage(ctx)
}
