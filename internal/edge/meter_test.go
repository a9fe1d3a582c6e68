package edge

import (
	"context"
	"encoding/json"
	"io"
	"math"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/internal/backend"
)

func TestMeterAddsUp(t *testing.T) {
	t.Parallel()
	var m meter
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	after := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	for _, r := range []struct{ at, gib, want float64 }{
		{0, 1, 0}, {10, 1, 10}, {14, 3, 18}, {14, 5, 18}, {10, 1, 18}, // time that does not pass adds nothing, and none is taken back
		{12, 1, 20},
	} {
		m.read(after(r.at), int64(r.gib*(1<<30)))
		if got := m.save().Integral; math.Abs(got-r.want) > 1e-9 {
			t.Errorf("after %g s: %g GiB·s, want %g", r.at, got, r.want)
		}
	}
	m.sent.Add(7)
	raw, err := json.Marshal(m.save())
	if err != nil {
		t.Fatal(err)
	}
	var kept metered
	if err := json.Unmarshal(raw, &kept); err != nil {
		t.Fatal(err)
	}
	since := after(14)
	again := sandbox{stood: 3 * time.Second, view: v1.Sandbox{State: v1.StatePaused, PausedAt: &since}}
	again.meter.restore(kept)
	u := v1.Usage{MemoryBytes: 1 << 30}
	again.fill(&u, after(16))
	if u.MemoryGiBSeconds != 24 || u.PausedSeconds != 5 || u.SentBytes != 7 {
		t.Errorf("%+v", u)
	}
}

// withMemory has sandboxes of so many bytes.
type withMemory struct {
	backend.Backend
	bytes *atomic.Int64
}

type sized struct {
	backend.Instance
	bytes *atomic.Int64
}

func (s sized) MemoryBytes() (int64, error) { return s.bytes.Load(), nil }

func (s sized) Usage(context.Context) (v1.Usage, error) {
	return v1.Usage{MemoryBytes: s.bytes.Load()}, nil
}

func (b withMemory) Create(ctx context.Context, spec backend.Spec, r backend.StepReport) (backend.Instance, error) {
	i, err := b.Backend.Create(ctx, spec, r)
	return sized{i, b.bytes}, err
}

func (b withMemory) Adopt(ctx context.Context, spec backend.Spec, h json.RawMessage) (backend.Instance, error) {
	i, err := b.Backend.Adopt(ctx, spec, h)
	return sized{i, b.bytes}, err
}

// A sandbox's use is added up from its start on, over a restart of its node, and stays in the sums of its edge.
func TestUsageIsKept(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var bytes atomic.Int64
	bytes.Store(1 << 30)
	b.wrap = func(be backend.Backend) backend.Backend { return withMemory{be, &bytes} }
	e := b.start()
	sb, err := b.create(b.control(e), e, nil)
	if err != nil {
		t.Fatal(err)
	}
	get := func(e *Edge) *v1.Usage {
		t.Helper()
		v, err := call[v1.Sandbox](t, b.control(e), "sandbox.get", &msg.SandboxRequest{Id: sb.ID})
		if err != nil || v.Usage == nil {
			t.Fatalf("%+v, %v", v, err)
		}
		return v.Usage
	}
	near := func(what string, got, want float64) { // the bed's clock moves a little with each look
		t.Helper()
		if got < want || got > want+1 {
			t.Errorf("%s: %g GiB·s, want %g", what, got, want)
		}
	}
	b.now.Add(int64(100 * time.Second))
	u := get(e)
	near("after 100 s", u.MemoryGiBSeconds, 100)
	if u.SentBytes <= 0 { // the handshake
		t.Errorf("%d bytes sent", u.SentBytes)
	}
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.now.Add(int64(50 * time.Second))
	e = b.start()
	again := get(e)
	near("after a restart", again.MemoryGiBSeconds, 150)
	if again.SentBytes < u.SentBytes {
		t.Errorf("%d bytes sent, %d before the restart", again.SentBytes, u.SentBytes)
	}
	if err := b.control(e).Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: sb.ID}, &msg.Empty{}); err != nil {
		t.Fatal(err)
	}
	sum := e.Totals()
	near("when it is gone", sum.GiBSeconds, 150)
	if sum.MemoryBytes != 0 || sum.SentBytes < again.SentBytes {
		t.Errorf("%+v", sum)
	}
}

// A connection that is counted can be written to as directly as before.
func TestCountedConn(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ours, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	var n atomic.Int64
	c := counted(ours, &n)
	defer c.Close()
	if _, ok := c.(syscall.Conn); !ok {
		t.Error("it hides its descriptor")
	}
	if _, err := theirs.Write([]byte("seven b")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 7)); err != nil || n.Load() != 7 {
		t.Errorf("%d counted, %v", n.Load(), err)
	}
	pipe, other := net.Pipe()
	defer pipe.Close()
	defer other.Close()
	if _, ok := counted(pipe, &n).(syscall.Conn); ok {
		t.Error("a pipe has a descriptor")
	}
}
