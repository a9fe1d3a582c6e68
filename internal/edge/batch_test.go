package edge

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// outcomes does a call for several sandboxes.
func outcomes[R any](t *testing.T, c *aether.Conn, method string, req any) (out []R) {
	t.Helper()
	raw, err := json.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	s, err := c.Open(t.Context(), "", method, &msg.Document{Json: raw})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Cancel()
	for {
		f, err := s.Recv(t.Context())
		if errors.Is(err, io.EOF) {
			if err := s.Result(&msg.Empty{}); err != nil {
				t.Fatal(err)
			}
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		var doc msg.Document
		var r R
		if err := doc.ParseWire(f.Payload); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(doc.Json, &r); err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
}

func TestManyAreRemovedByOneCall(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.capacity.Slots = 300
	e := b.start()
	c := b.control(e)
	ids := []string{v1.SandboxID(e.ID(), e.epoch, 1<<40)}
	for range 300 {
		s, err := b.create(c, e, nil)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
	}
	told := map[string]bool{}
	for _, r := range outcomes[v1.EdgeDeleted](t, c, "sandbox.delete_many", v1.EdgeDelete{IDs: ids}) {
		if told[r.ID] {
			t.Errorf("%s is told twice", r.ID)
		}
		told[r.ID] = true
		switch {
		case r.ID == ids[0]:
			if r.Error == nil || r.Error.Code != string(errs.SandboxNotFound) {
				t.Errorf("an unknown one: %+v", r)
			}
		case r.Error != nil || r.Sandbox == nil || r.Sandbox.EndReason != v1.EndRequest:
			t.Errorf("%+v", r)
		}
	}
	if len(told) != len(ids) || e.Node().Sandboxes != 0 {
		t.Errorf("%d outcomes of %d, %d left", len(told), len(ids), e.Node().Sandboxes)
	}
}

// measured has counters that count how often they are read.
type measured struct {
	backend.Backend
	reads atomic.Int64
}

type meteredInstance struct {
	backend.Instance
	m *measured
}

func (m *measured) Create(ctx context.Context, spec backend.Spec, r backend.StepReport) (backend.Instance, error) {
	i, err := m.Backend.Create(ctx, spec, r)
	if err != nil {
		return nil, err
	}
	return &meteredInstance{i, m}, nil
}

func (i *meteredInstance) Counters(context.Context) (v1.Usage, error) {
	i.m.reads.Add(1)
	return v1.Usage{MemoryBytes: 42}, nil
}

func TestUsageOfManyIsReadOnce(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.largest = v1.Resources{CPUMillis: 2000, MemoryBytes: 24 << 30}
	m := &measured{}
	b.wrap = func(be backend.Backend) backend.Backend { m.Backend = be; return m }
	e := b.start()
	c := b.control(e)
	var ids []string
	for range 30 {
		s, err := b.create(c, e, nil)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
	}
	read := func(ids ...string) v1.NodeUsage {
		t.Helper()
		raw, err := json.Marshal(v1.EdgeUsage{IDs: ids})
		if err != nil {
			t.Fatal(err)
		}
		u, err := call[v1.NodeUsage](t, c, "sandbox.usage", &msg.Document{Json: raw})
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	m.reads.Store(0)
	u := read()
	if n := m.reads.Load(); n != 30 || len(u.Items) != 30 || u.CPUMillis != 2000 || u.MemoryBytes != 24<<30 {
		t.Errorf("%d reads: %+v", n, u)
	}
	for _, it := range u.Items {
		if it.Usage == nil || it.Usage.MemoryBytes != 42 || it.State != v1.StateRunning {
			t.Fatalf("%+v", it)
		}
	}
	for range 5 { // within the second: the bed's clock goes a millisecond each time that it is looked at
		read()
	}
	if n := m.reads.Load(); n != 30 {
		t.Errorf("%d reads for several who look at once", n)
	}
	b.now.Add(int64(10 * time.Second))
	read()
	if n := m.reads.Load(); n != 60 {
		t.Errorf("%d reads later on", n)
	}
	u = read(ids[3], v1.SandboxID(e.ID(), e.epoch, 1<<40))
	if n := m.reads.Load(); n != 61 || len(u.Items) != 2 || u.Items[0].ID != ids[3] || u.Items[1].Error == nil || u.Items[1].Error.Code != string(errs.SandboxNotFound) {
		t.Errorf("few who are asked for: %d reads, %+v", n, u)
	}
}
