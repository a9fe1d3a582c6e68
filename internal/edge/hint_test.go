package edge

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// The chapter's examples: nothing is saved by pausing 2 GiB for 9 s, where moving takes all of that, but
// 3 GiB·s by pausing 512 MiB.
func TestHintJudgesAsTheChapterDoes(t *testing.T) {
	t.Parallel()
	chapter := Costs{CPUPrice: 1e-9, Pause: 1, PausePerGiB: 4 * time.Second, Resume: time.Second, ResumePerGiB: 1}
	near := func(a, b float64) bool { return math.Abs(a-b) < 1e-6 }
	c := newCosts(chapter)
	if v := c.judge(2<<30, 9*time.Second, 0); v.pays || !near(v.hold, 18) || !near(v.move, 18) {
		t.Errorf("2 GiB for 9 s: %+v", v)
	}
	if v := c.judge(512<<20, 9*time.Second, 0); !v.pays || !near(v.hold-v.move, 3) {
		t.Errorf("512 MiB for 9 s: %+v", v)
	}
	// What the transition itself costs comes on top: it pays from some time on.
	chapter.CPUPrice = 14 / 4.5
	c = newCosts(chapter)
	from := 3 + 3*(14/4.5)/0.5 // moving, and its price in seconds of holding 512 MiB
	if v := c.judge(512<<20, time.Duration(0.99*from*1e9), 0); v.pays {
		t.Errorf("just too near: %+v", v)
	}
	if v := c.judge(512<<20, time.Duration(1.01*from*1e9), 0); !v.pays || !strings.Contains(v.why, "512 MiB") || !strings.Contains(v.why, "from 21.7 s on") {
		t.Errorf("just far enough: %+v", v)
	}
	// Memory is worth more on a node that has little left.
	chapter.Memory = 64 << 30
	c = newCosts(chapter)
	if v := c.judge(512<<20, 15*time.Second, 32<<30); v.pays {
		t.Errorf("on an empty node: %+v", v)
	}
	if v := c.judge(512<<20, 15*time.Second, 4<<30); !v.pays {
		t.Errorf("on a full one: %+v", v)
	}
}

// What pauses take here moves the costs.
func TestCostsAreMeasured(t *testing.T) {
	t.Parallel()
	c := newCosts(Costs{})
	const bytes, next = 1 << 30, 5 * time.Second
	if v := c.judge(bytes, next, 0); v.pays {
		t.Errorf("with the times to begin with: %+v", v)
	}
	for range 100 {
		c.paused(bytes, 110*time.Millisecond)
		c.resumed(bytes, 60*time.Millisecond)
		c.paused(1<<20, 10*time.Millisecond)
		c.resumed(1<<20, 10*time.Millisecond)
	}
	v := c.judge(bytes, next, 0)
	if !v.pays || v.pause < 100*time.Millisecond || v.pause > 120*time.Millisecond || v.resume < 50*time.Millisecond || v.resume > 70*time.Millisecond {
		t.Errorf("with those of a fast swap device: %+v", v)
	}
}

func (b *bed) hint(c *aether.Conn, id string, next time.Duration) (v1.HintResult, error) {
	b.t.Helper()
	raw, err := json.Marshal(v1.EdgeHint{ID: id, HintRequest: v1.HintRequest{NextCall: v1.Seconds(next.Seconds())}})
	if err != nil {
		b.t.Fatal(err)
	}
	return call[v1.HintResult](b.t, c, "sandbox.hint", &msg.Document{Json: raw})
}

func TestHint(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	back := newStandings(b)
	var works msg.Activity
	back.activity = func(string) (*msg.Activity, error) { return &works, nil }
	e := b.start()
	c := b.control(e)
	id := b.mustCreate(c, e, nil).ID
	expect := func(action, why string, next time.Duration) v1.HintResult {
		t.Helper()
		r, err := b.hint(c, id, next)
		if err != nil || r.Action != action || !strings.Contains(r.Why, why) || r.Sandbox == nil || r.Sandbox.ID != id {
			t.Fatalf("%+v, %v", r, err)
		}
		return r
	}
	if r := expect("keep", "holding 512 MiB", time.Second); r.HoldCost <= 0 || r.HoldCost > r.MoveCost || r.MemoryBytes != 512<<20 {
		t.Errorf("%+v", r)
	}
	works.BusySessions = 1
	expect("keep", "a command runs", time.Hour)
	works.BusySessions = 0
	st, err := c.Open(t.Context(), id, "process.attach", &msg.AttachRequest{})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the stream is joined", func() bool { return e.get(id).seen().open == 1 })
	expect("keep", "in use", time.Hour)
	st.Cancel()
	eventually(t, "the stream has ended", func() bool { return e.get(id).seen().open == 0 })
	if r := expect("pause", "pays from", time.Hour); r.Sandbox.State != v1.StatePaused || r.Sandbox.PauseReason != v1.PauseHint || r.HoldCost <= r.MoveCost {
		t.Errorf("%+v", r)
	}
	// A call that comes sooner ends it.
	generation := b.get(c, id).Generation
	if err := exec(t.Context(), c, id); err != nil {
		t.Fatal(err)
	}
	b.mustPause(c, id)
	e.resumeAhead(e.get(id), generation) // its timer, which fires in vain
	if v := b.get(c, id); v.State != v1.StatePaused {
		t.Errorf("a hint that is over: %s", v.State)
	}
	expect("pause", "already", time.Millisecond) // nor does one wake who was paused by request
	if v := b.get(c, id); v.State != v1.StatePaused {
		t.Errorf("a hint for one that somebody paused: %s", v.State)
	}
	if r := b.moves(c, "sandbox.resume", id)[id]; r.Error != nil {
		t.Fatal(r.Error)
	}
	// It is resumed ahead of the call; a new hint takes the place of the one before.
	expect("pause", "pays from", time.Hour)
	resumes := back.guest(id).resumes.Load()
	expect("pause", "already", time.Millisecond)
	eventually(t, "it is resumed before it is called", func() bool { return b.get(c, id).State == v1.StateRunning })
	if n := back.guest(id).resumes.Load(); n != resumes+1 {
		t.Errorf("resumed %d times", n-resumes)
	}
	if _, err := b.hint(c, id, -time.Second); !errors.Is(err, errs.BadRequest) {
		t.Errorf("a call in the past: %v", err)
	}
	// What cannot be paused is kept, and it says why.
	b2 := newBed(t)
	newStandings(b2).onPause = func(context.Context, string) error { return errs.New(errs.SwapFull, "test", "the swap is full") }
	e = b2.start()
	c = b2.control(e)
	id = b2.mustCreate(c, e, nil).ID
	if r, err := b2.hint(c, id, time.Hour); err != nil || r.Action != "keep" || !strings.Contains(r.Why, "the swap is full") {
		t.Errorf("%+v, %v", r, err)
	}
}
