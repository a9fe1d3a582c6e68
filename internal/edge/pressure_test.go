package edge

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/edge/pressure"
)

// A node that runs out of memory gives up the sandbox that matters least, and no more than it must. What went on
// in it, and whoever asks for it, is told why and that it is no fault of theirs.
func TestEviction(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.wrap = func(be backend.Backend) backend.Backend { return newBusy(t, be) }
	const had = 200 << 20 // by each
	var short atomic.Bool
	var live atomic.Int64
	b.memory = func() (pressure.Reading, error) {
		if !short.Load() {
			return pressure.Reading{FreeBytes: 1 << 40}, nil
		}
		return pressure.Reading{FreeBytes: 400<<20 + had*(3-live.Load())}, nil
	}
	e := b.start()
	c := b.control(e)
	var ids []string
	for _, spec := range []v1.Spec{{QoS: v1.QoSLatency, Priority: -1000}, {QoS: v1.QoSBest, Priority: 1}, {QoS: v1.QoSBest}} {
		s, err := b.create(c, e, func(r *v1.EdgeCreate) { r.Spec.QoS, r.Spec.Priority = spec.QoS, spec.Priority })
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
		live.Add(1)
	}
	victim := ids[2]
	op, err := c.Open(t.Context(), victim, "process.start", &msg.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := op.Recv(t.Context()); err != nil {
		t.Fatal(err)
	}
	short.Store(true)
	_, err = op.Recv(t.Context())
	live.Add(-1)
	check := func(what string, err error) {
		t.Helper()
		x := errs.Of(err)
		if !errors.Is(err, errs.SandboxGone) || !x.Infra || x.Details["end_reason"] != string(v1.EndEvicted) {
			t.Errorf("%s: %+v", what, x)
		}
	}
	check("an operation in it", err)
	eventually(t, "it is gone", func() bool { return e.get(victim) == nil })
	check("one that comes later", c.Call(t.Context(), victim, "guest.info", &msg.Empty{}, &msg.Empty{}))
	for range 3 { // the levels are held, and nobody else goes
		if n := e.Node(); n.Pressure != "evict" || n.Sandboxes != 2 {
			t.Errorf("afterwards: %+v", n)
		}
		time.Sleep(150 * time.Millisecond)
	}
	b.now.Add(int64(time.Second))
	if _, err := b.create(c, e, nil); !errors.Is(err, errs.NodeFull) || errs.Of(err).Details["resource"] != "memory_pressure" || errs.Of(err).RetryAfter == 0 {
		t.Errorf("a create: %+v", errs.Of(err))
	}
}

// What cannot be read is no reason to evict anybody.
func TestUnreadableMemoryEvictsNobody(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	b.memory = func() (pressure.Reading, error) { return pressure.Reading{}, errors.New("no /proc") }
	e.cfg.Memory = b.memory
	p := e.newPressure()
	if next := p.Step(t.Context()); p.Level() != pressure.None || next != time.Second {
		t.Errorf("level %q, the next look in %v", p.Level(), next)
	}
}

// With a little more memory left, sandboxes of class be are paused, which loses nothing: the next request resumes one
// once there is room.
func TestPressurePauses(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var free atomic.Int64
	free.Store(1 << 40)
	b.memory = func() (pressure.Reading, error) { return pressure.Reading{FreeBytes: free.Load()}, nil }
	e := b.start()
	c := b.control(e)
	var ids []string
	for _, qos := range []v1.QoS{v1.QoSLatency, v1.QoSBest, v1.QoSBest} {
		s, err := b.create(c, e, func(r *v1.EdgeCreate) { r.Spec.QoS = qos })
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
	}
	free.Store(700 << 20)
	for _, id := range ids[1:] {
		eventually(t, "it is paused", func() bool { return b.get(c, id).State == v1.StatePaused })
		if v := b.get(c, id); v.PauseReason != v1.PausePressure {
			t.Errorf("paused for %q", v.PauseReason)
		}
	}
	if v := b.get(c, ids[0]); v.State != v1.StateRunning {
		t.Errorf("the one of class ls is %s", v.State)
	}
	if n := e.Node(); n.Pressure != "pause" || n.Paused != 2 || n.Sandboxes != 3 {
		t.Errorf("the node: %+v", n)
	}
	free.Store(1 << 40)
	eventually(t, "a request resumes it", func() bool {
		_ = exec(t.Context(), c, ids[1]) // whatever its guest says to that
		return b.get(c, ids[1]).State == v1.StateRunning
	})
}
