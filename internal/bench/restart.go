package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
)

// Server is a server on this machine that may be killed and started again.
type Server interface {
	// Kill ends it as SIGKILL does and returns when it is dead.
	Kill(ctx context.Context) error
	// Start starts it as it was started before and returns at once.
	Start(ctx context.Context) error
	// Leaks returns what of these sandboxes is left on the machine, in words.
	Leaks(ctx context.Context, ids []string) ([]string, error)
}

// Restarts say how Restart kills a server.
type Restarts struct {
	Sandboxes int           // live all the time
	Paused    int           // of them
	Kills     int           // how often
	Load      int           // workers that create, use, pause and remove sandboxes of their own meanwhile
	Every     time.Duration // the server is killed at a random moment of so long after it served
	Parallel  int           // creates and looks at once
	Random    *rand.Rand
	Progress  func(done, total int64)
}

const (
	servesWithin = time.Minute // a restart that takes longer is an error
	lookEvery    = 2 * time.Millisecond
	probes       = 20 // sandboxes that are used after each restart
	ownMost      = 6  // sandboxes of one worker of the load
)

// Restart kills the server again and again and measures how long it takes from its start until it says
// that it is well, and until a command in a random sandbox is answered. It counts what was promised and does not hold:
// a sandbox that was reported and is gone or answers no more, one that was removed and is back; and what is left of sandboxes in the end.
func Restart(ctx context.Context, d DSec, s Server, o Restarts) (_ []Result, err error) {
	b, err := fill(ctx, d, o.Sandboxes, o.Parallel)
	if err != nil {
		return nil, err
	}
	k := &killing{DSec: d, server: s, Restarts: o, live: map[string]*client.Sandbox{}, ended: map[string]bool{}}
	for _, x := range b.all {
		sb := x.(dsecBox).sb
		k.fixed = append(k.fixed, sb)
		k.live[sb.ID()] = sb
	}
	for range o.Load {
		k.loaders = append(k.loaders, &loader{killing: k})
	}
	k.serves.name, k.answers.name = "restart", "restart exec"
	cpu, start := cpuSeconds(), time.Now()
	for i := 0; i < o.Kills && err == nil && ctx.Err() == nil; i++ {
		if err = k.once(ctx); err == nil && o.Progress != nil {
			o.Progress(int64(i+1), int64(o.Kills))
		}
	}
	if err == nil && ctx.Err() == nil {
		k.lookAtAll(ctx)
	}
	err = errors.Join(err, k.removeAll(ctx, b))
	if err == nil && ctx.Err() == nil {
		err = k.findLeaks(ctx)
	}
	var out []Result
	for _, m := range []*measured{&k.serves, &k.answers} {
		r := Result{Name: m.name, Target: d.Name(), Parallel: 1, Host: ReadHost(), Seconds: time.Since(start).Seconds(), ClientCPUSeconds: cpuSeconds() - cpu}
		r.sum([]worker{m.worker})
		out = append(out, r)
	}
	r := &out[0]
	for name, n := range map[string]int64{
		"sandboxes": int64(o.Sandboxes), "paused": int64(o.Paused), "load workers": int64(o.Load), "load operations": k.operations.Load(),
		"lost": k.lost.Load(), "back after removal": k.back.Load(), "leaked": k.leaked.Load(), "nobody was told of": k.untold.Load(),
	} {
		r.extra(name, float64(n))
	}
	if err == nil {
		err = ctx.Err()
	}
	return out, err
}

// measured is one latency of each restart.
type measured struct {
	name string
	worker
}

// killing is a Restart under way.
type killing struct {
	DSec
	Restarts
	server  Server
	fixed   []*client.Sandbox
	loaders []*loader
	serves  measured
	answers measured

	operations, lost, back, leaked, untold atomic.Int64

	mu     sync.Mutex
	live   map[string]*client.Sandbox // that were reported, and whose removal nobody asked for
	ended  map[string]bool            // whose removal was reported
	asked  []string                   // whose removal was asked for
	random sync.Mutex
}

func (k *killing) intn(n int) int {
	k.random.Lock()
	defer k.random.Unlock()
	return k.Random.IntN(n)
}

// broken counts a promise that does not hold.
func (k *killing) broken(n *atomic.Int64, err error) {
	if n != nil {
		n.Add(1)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.serves.note(0, err)
}

// once kills the server once, at a random moment, and looks at what it is like after its restart.
func (k *killing) once(ctx context.Context) error {
	if err := inParallel(ctx, k.Parallel, k.fixed[:k.Paused], func(sb *client.Sandbox) error {
		_, err := sb.Pause(ctx)
		return err
	}); err != nil {
		return err
	}
	lctx, stop := context.WithCancel(ctx)
	defer stop()
	var dying atomic.Bool
	var wg sync.WaitGroup
	for _, w := range k.loaders {
		wg.Go(func() {
			for lctx.Err() == nil {
				if err := w.step(lctx); err != nil {
					if lctx.Err() == nil && !dying.Load() {
						k.broken(nil, fmt.Errorf("under load: %w", err))
					}
					return
				}
			}
		})
	}
	wait := time.NewTimer(time.Duration(k.intn(max(1, int(k.Every)))))
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-ctx.Done():
	}
	dying.Store(true)
	err := k.server.Kill(context.WithoutCancel(ctx)) // once begun: it is started again, too
	stop()
	wg.Wait()
	if err != nil {
		return fmt.Errorf("kill the server: %w", err)
	}
	start := time.Now()
	if err := k.server.Start(ctx); err != nil {
		return fmt.Errorf("start the server again: %w", err)
	}
	if err := k.untilWell(ctx, start); err != nil {
		return err
	}
	k.serves.note(time.Since(start), nil)
	first := k.fixed[k.intn(len(k.fixed))]
	if err := k.use(ctx, first); err != nil {
		k.broken(&k.lost, err)
	} else {
		k.answers.note(time.Since(start), nil)
	}
	return k.look(ctx)
}

func (k *killing) untilWell(ctx context.Context, since time.Time) error {
	for {
		hctx, cancel := context.WithTimeout(ctx, time.Second)
		h, err := k.Client.Health(hctx)
		cancel()
		switch {
		case err == nil && h.OK:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Since(since) > servesWithin:
			return fmt.Errorf("the server is not well %v after its start: %w", servesWithin, err)
		}
		time.Sleep(lookEvery)
	}
}

func (k *killing) use(ctx context.Context, sb *client.Sandbox) error {
	if err := (dsecBox{sb: sb}).Exec(ctx, "true"); err != nil {
		return fmt.Errorf("lost: %w", err)
	}
	return nil
}

// look compares what the server has with what it said before.
func (k *killing) look(ctx context.Context) error {
	there := map[string]v1.Sandbox{}
	for v, err := range k.Client.All(ctx, client.ListOptions{Labels: k.Spec.Labels}) {
		if err != nil {
			return err
		}
		there[v.ID] = v
	}
	k.mu.Lock()
	live := make([]*client.Sandbox, 0, len(k.live))
	for _, sb := range k.live {
		live = append(live, sb)
	}
	k.mu.Unlock()
	for _, sb := range live {
		switch v, ok := there[sb.ID()]; {
		case !ok:
			k.broken(&k.lost, fmt.Errorf("lost: %s is not there", sb.ID()))
		case v.State != v1.StateRunning && v.State != v1.StatePaused:
			k.broken(&k.lost, fmt.Errorf("lost: %s is %s: %+v", sb.ID(), v.State, v.Error))
		}
		delete(there, sb.ID())
	}
	for id, v := range there {
		k.mu.Lock()
		ended := k.ended[id]
		k.mu.Unlock()
		switch {
		case ended && v.State != v1.StateStopping:
			k.broken(&k.back, fmt.Errorf("%s was removed and is %s", id, v.State))
		case v.State != v1.StateStopping: // its create or its removal was never answered: it may be there or not
			k.untold.Add(1)
		}
		if err := k.remove(ctx, k.Client.Sandbox(id)); err != nil {
			k.broken(&k.lost, fmt.Errorf("remove a sandbox that nobody was told of: %w", err))
		}
	}
	some := make([]*client.Sandbox, 0, probes)
	for range min(probes, len(live)) {
		some = append(some, live[k.intn(len(live))])
	}
	k.useAll(ctx, some)
	return ctx.Err()
}

func (k *killing) lookAtAll(ctx context.Context) {
	k.mu.Lock()
	all := make([]*client.Sandbox, 0, len(k.live))
	for _, sb := range k.live {
		all = append(all, sb)
	}
	k.mu.Unlock()
	k.useAll(ctx, all)
}

func (k *killing) useAll(ctx context.Context, all []*client.Sandbox) {
	_ = inParallel(ctx, k.Parallel, all, func(sb *client.Sandbox) error { // it never fails
		if err := k.use(ctx, sb); err != nil && ctx.Err() == nil {
			k.broken(&k.lost, err)
		}
		return nil
	})
}

// inParallel does do for all, until one fails or ctx ends.
func inParallel(ctx context.Context, parallel int, all []*client.Sandbox, do func(*client.Sandbox) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(parallel, len(all)) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(all) && ctx.Err() == nil; i = int(next.Add(1)) - 1 {
				if err := do(all[i]); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// remove removes one, and keeps account of that.
func (k *killing) remove(ctx context.Context, sb *client.Sandbox) error {
	k.mu.Lock()
	delete(k.live, sb.ID())
	k.asked = append(k.asked, sb.ID())
	k.mu.Unlock()
	err := sb.Delete(ctx)
	if errors.Is(err, client.ErrGone) {
		err = nil
	}
	k.leases.drop(sb)
	if err == nil {
		k.mu.Lock()
		k.ended[sb.ID()] = true
		k.mu.Unlock()
	}
	return err
}

// removeAll removes what is there, also after an interrupt.
func (k *killing) removeAll(ctx context.Context, b *boxes) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	k.mu.Lock()
	for _, sb := range k.fixed {
		k.asked = append(k.asked, sb.ID())
		delete(k.live, sb.ID()) // b has it
	}
	for id, sb := range k.live {
		k.asked = append(k.asked, id)
		b.add(dsecBox{sb, k.leases})
	}
	k.mu.Unlock()
	r, err := b.remove(ctx, k.Name(), k.Parallel)
	if err == nil && r.Errors > 0 {
		err = errNotRemoved(r)
	}
	return err
}

// findLeaks looks for what is left; the kernel may still take something down.
func (k *killing) findLeaks(ctx context.Context) error {
	for wait := 50 * time.Millisecond; ; wait *= 2 {
		left, err := k.server.Leaks(ctx, k.asked)
		if err != nil || len(left) == 0 {
			return err
		}
		if wait > 5*time.Second {
			for _, what := range left {
				k.broken(&k.leaked, errors.New("leaked: "+what))
			}
			return nil
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// loader is one worker of the load, with sandboxes of its own.
type loader struct {
	*killing
	own []*client.Sandbox
}

// loads are what a loader does, and how often.
var loads = []struct {
	often int
	needs bool // a sandbox of its own
	do    func(*loader, context.Context) error
}{
	{4, false, (*loader).create},
	{10, true, (*loader).exec},
	{3, true, (*loader).remove},
	{2, true, (*loader).pause},
	{1, true, (*loader).resume},
}

// step does one operation.
func (w *loader) step(ctx context.Context) error {
	sum := 0
	for _, l := range loads {
		sum += l.often
	}
	n := w.intn(sum)
	for _, l := range loads {
		if n -= l.often; n >= 0 {
			continue
		}
		if l.needs && len(w.own) == 0 {
			return nil
		}
		err := l.do(w, ctx)
		w.operations.Add(1)
		return err
	}
	return nil
}

func (w *loader) any() *client.Sandbox { return w.own[w.intn(len(w.own))] }

func (w *loader) create(ctx context.Context) error {
	if len(w.own) == ownMost {
		return w.remove(ctx)
	}
	sb, err := w.Client.Create(ctx, w.Spec)
	if err != nil {
		return err
	}
	w.leases.add(sb)
	w.mu.Lock()
	w.live[sb.ID()] = sb
	w.mu.Unlock()
	w.own = append(w.own, sb)
	return nil
}

func (w *loader) exec(ctx context.Context) error { return w.use(ctx, w.any()) }

func (w *loader) remove(ctx context.Context) error {
	i := w.intn(len(w.own))
	sb := w.own[i]
	w.own = append(w.own[:i], w.own[i+1:]...)
	return w.killing.remove(ctx, sb)
}

func (w *loader) pause(ctx context.Context) error {
	_, err := w.any().Pause(ctx)
	if errors.Is(err, errs.NotSupported) { // a node without swap
		return nil
	}
	return err
}

func (w *loader) resume(ctx context.Context) error {
	_, err := w.any().Resume(ctx)
	return err
}
