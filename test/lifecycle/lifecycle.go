package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Driver does operations on a node. All but Restart and AtRest may be called at the same time.
type Driver interface {
	Create(ctx context.Context) (id string, err error)
	// Exec runs a command in the sandbox that ends at once.
	Exec(ctx context.Context, id string) error
	// Attach opens a stream that gives back what it gets.
	Attach(ctx context.Context, id string) (Stream, error)
	Pause(ctx context.Context, id string) (v1.PauseResult, error)
	Resume(ctx context.Context, id string) (v1.PauseResult, error)
	// Hint tells that the next call is far.
	Hint(ctx context.Context, id string) (v1.HintResult, error)
	// Idle lets the sandbox's idle time, after which it is paused, pass; nothing if there is no way to.
	Idle(ctx context.Context, id string)
	Delete(ctx context.Context, id string) error
	Get(ctx context.Context, id string) (v1.Sandbox, error)
	// Restart ends the edge and starts another. Streams are lost.
	Restart(ctx context.Context) error
	// AtRest checks what can be seen from outside of the edge, when nothing is under way.
	AtRest(ctx context.Context, states map[string]v1.State) error
}

// Stream is an attached stream.
type Stream interface {
	// Ping sends input and waits until it comes back.
	Ping(ctx context.Context) error
	Close()
}

// Options of a Run.
type Options struct {
	Rounds    int
	Sandboxes int
	Clients   int  // at the same time
	Ops       int  // of each client in a round
	Faults    bool // pauses and resumes fail with errs.InternalError now and then
	Full      bool // resumes may fail with errs.NodeFull: no streams then, whose input would wait for room
	Restarts  bool
	Pause     time.Duration // at most, between two operations of a client
}

// patience is how long a single operation may take. Only what is stuck takes that long.
const patience = time.Minute

type kind int

const (
	opExec kind = iota
	opPing
	opPause
	opResume
	opHint
	opIdle
	opDelete
	kinds
)

func (k kind) String() string {
	return [...]string{"exec", "ping", "pause", "resume", "hint", "idle", "delete"}[k]
}

// op is what one client did and was answered.
type op struct {
	kind       kind
	start, end int64 // in the order of all starts and ends
	err        error
	changed    bool // of a pause or resume
	paused     bool // of a hint
	left       bool // its client did not wait for the answer: it may take effect at any time, or never
}

func (o op) String() string {
	s := fmt.Sprintf("%s[%d,%d]", o.kind, o.start, o.end)
	switch {
	case o.left:
		return s + " left"
	case o.err != nil:
		return s + " " + o.err.Error()
	case o.kind == opPause || o.kind == opResume:
		return fmt.Sprintf("%s changed=%t", s, o.changed)
	case o.kind == opHint:
		return fmt.Sprintf("%s paused=%t", s, o.paused)
	}
	return s
}

// state is the model's of a sandbox at rest.
type state uint8

const (
	running state = iota
	paused
	gone
)

func (s state) String() string { return [...]string{"running", "paused", "gone"}[s] }

func stateOf(v v1.State) (state, bool) {
	switch v {
	case v1.StateRunning:
		return running, true
	case v1.StatePaused:
		return paused, true
	}
	return 0, false
}

// after returns the states that s may become by o with the answer that it got; none if that answer is wrong in s.
func (o op) after(s state, opt *Options) []state {
	isGone := errors.Is(o.err, errs.SandboxGone) || errors.Is(o.err, errs.SandboxNotFound)
	switch {
	case o.left:
		switch {
		case s == gone:
			return []state{gone}
		case o.kind == opPause || o.kind == opHint:
			return []state{s, paused}
		case o.kind == opDelete:
			return []state{gone}
		}
		return []state{s, running}
	case o.kind == opIdle:
		if s == running {
			return []state{running, paused}
		}
		return []state{s}
	case isGone || o.kind == opPing && o.err != nil:
		if s == gone {
			return []state{gone}
		}
		return nil
	case o.kind == opDelete && o.err == nil:
		return []state{gone}
	case s == gone:
		return nil
	}
	failed := opt.Faults && errors.Is(o.err, errs.InternalError)
	switch o.kind {
	case opExec, opPing, opResume:
		switch {
		case o.err == nil && (o.kind != opResume || o.changed || s == running):
			return []state{running}
		case s == paused && (failed || opt.Full && errors.Is(o.err, errs.NodeFull)):
			return []state{paused}
		}
	case opPause:
		switch {
		case o.err == nil && o.changed == (s == running):
			return []state{paused}
		case s == running && (failed || errors.Is(o.err, errs.StateConflict)): // somebody used it before it was paused
			return []state{running}
		}
	case opHint:
		switch {
		case o.err == nil && o.paused: // also if that was about to be so, and did not come about
			return []state{paused, s}
		case o.err == nil && s == running, s == running && failed:
			return []state{running}
		}
	}
	return nil
}

// outcomes returns the states in which a sandbox may be at rest, after ops that began in a state.
func outcomes(from state, ops []op, opt *Options) map[state]bool {
	type at struct {
		done uint64
		s    state
	}
	seen := map[at]bool{}
	ends := map[state]bool{}
	if len(ops) > 64 {
		panic("too many operations for the model")
	}
	var must uint64
	for i, o := range ops {
		if !o.left {
			must |= 1 << i
		}
	}
	var walk func(at)
	walk = func(a at) {
		if seen[a] {
			return
		}
		seen[a] = true
		if a.done&must == must {
			ends[a.s] = true
		}
	next:
		for i, o := range ops {
			if a.done&(1<<i) != 0 {
				continue
			}
			for k, p := range ops { // what ended before it began comes before it
				if a.done&(1<<k) == 0 && !p.left && p.end < o.start {
					continue next
				}
			}
			// What wants it to run may resume it, find that it is paused again, and resume it again, or find it gone.
			if a.s == paused && (o.kind == opExec || o.kind == opPing || o.kind == opResume) {
				walk(at{a.done, running})
			}
			for _, s := range o.after(a.s, opt) {
				walk(at{a.done | 1<<i, s})
			}
		}
	}
	walk(at{0, from})
	return ends
}

// maxOps of one sandbox in a round, for the model's sake.
const maxOps = 12 // and those that help

// box is one sandbox of the test.
type box struct {
	id    string
	state state
	seen  v1.Sandbox

	mu     sync.Mutex
	ops    []op
	taken  int                 // ops that have been given out
	waits  map[int64]time.Time // operations in the sandbox that are under way, and since when
	stream chan Stream         // holds it while nobody uses it
}

// Run puts a node to the test. Everything random comes from random; the caller says its seed.
func Run(t *testing.T, random *rand.Rand, d Driver, opt Options) {
	r := &run{t: t, d: d, opt: opt}
	var boxes []*box
	counts := map[string]int{}
	for round := range opt.Rounds {
		for len(boxes) < opt.Sandboxes {
			b := r.create(random)
			if b == nil {
				break
			}
			boxes = append(boxes, b)
		}
		var wg sync.WaitGroup
		for range opt.Clients {
			mine := rand.New(rand.NewPCG(random.Uint64(), 0))
			wg.Go(func() {
				for range opt.Ops {
					r.one(mine, boxes[mine.IntN(len(boxes))])
				}
			})
		}
		done := make(chan struct{})
		go func() { wg.Wait(); close(done) }()
		r.help(boxes, done)
		for _, b := range boxes {
			for _, o := range b.ops {
				what := o.kind.String()
				if o.err != nil {
					what += " " + string(errs.Of(o.err).Code)
				}
				counts[what]++
			}
		}
		if err := r.allRest(round, boxes); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		boxes = slices.DeleteFunc(boxes, func(b *box) bool { return b.state == gone })
		if t.Failed() {
			t.FailNow()
		}
		if opt.Restarts && random.IntN(10) == 0 {
			for _, b := range boxes {
				b.drop()
				b.ops = nil // what nobody waited for has ended with the edge
			}
			if err := d.Restart(t.Context()); err != nil {
				t.Fatalf("round %d: restart: %v", round, err)
			}
			for _, b := range boxes {
				r.rest(round, b)
			}
			counts["restart"]++
		}
	}
	for _, b := range boxes {
		b.drop()
		if err := d.Delete(t.Context(), b.id); err != nil {
			t.Errorf("delete: %v", err)
		}
	}
	if err := d.AtRest(t.Context(), nil); err != nil {
		t.Error(err)
	}
	t.Logf("done: %v", counts)
}

// allRest is rest for all sandboxes, and for the node.
func (r *run) allRest(round int, boxes []*box) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		states := map[string]v1.State{}
		left := false
		for _, b := range boxes {
			if s := r.rest(round, b); s != "" {
				states[b.id] = s
			}
			left = left || b.left()
		}
		err := r.d.AtRest(r.t.Context(), states)
		if err == nil || !left || time.Now().After(deadline) { // else it may be what nobody waited for
			return err
		}
	}
}

type run struct {
	t     *testing.T
	d     Driver
	opt   Options
	clock atomic.Int64
}

func (r *run) create(random *rand.Rand) *box {
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	id, err := r.d.Create(ctx)
	if r.opt.Full && errors.Is(err, errs.NodeFull) {
		return nil
	}
	if err != nil {
		r.t.Fatalf("create: %v", err)
	}
	b := &box{id: id, waits: map[int64]time.Time{}, stream: make(chan Stream, 1)}
	if !r.opt.Full && random.IntN(2) == 0 {
		r.attach(ctx, b)
	}
	return b
}

func (r *run) attach(ctx context.Context, b *box) {
	s, err := r.d.Attach(ctx, b.id)
	if err != nil {
		r.t.Errorf("attach: %v", err)
		return
	}
	b.stream <- s
}

// drop closes the sandbox's stream.
func (b *box) drop() {
	select {
	case s := <-b.stream:
		s.Close()
	default:
	}
}

// one does an operation and notes it.
func (r *run) one(random *rand.Rand, b *box) {
	if r.opt.Pause > 0 {
		time.Sleep(time.Duration(random.Int64N(int64(r.opt.Pause))))
	}
	k := kind(random.IntN(int(opDelete)))
	if random.IntN(40) == 0 {
		k = opDelete
	}
	b.mu.Lock()
	full := b.taken+len(b.ops) >= maxOps
	b.taken++
	b.mu.Unlock()
	if full {
		return
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	o := op{kind: k}
	if k != opPing && random.IntN(30) == 0 {
		o.left = true
		lctx, leave := context.WithTimeout(ctx, time.Duration(random.Int64N(int64(2*time.Millisecond))))
		defer leave()
		ctx = lctx
	}
	var s Stream
	if k == opPing {
		select {
		case s = <-b.stream:
		default:
			return
		}
	}
	o.start = r.clock.Add(1)
	if k == opExec || k == opPing {
		b.mu.Lock()
		b.waits[o.start] = time.Now()
		b.mu.Unlock()
	}
	switch k {
	case opExec:
		o.err = r.d.Exec(ctx, b.id)
	case opPing:
		if o.err = s.Ping(ctx); o.err == nil {
			b.stream <- s
		} else {
			s.Close()
		}
	case opPause:
		var p v1.PauseResult
		p, o.err = r.d.Pause(ctx, b.id)
		o.changed = p.Changed
	case opResume:
		var p v1.PauseResult
		p, o.err = r.d.Resume(ctx, b.id)
		o.changed = p.Changed
	case opHint:
		var h v1.HintResult
		h, o.err = r.d.Hint(ctx, b.id)
		o.paused = h.Action == "pause"
	case opIdle:
		r.d.Idle(ctx, b.id)
	case opDelete:
		o.err = r.d.Delete(ctx, b.id)
	}
	o.end = r.clock.Add(1)
	o.left = o.left && (errors.Is(o.err, errs.DeadlineExceeded) || errors.Is(o.err, errs.RequestCanceled))
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ops = append(b.ops, o)
	delete(b.waits, o.start)
}

// helpAfter is how long an operation may stand still with its sandbox before that is resumed. It only says how often
// that happens.
const helpAfter = 20 * time.Millisecond

// helpWith does one operation and notes it, but for one that changes nothing since the node is full.
func (r *run) helpWith(ctx context.Context, b *box, k kind, do func(context.Context, string) (v1.PauseResult, error)) error {
	o := op{kind: k, start: r.clock.Add(1)}
	var p v1.PauseResult
	p, o.err = do(ctx, b.id)
	o.changed, o.end = p.Changed, r.clock.Add(1)
	if !errors.Is(o.err, errs.NodeFull) {
		b.mu.Lock()
		b.ops = append(b.ops, o)
		b.mu.Unlock()
	}
	if k == opPause && !p.Changed && o.err == nil {
		return errs.New(errs.StateConflict, "test", "it was paused already")
	}
	return o.err
}

// help resumes, until done is closed, sandboxes in which an operation began before they were paused, and stands still:
// its client would wait for ever.
func (r *run) help(boxes []*box, done <-chan struct{}) {
	tick := time.NewTicker(helpAfter / 2)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		for _, b := range boxes {
			b.mu.Lock()
			stuck := false
			for _, since := range b.waits {
				stuck = stuck || time.Since(since) > helpAfter
			}
			b.mu.Unlock()
			if !stuck {
				continue
			}
			ctx, cancel := context.WithTimeout(r.t.Context(), patience)
			if v, err := r.d.Get(ctx, b.id); err == nil && v.State == v1.StatePaused {
				if err := r.helpWith(ctx, b, opResume, r.d.Resume); errors.Is(err, errs.NodeFull) {
					for _, other := range boxes { // make room
						if r.helpWith(ctx, other, opPause, r.d.Pause) == nil {
							break
						}
					}
				}
			}
			cancel()
		}
	}
}

// rest waits until nothing is under way in a sandbox, and checks that it is in a state in which it may be.
func (r *run) rest(round int, b *box) v1.State {
	may := outcomes(b.state, b.ops, &r.opt)
	var v v1.Sandbox
	var err error
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		ctx, cancel := context.WithTimeout(r.t.Context(), patience)
		v, err = r.d.Get(ctx, b.id)
		cancel()
		is, ok := stateOf(v.State)
		if errors.Is(err, errs.SandboxGone) || errors.Is(err, errs.SandboxNotFound) {
			is, ok, err = gone, true, nil
		}
		if err == nil && ok && may[is] {
			b.keep(r, is, v)
			if is == gone {
				return ""
			}
			return v.State
		}
		// What nobody waited for may still be under way.
		if time.Now().After(deadline) || ok && !b.left() {
			break
		}
	}
	var did strings.Builder
	slices.SortFunc(b.ops, func(x, y op) int { return int(x.start - y.start) })
	for _, o := range b.ops {
		fmt.Fprintf(&did, "\n\t%v", o)
	}
	r.t.Errorf("round %d: %s was %v and may be %v, but is %q (%v) after%s", round, b.id, b.state, may, v.State, err, did.String())
	return v.State
}

func (b *box) left() bool {
	return slices.ContainsFunc(b.ops, func(o op) bool { return o.left })
}

// keep is what the next round begins with.
func (b *box) keep(r *run, is state, v v1.Sandbox) {
	switch standing := v.PausedAt != nil && v.PauseReason != ""; {
	case is == gone:
		b.drop()
	case standing != (is == paused) || v.PausedAt == nil != (v.PauseReason == ""):
		r.t.Errorf("%s is %s, paused at %v for %q", v.ID, v.State, v.PausedAt, v.PauseReason)
	case v.Generation < b.seen.Generation || v.Pauses < b.seen.Pauses:
		r.t.Errorf("%s went back from generation %d with %d pauses to %d with %d", v.ID, b.seen.Generation, b.seen.Pauses, v.Generation, v.Pauses)
	case v.Usage != nil && b.seen.Usage != nil && v.Usage.PausedSeconds < b.seen.Usage.PausedSeconds:
		r.t.Errorf("%s was paused for %v s and now for %v", v.ID, b.seen.Usage.PausedSeconds, v.Usage.PausedSeconds)
	}
	if is != gone {
		b.seen = v
	}
	b.state, b.taken = is, 0
	b.ops = slices.DeleteFunc(b.ops, func(o op) bool { return !o.left })
	if len(b.ops) > 3 {
		b.ops = b.ops[len(b.ops)-3:]
	}
}
