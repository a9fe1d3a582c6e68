package container

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/backend/container/pages"
	"dsec/internal/snapshot/freeze"
)

// Swap says where the memory of paused sandboxes goes (package swap).
type Swap interface {
	// Take sees that so many bytes more fit, and keeps room for them until release. Errors: errs.SwapFull,
	// errs.NotSupported, errs.RequestCanceled.
	Take(ctx context.Context, bytes int64) (release func(), err error)
}

var _ backend.Pauser = (*instance)(nil)

const (
	// pageOutTime bounds how long a sandbox's memory is moved out; what is not out then stays in.
	pageOutTime = time.Minute
	// settleTime bounds the wait for what is being written, beyond which little comes.
	settleTime = 5 * time.Second
	// pagers is how many sandboxes' memory moves at a time on a node: more would only queue at the disk.
	pagers = 8
	// settled is so little that looking for more costs more than it brings.
	settled = 512 << 10
	// idleRounds of reclaim that bring nothing are the end where much is left: what is being written is counted late,
	// and the device of a busy machine is slow.
	idleRounds = 4
	much       = 2 << 20
	// fetchTime bounds how long the memory of a sandbox that runs again is fetched.
	fetchTime = time.Minute
)

// still is an instance's part of standing still.
type still struct {
	turn   chan struct{} // holds one for who freezes or thaws
	paused bool          // by whoever had the turn last
	since  time.Time     // of paused
}

// begin takes the turn.
func (s *still) begin(ctx context.Context, phase string) (end func(), err error) {
	select {
	case s.turn <- struct{}{}:
		return func() { <-s.turn }, nil
	case <-ctx.Done():
		return nil, errs.Wrap(errs.RequestCanceled, phase, "wait for what the sandbox stands still for", ctx.Err())
	}
}

// fetch brings memory back behind a sandbox that runs.
type fetch struct {
	mu     sync.Mutex
	cancel context.CancelFunc // nil: none was started
	wg     sync.WaitGroup
	closed bool
}

// start runs f, unless the instance is closed.
func (f *fetch) start(run func(context.Context)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), fetchTime)
	f.cancel = cancel
	f.wg.Go(func() {
		defer cancel()
		run(ctx)
	})
}

// stop ends what was started, for good if last.
func (f *fetch) stop(last bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = f.closed || last
	if f.cancel != nil {
		f.cancel()
		f.wg.Wait()
		f.cancel = nil
	}
}

const pausePhase = "container.pause"

// Pause implements backend.Pauser.
func (i *instance) Pause(ctx context.Context) (p backend.Paused, err error) {
	end, err := i.still.begin(ctx, pausePhase)
	if err != nil {
		return p, err
	}
	defer end()
	if i.still.paused {
		return p, nil
	}
	if err := i.b.canPause(); err != nil {
		return p, err
	}
	i.fetch.stop(false)
	m, err := i.b.cgroups.Memory(i.id)
	if err != nil {
		return p, errs.Wrap(errs.InternalError, pausePhase, "read the sandbox's memory", err)
	}
	release, err := i.b.cfg.Swap.Take(ctx, m.Anonymous)
	if err != nil {
		return p, err
	}
	defer release()
	select {
	case i.b.paging <- struct{}{}:
		defer func() { <-i.b.paging }()
	case <-ctx.Done():
		return p, errs.Wrap(errs.RequestCanceled, pausePhase, "wait for other sandboxes that pause", ctx.Err())
	}
	before, err := i.b.cgroups.Usage(i.id)
	if err != nil {
		return p, errs.Wrap(errs.InternalError, pausePhase, "read the sandbox's memory", err)
	}
	frozen, err := i.b.freeze(ctx, i.id, freeze.Limits{Hold: -1})
	if err != nil {
		return p, err
	}
	if err := i.moveOut(ctx); err != nil {
		if terr := errors.Join(i.b.cgroups.CloseSwap(i.id), frozen.Thaw()); terr != nil {
			err = errors.Join(err, terr, i.b.thaw(i.id)) // it may stand still: try once more, as adoption would
		}
		return p, err
	}
	i.still.paused, i.still.since = true, frozen.Since()
	after, err := i.b.cgroups.Usage(i.id)
	if err != nil { // it is paused all the same
		return p, nil
	}
	return backend.Paused{FreedBytes: max(0, before.MemoryBytes-after.MemoryBytes), SwapBytes: max(0, after.SwapBytes-before.SwapBytes)}, nil
}

// canPause tells what this node lacks for it.
func (b *Backend) canPause() error {
	lacks := b.cgroups.CanFreeze()
	if lacks == nil {
		lacks = b.cgroups.CanSwap()
	}
	if lacks == nil && b.cfg.Swap == nil {
		lacks = errors.New("the backend was opened without swap")
	}
	if lacks != nil {
		return errs.New(errs.NotSupported, pausePhase, "sandboxes cannot be paused on this node: "+lacks.Error())
	}
	return nil
}

// moveOut frees the memory of a sandbox that stands still. If it fails, or ctx ends, the sandbox's
// memory is as it was, or comes back as it is used.
func (i *instance) moveOut(ctx context.Context) error {
	if err := i.b.cgroups.OpenSwap(i.id); err != nil {
		return errs.Wrap(errs.InternalError, pausePhase, "let the sandbox swap", err)
	}
	bounded, cancel := context.WithTimeout(ctx, pageOutTime)
	defer cancel()
	err := pages.Out(bounded, pages.Set{Members: i.pids})
	if err == nil {
		err = i.settle(bounded)
	}
	switch {
	case ctx.Err() != nil:
		return errs.Wrap(errs.RequestCanceled, pausePhase, "move the sandbox's memory out", ctx.Err())
	case errors.Is(err, pages.ErrUnsupported):
		return errs.Wrap(errs.NotSupported, pausePhase, "move the sandbox's memory out", err)
	case err != nil && bounded.Err() == nil:
		return errs.Wrap(errs.InternalError, pausePhase, "move the sandbox's memory out", err)
	}
	return nil
}

func (i *instance) pids() ([]int, error) { return i.b.cgroups.PIDs(i.id) }

// writingLeast is what counts as being written: the kernel's number is that much behind.
const writingLeast = 1 << 20

// settle frees what moving the ranges left: the group's files, what its processes share, and pages that count until
// their writing has ended. It ends when the memory in use falls no more.
func (i *instance) settle(ctx context.Context) error {
	wait, idle := time.Millisecond, 0
	for end := time.Now().Add(settleTime); ; wait = min(2*wait, 20*time.Millisecond) {
		before, err := i.b.cgroups.MemoryUsed(i.id)
		if err != nil {
			return err
		}
		if err := i.b.cgroups.Reclaim(i.id); err != nil {
			return fmt.Errorf("free what is left: %w", err)
		}
		after, err := i.b.cgroups.MemoryUsed(i.id)
		if err != nil || after < settled {
			return err
		}
		m, err := i.b.cgroups.Memory(i.id)
		if err != nil || time.Now().After(end) {
			return err
		}
		idle++
		if after < before-before/8 || m.Writing >= writingLeast {
			idle = 0
		}
		if idle > 0 && (after < much || idle == idleRounds) {
			return nil
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Resume implements backend.Pauser.
func (i *instance) Resume(ctx context.Context, _ time.Duration) error {
	end, err := i.still.begin(ctx, "container.resume")
	if err != nil {
		return err
	}
	defer end()
	if !i.still.paused {
		return nil
	}
	// Without it the guest would wait for one page after another. If it fails the guest does just that.
	_ = pages.In(ctx, pages.Set{Members: i.pids, Only: i.handle.PID})
	if err := i.b.thaw(i.id); err != nil {
		return err
	}
	i.still.paused = false
	i.fetch.start(func(ctx context.Context) {
		select {
		case i.b.fetching <- struct{}{}:
			defer func() { <-i.b.fetching }()
		case <-ctx.Done():
			return
		}
		_ = pages.In(ctx, pages.Set{Members: i.pids, Skip: i.handle.PID, Behind: true}) // what it misses is fetched when it is used
	})
	return nil
}

// thaw ends a sandbox's pause. One that would go on swapping stays paused.
func (b *Backend) thaw(id string) error {
	if err := b.cgroups.CloseSwap(id); err != nil {
		return errs.Wrap(errs.InternalError, "container.resume", "keep the sandbox from swapping", err)
	}
	return b.cgroups.Freezer(id).Thaw()
}
