package edge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// moves calls sandbox.pause or sandbox.resume.
func (b *bed) moves(c *aether.Conn, method string, ids ...string) map[string]v1.PauseResult {
	b.t.Helper()
	raw, err := json.Marshal(v1.EdgePause{IDs: ids})
	if err != nil {
		b.t.Fatal(err)
	}
	st, err := c.Open(b.t.Context(), "", method, &msg.Document{Json: raw})
	if err != nil {
		b.t.Fatal(err)
	}
	out := map[string]v1.PauseResult{}
	for {
		f, err := st.Recv(b.t.Context())
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			b.t.Fatalf("%s: %v", method, err)
		}
		var d msg.Document
		var r v1.PauseResult
		if err := errors.Join(d.ParseWire(f.Payload), json.Unmarshal(d.Json, &r)); err != nil {
			b.t.Fatal(err)
		}
		if _, twice := out[r.ID]; twice {
			b.t.Errorf("two results of %s", r.ID)
		}
		out[r.ID] = r
	}
}

func (b *bed) mustCreate(c *aether.Conn, e *Edge, change func(*v1.EdgeCreate)) v1.Sandbox {
	b.t.Helper()
	v, err := b.create(c, e, change)
	if err != nil {
		b.t.Fatal(err)
	}
	return v
}

func (b *bed) mustPause(c *aether.Conn, id string) {
	b.t.Helper()
	if r := b.moves(c, "sandbox.pause", id)[id]; r.Error != nil || r.State != v1.StatePaused {
		b.t.Fatalf("pause: %+v", r)
	}
}

func exec(ctx context.Context, c *aether.Conn, id string) error {
	return c.Call(ctx, id, "process.exec", &msg.ExecRequest{}, &msg.ExecResult{})
}

func (b *bed) get(c *aether.Conn, id string) v1.Sandbox {
	b.t.Helper()
	v, err := call[v1.Sandbox](b.t, c, "sandbox.get", &msg.SandboxRequest{Id: id})
	if err != nil {
		b.t.Fatal(err)
	}
	return v
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it did not come true: " + what)
		}
	}
}

func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	back := newStandings(b)
	e := b.start()
	c := b.control(e)
	var ids []string
	for range 3 {
		ids = append(ids, b.mustCreate(c, e, nil).ID)
	}
	id := ids[0]
	never := v1.SandboxID(e.ID(), e.epoch, 1<<42)
	got := b.moves(c, "sandbox.pause", append(ids, never)...)
	for _, id := range ids {
		if r := got[id]; r.Error != nil || !r.Changed || r.State != v1.StatePaused || r.FreedBytes != 500<<20 || !back.guest(id).stands() {
			t.Errorf("pause: %+v", r)
		}
	}
	if r := got[never]; r.Error == nil || r.Error.Code != string(errs.SandboxNotFound) {
		t.Errorf("pause of one that never was: %+v", r)
	}
	if r := b.moves(c, "sandbox.pause", id)[id]; r.Error != nil || r.Changed || r.State != v1.StatePaused {
		t.Errorf("a second pause: %+v", r)
	}
	if n := e.Node(); n.Paused != 3 || n.Allocated != (v1.Resources{Slots: 3}) {
		t.Errorf("the node of paused ones: %+v", n)
	}
	// A look does not wake.
	v := b.get(c, id)
	if v.State != v1.StatePaused || v.PausedAt == nil || v.PauseReason != v1.PauseRequested || v.Pauses != 1 || v.Usage == nil || v.Usage.PausedSeconds <= 0 {
		t.Errorf("a paused sandbox: %+v", v)
	}
	if err := c.Call(t.Context(), id, "guest.info", &msg.Empty{}, nil); !errors.Is(err, errs.SandboxNotRunning) {
		t.Errorf("guest.info of a paused sandbox: %v", err)
	}
	// Use does.
	b.now.Add(int64(time.Hour))
	if err := exec(t.Context(), c, id); err != nil {
		t.Fatal(err)
	}
	v = b.get(c, id)
	if v.State != v1.StateRunning || v.PausedAt != nil || v.PauseReason != "" || v.Pauses != 1 || v.Usage.PausedSeconds < 3600 {
		t.Errorf("after a command: %+v, %+v", v, v.Usage)
	}
	if heard := back.guest(id).notices(); len(heard) != 1 || heard[0] < time.Hour || heard[0] > time.Hour+time.Minute {
		t.Errorf("the guest has heard of %v", heard)
	}
	got = b.moves(c, "sandbox.resume", ids...)
	if a, b := got[ids[0]], got[ids[1]]; a.Changed || a.State != v1.StateRunning || !b.Changed || b.State != v1.StateRunning || a.Error != nil || b.Error != nil {
		t.Errorf("resume: %+v", got)
	}
	if n := e.Node(); n.Paused != 0 || n.Allocated.CPUMillis != 3*v1.DefaultCPUMillis {
		t.Errorf("the node of resumed ones: %+v", n)
	}
}

// However many requests come for a paused sandbox, it is resumed once, and all are served.
func TestManyRequestsResumeOnce(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	back := newStandings(b)
	gate := make(chan struct{})
	back.onResume = func(context.Context, string) error { <-gate; return nil }
	e := b.start()
	c := b.control(e)
	id := b.mustCreate(c, e, nil).ID
	b.mustPause(c, id)
	const n = 50
	failed := make(chan error, n)
	for range n {
		go func() { failed <- exec(t.Context(), c, id) }()
	}
	eventually(t, "all have come", func() bool { return e.get(id).seen().open == n })
	close(gate)
	for range n {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	if g := back.guest(id); g.resumes.Load() != 1 || g.execs.Load() != n {
		t.Errorf("%d resumes, %d commands", g.resumes.Load(), g.execs.Load())
	}
}

// A request that meets a pause which is not done yet ends it.
func TestRequestEndsThePauseThatItMeets(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	back := newStandings(b)
	paging := make(chan struct{}, 1)
	back.onPause = func(ctx context.Context, _ string) error {
		paging <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	e := b.start()
	c := b.control(e)
	id := b.mustCreate(c, e, nil).ID
	results := make(chan v1.PauseResult)
	go func() { results <- b.moves(c, "sandbox.pause", id)[id] }()
	<-paging
	if v := b.get(c, id); v.State != v1.StatePausing {
		t.Errorf("while its memory is moved: %s", v.State)
	}
	if err := exec(t.Context(), c, id); err != nil {
		t.Error(err)
	}
	if r := <-results; r.Error == nil || r.Error.Code != string(errs.StateConflict) || r.Changed || r.State != v1.StateRunning {
		t.Errorf("the pause: %+v", r)
	}
	if v := b.get(c, id); v.State != v1.StateRunning || v.PausedAt != nil || v.Pauses != 0 {
		t.Errorf("after it: %+v", v)
	}
}

// A pause that was decided before the sandbox was used, or resumed, does not happen (user report 51).
func TestStalePauseIsRefused(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	back := newStandings(b)
	e := b.start()
	c := b.control(e)
	id := b.mustCreate(c, e, nil).ID
	s := e.get(id)
	b.mustPause(c, id)
	seen := s.seen() // a timer fires here
	if r := b.moves(c, "sandbox.resume", id)[id]; r.Error != nil || !r.Changed {
		t.Fatalf("%+v", r)
	}
	if _, err := e.pause(t.Context(), id, v1.PauseIdle, &seen); !errors.Is(err, errs.StateConflict) {
		t.Errorf("a pause from before the resume: %v", err)
	}
	seen = s.seen()
	if err := exec(t.Context(), c, id); err != nil {
		t.Fatal(err)
	}
	if _, err := e.pause(t.Context(), id, v1.PauseIdle, &seen); !errors.Is(err, errs.StateConflict) {
		t.Errorf("a pause from before a command: %v", err)
	}
	if v := b.get(c, id); v.State != v1.StateRunning || back.guest(id).stands() {
		t.Errorf("it is %s", v.State)
	}
	seen = s.seen()
	if r, err := e.pause(t.Context(), id, v1.PauseIdle, &seen); err != nil || !r.Changed {
		t.Errorf("one that nobody used since: %+v, %v", r, err)
	}
	if v := b.get(c, id); v.PauseReason != v1.PauseIdle {
		t.Errorf("paused for %q", v.PauseReason)
	}
}

// A paused sandbox is removed without being resumed, though it could not be (user report 49).
func TestPausedIsRemovedWithoutResume(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	back := newStandings(b)
	back.onResume = func(context.Context, string) error { return errors.New("device or resource busy") }
	e := b.start()
	c := b.control(e)
	id := b.mustCreate(c, e, nil).ID
	b.mustPause(c, id)
	for range 2 {
		if err := exec(t.Context(), c, id); !errors.Is(err, errs.InternalError) {
			t.Errorf("a command in one that cannot be resumed: %v", err)
		}
		if v := b.get(c, id); v.State != v1.StatePaused || v.PausedAt == nil || v.PauseReason != v1.PauseRequested {
			t.Errorf("it is not paused any more: %+v", v)
		}
	}
	if n := e.Node(); n.Paused != 1 || n.Allocated != (v1.Resources{Slots: 1}) {
		t.Errorf("%+v", n)
	}
	if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: id}, &msg.Empty{}); err != nil {
		t.Fatal(err)
	}
	if n := back.guest(id).resumes.Load(); n != 0 {
		t.Errorf("resumed %d times", n)
	}
	if n := e.Node(); n.Paused != 0 || n.Allocated != (v1.Resources{}) || n.Sandboxes != 0 {
		t.Errorf("something is left: %+v", n)
	}
}

// A removal ends the pause or the resume that is under way.
func TestRemovalEndsPauseAndResume(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"pause", "resume"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			back := newStandings(b)
			begun := make(chan struct{}, 1)
			forEver := func(ctx context.Context, _ string) error {
				begun <- struct{}{}
				<-ctx.Done()
				return ctx.Err()
			}
			if what == "pause" {
				back.onPause = forEver
			} else {
				back.onResume = forEver
			}
			e := b.start()
			c := b.control(e)
			id := b.mustCreate(c, e, nil).ID
			if what == "resume" {
				b.mustPause(c, id)
			}
			results := make(chan v1.PauseResult)
			go func() { results <- b.moves(c, "sandbox."+what, id)[id] }()
			<-begun
			if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: id}, &msg.Empty{}); err != nil {
				t.Fatal(err)
			}
			if r := <-results; r.Error == nil || r.Error.Code != string(errs.SandboxGone) {
				t.Errorf("%s of one that is removed: %+v", what, r)
			}
			if n := e.Node(); n.Paused != 0 || n.Allocated != (v1.Resources{}) {
				t.Errorf("%+v", n)
			}
		})
	}
}

// A stream stays attached over pauses, and its input resumes the sandbox.
func TestInputOnAnAttachedStreamResumes(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	back := newStandings(b)
	e := b.start()
	c := b.control(e)
	id := b.mustCreate(c, e, nil).ID
	st, err := c.Open(t.Context(), id, "process.attach", &msg.AttachRequest{})
	if err != nil {
		t.Fatal(err)
	}
	ping := func(text string) {
		t.Helper()
		if err := st.Send(t.Context(), aether.KindInput, []byte(text)); err != nil {
			t.Fatal(err)
		}
		f, err := st.Recv(t.Context())
		if err != nil || string(f.Payload) != text {
			t.Fatalf("%q, %v", f.Payload, err)
		}
	}
	ping("before")
	for i := range 100 {
		b.mustPause(c, id)
		ping(fmt.Sprint(i))
	}
	if n := back.guest(id).resumes.Load(); n != 100 {
		t.Errorf("%d resumes for 100 pauses", n)
	}
	if err := st.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Recv(t.Context()); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	eventually(t, "the stream is counted out", func() bool { return e.get(id).seen().open == 0 })
}

func TestClientsMayNotSpeakForTheEdge(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	newStandings(b)
	e := b.start()
	c := b.control(e)
	id := b.mustCreate(c, e, nil).ID
	for _, method := range []string{"guest.resumed", "guest.activity"} {
		if err := c.Call(t.Context(), id, method, &msg.Empty{}, nil); !errors.Is(err, errs.UnknownMethod) {
			t.Errorf("%s: %v", method, err)
		}
		if _, err := c.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{{Method: "guest.info", Target: id}, {Method: method, Target: id}}}); !errors.Is(err, errs.UnknownMethod) {
			t.Errorf("%s in a batch: %v", method, err)
		}
	}
	// A batch wakes if one of its operations does.
	b.mustPause(c, id)
	if _, err := c.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{{Method: "guest.info", Target: id}}}); !errors.Is(err, errs.SandboxNotRunning) {
		t.Errorf("a batch of looks: %v", err)
	}
	if _, err := c.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{{Method: "guest.info", Target: id}, {Method: "process.exec", Target: id}}}); err != nil {
		t.Errorf("a batch with a command: %v", err)
	}
}

// What a restart finds paused stays so, with all that is known of it; what was about to be paused or resumed runs.
func TestRestartKeepsPaused(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	back := newStandings(b)
	e := b.start()
	c := b.control(e)
	paused, running := b.mustCreate(c, e, nil).ID, b.mustCreate(c, e, nil).ID
	b.mustPause(c, paused)
	b.now.Add(int64(time.Minute))
	if err := exec(t.Context(), c, paused); err != nil {
		t.Fatal(err)
	}
	b.mustPause(c, paused)
	before := b.get(c, paused)
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !back.guest(paused).stands() || back.guest(running).stands() {
		t.Fatal("a stop of the edge paused or resumed something")
	}
	b.now.Add(int64(time.Hour))
	e = b.start()
	c = b.control(e)
	v := b.get(c, paused)
	if v.State != v1.StatePaused || !v.PausedAt.Equal(*before.PausedAt) || v.PauseReason != before.PauseReason || v.Pauses != 2 || v.Usage.PausedSeconds < 3660 {
		t.Errorf("before %+v\nafter %+v, %+v", before, v, v.Usage)
	}
	if n := e.Node(); n.Paused != 1 || n.Allocated.Slots != 2 || n.Allocated.CPUMillis != v1.DefaultCPUMillis {
		t.Errorf("%+v", n)
	}
	if !back.guest(paused).stands() {
		t.Error("the restart resumed it")
	}
	if err := exec(t.Context(), c, paused); err != nil {
		t.Error(err)
	}
	heard := back.guest(paused).notices()
	if len(heard) != 2 || heard[1] < time.Hour || heard[1] > 2*time.Hour {
		t.Errorf("the guest has heard of %v", heard)
	}
}

// An edge that is told to stop undoes the pauses that are not done, and finishes resumes.
func TestStopLeavesNothingHalf(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	back := newStandings(b)
	begun := make(chan struct{}, 2)
	back.onPause = func(ctx context.Context, _ string) error {
		begun <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	e := b.start()
	c := b.control(e)
	id := b.mustCreate(c, e, nil).ID
	results := make(chan v1.PauseResult, 1)
	go func() { results <- b.moves(c, "sandbox.pause", id)[id] }()
	<-begun
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := <-results; r.Error == nil {
		t.Errorf("the pause succeeded: %+v", r)
	}
	if back.guest(id).stands() {
		t.Error("it stands still without an edge")
	}
	back.onPause = nil
	gate := make(chan struct{})
	back.onResume = func(context.Context, string) error { begun <- struct{}{}; <-gate; return nil }
	e = b.start()
	c = b.control(e)
	if v := b.get(c, id); v.State != v1.StateRunning || v.PausedAt != nil {
		t.Errorf("after the restart: %+v", v)
	}
	b.mustPause(c, id)
	go func() { results <- b.moves(c, "sandbox.resume", id)[id] }()
	<-begun
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := e.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "it stops", e.stopping.Load)
	close(gate)
	if r := <-results; r.Error != nil {
		t.Errorf("the resume: %+v", r.Error)
	}
	wg.Wait()
	e = b.start()
	if v := b.get(b.control(e), id); v.State != v1.StateRunning {
		t.Errorf("after the second restart: %s", v.State)
	}
}

// A sandbox that nobody uses is removed or paused after its idle time; what runs in it by itself, and
// streams, are use.
func TestIdle(t *testing.T) {
	t.Parallel()
	for _, on := range []v1.OnIdle{v1.OnIdleStop, v1.OnIdlePause} {
		t.Run(string(on), func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			back := newStandings(b)
			var commands atomic.Int32
			back.activity = func(string) (*msg.Activity, error) { return &msg.Activity{Commands: uint32(commands.Load())}, nil }
			e := b.start()
			c := b.control(e)
			const ttl = time.Hour
			v := b.mustCreate(c, e, func(r *v1.EdgeCreate) { r.Spec.IdleTTL, r.Spec.OnIdle = v1.Seconds(ttl.Seconds()), on })
			s := e.get(v.ID)
			runs := func(when string) {
				t.Helper()
				e.checkIdle(s, ttl)
				if state := s.snapshot().State; state != v1.StateRunning {
					t.Fatalf("%s it is %s", when, state)
				}
			}
			after := func(d time.Duration) { b.now.Add(int64(d)) }
			after(ttl / 2)
			runs("before its time")
			// Looks are no use, commands are.
			if err := exec(t.Context(), c, v.ID); err != nil {
				t.Fatal(err)
			}
			eventually(t, "it ended", func() bool { return s.seen().open == 0 })
			after(ttl - time.Minute)
			runs("less than its time after a command")
			if err := c.Call(t.Context(), v.ID, "guest.info", &msg.Empty{}, nil); err != nil {
				t.Fatal(err)
			}
			st, err := c.Open(t.Context(), v.ID, "process.attach", &msg.AttachRequest{})
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "the stream is joined", func() bool { return s.seen().open == 1 })
			after(2 * ttl)
			runs("with a stream")
			st.Cancel()
			eventually(t, "it ended", func() bool { return s.seen().open == 0 })
			after(ttl / 2)
			runs("soon after a stream")
			commands.Store(1)
			after(2 * ttl)
			runs("while a command runs in it")
			commands.Store(0)
			after(lookAgain(ttl))
			runs("soon after that")
			after(ttl - 2*lookAgain(ttl))
			if err := c.Call(t.Context(), v.ID, "guest.info", &msg.Empty{}, nil); err != nil {
				t.Fatal(err)
			}
			after(2 * lookAgain(ttl))
			e.checkIdle(s, ttl)
			if on == v1.OnIdleStop {
				if _, err := call[v1.Sandbox](t, c, "sandbox.get", &msg.SandboxRequest{Id: v.ID}); errs.Of(err).Details["end_reason"] != string(v1.EndIdle) {
					t.Errorf("after its time: %v", err)
				}
				return
			}
			if v := b.get(c, v.ID); v.State != v1.StatePaused || v.PauseReason != v1.PauseIdle {
				t.Fatalf("after its time: %+v", v)
			}
			after(10 * ttl)
			e.checkIdle(s, ttl) // of a timer that fires late
			if err := exec(t.Context(), c, v.ID); err != nil {
				t.Fatal(err)
			}
			after(ttl / 2)
			runs("after it was resumed")
		})
	}
	t.Run("cannot", func(t *testing.T) {
		t.Parallel()
		b := newBed(t)
		b.wrap = func(be backend.Backend) backend.Backend { return newBusy(t, be) } // whose instances cannot be paused
		e := b.start()
		_, err := b.create(b.control(e), e, func(r *v1.EdgeCreate) { r.Spec.IdleTTL, r.Spec.OnIdle = 60, v1.OnIdlePause })
		if !errors.Is(err, errs.NotSupported) || errs.Of(err).Details["field"] != "on_idle" {
			t.Errorf("on_idle pause: %v", err)
		}
		if n := e.Node(); n.Sandboxes != 0 || n.Allocated != (v1.Resources{}) {
			t.Errorf("%+v", n)
		}
	})
}

// An idle timer that has decided and a request that comes then do not both win.
func TestIdleAndRequestRace(t *testing.T) {
	t.Parallel()
	for _, on := range []v1.OnIdle{v1.OnIdleStop, v1.OnIdlePause} {
		b := newBed(t)
		newStandings(b)
		e := b.start()
		c := b.control(e)
		for range 50 {
			v := b.mustCreate(c, e, func(r *v1.EdgeCreate) { r.Spec.IdleTTL, r.Spec.OnIdle = 3600, on })
			s := e.get(v.ID)
			b.now.Add(int64(2 * time.Hour))
			var wg sync.WaitGroup
			wg.Go(func() { e.checkIdle(s, time.Hour) })
			if err := exec(t.Context(), c, v.ID); err != nil && (on == v1.OnIdlePause || !errors.Is(err, errs.SandboxGone)) {
				t.Errorf("%s: %v", on, err)
			}
			wg.Wait()
		}
	}
}

// A paused sandbox counts with its slot alone, and must fit again to run. If it does not, the refusal
// says what is short and who would make room.
func TestResumeMustFit(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	newStandings(b)
	b.capacity = v1.Resources{Slots: 4, CPUMillis: 1 << 40, MemoryBytes: 2 * v1.DefaultMemoryBytes}
	e := b.start()
	c := b.control(e)
	first := b.mustCreate(c, e, nil).ID
	b.mustPause(c, first)
	busy := b.mustCreate(c, e, nil).ID
	best := b.mustCreate(c, e, func(r *v1.EdgeCreate) { r.Spec.QoS = v1.QoSBest }).ID
	st, err := c.Open(t.Context(), busy, "process.attach", &msg.AttachRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Cancel()
	eventually(t, "the stream is joined", func() bool { return e.get(busy).seen().open == 1 })
	for _, err := range []error{exec(t.Context(), c, first), b.moves(c, "sandbox.resume", first)[first].Error.Err()} {
		x := errs.Of(err)
		if x.Code != errs.NodeFull || x.Sandbox != first || x.Details["resource"] != "memory_bytes" || x.Details["idle"] != best || x.RetryAfter <= 0 ||
			x.Details["idle_memory_bytes"] != fmt.Sprint(v1.DefaultMemoryBytes) || x.Details["be_memory_bytes"] != fmt.Sprint(v1.DefaultMemoryBytes) {
			t.Errorf("%+v", x)
		}
	}
	if v := b.get(c, first); v.State != v1.StatePaused {
		t.Errorf("it is %s", v.State)
	}
	// Paused ones keep their slots.
	b.mustPause(c, best)
	b.mustPause(c, busy)
	b.mustCreate(c, e, nil)
	if _, err := b.create(c, e, nil); errs.Of(err).Details["resource"] != "slots" {
		t.Errorf("a fifth in four slots: %v", err)
	}
	if err := exec(t.Context(), c, first); err != nil {
		t.Errorf("with room: %v", err)
	}
	// A restart counts the same.
	st.Cancel()
	before := e.Node()
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	e = b.start()
	if n := e.Node(); n.Allocated != before.Allocated || n.Paused != 2 {
		t.Errorf("before %+v, after %+v", before, n)
	}
	c = b.control(e)
	b.mustPause(c, first)
	b.free.Store(1 << 20)
	b.now.Add(int64(time.Minute))
	if err := exec(t.Context(), c, busy); errs.Of(err).Details["resource"] != "free_memory" {
		t.Errorf("on a node without free memory: %v", err)
	}
}
