package edge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/test/lifecycle"
)

// seeded is a source of randomness whose seed the test prints; $DSEC_SEED repeats one.
func seeded(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	if s := os.Getenv("DSEC_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("DSEC_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// driver puts an edge in this process to the test of the lifecycle.
type driver struct {
	*bed
	back *standings
	e    *Edge
	c    *aether.Conn
}

func newDriver(t *testing.T, random *rand.Rand, faults bool, capacity *v1.Resources) *driver {
	b := newBed(t)
	if capacity != nil {
		b.capacity = *capacity
	}
	d := &driver{bed: b, back: newStandings(b)}
	var mu sync.Mutex
	takes := func(most time.Duration) func(ctx context.Context, _ string) error {
		return func(ctx context.Context, _ string) error {
			mu.Lock()
			took, fails := time.Duration(random.Int64N(int64(most))), faults && random.IntN(8) == 0
			mu.Unlock()
			select {
			case <-time.After(took):
			case <-ctx.Done():
				return ctx.Err()
			}
			if fails {
				return errs.New(errs.InternalError, "test", "a fault")
			}
			return nil
		}
	}
	d.back.onPause, d.back.onResume = takes(3*time.Millisecond), takes(time.Millisecond)
	d.e = b.start()
	d.c = b.control(d.e)
	return d
}

func (d *driver) Create(ctx context.Context) (string, error) {
	raw, err := json.Marshal(v1.EdgeCreate{ID: v1.SandboxID(d.e.ID(), d.e.epoch, d.random.Add(1)), Spec: v1.Spec{Backend: v1.BackendHollow, IdleTTL: 3600, OnIdle: v1.OnIdlePause}})
	if err != nil {
		return "", err
	}
	var doc msg.Document
	var v v1.Sandbox
	if err = d.c.Call(ctx, "", "sandbox.create", &msg.Document{Json: raw}, &doc); err == nil {
		err = json.Unmarshal(doc.Json, &v)
	}
	return v.ID, err
}

func (d *driver) Exec(ctx context.Context, id string) error { return exec(ctx, d.c, id) }

func (d *driver) one(ctx context.Context, method, id string) (r v1.PauseResult, err error) {
	raw, err := json.Marshal(v1.EdgePause{IDs: []string{id}})
	if err != nil {
		return r, err
	}
	st, err := d.c.Open(ctx, "", method, &msg.Document{Json: raw})
	if err != nil {
		return r, err
	}
	defer st.Cancel()
	f, err := st.Recv(ctx)
	if err != nil {
		return r, err
	}
	var doc msg.Document
	if err := errors.Join(doc.ParseWire(f.Payload), json.Unmarshal(doc.Json, &r)); err != nil {
		return r, err
	}
	if r.Error != nil {
		return r, r.Error.Err()
	}
	return r, nil
}

func (d *driver) Pause(ctx context.Context, id string) (v1.PauseResult, error) {
	return d.one(ctx, "sandbox.pause", id)
}

func (d *driver) Resume(ctx context.Context, id string) (v1.PauseResult, error) {
	return d.one(ctx, "sandbox.resume", id)
}

func (d *driver) Hint(ctx context.Context, id string) (r v1.HintResult, err error) {
	raw, err := json.Marshal(v1.EdgeHint{ID: id, HintRequest: v1.HintRequest{NextCall: 3600}})
	if err != nil {
		return r, err
	}
	var doc msg.Document
	if err := d.c.Call(ctx, "", "sandbox.hint", &msg.Document{Json: raw}, &doc); err != nil {
		return r, err
	}
	return r, json.Unmarshal(doc.Json, &r)
}

func (d *driver) Idle(_ context.Context, id string) {
	if s := d.e.get(id); s != nil {
		d.now.Add(int64(2 * time.Hour))
		d.e.checkIdle(s, time.Hour)
	}
}

func (d *driver) Delete(ctx context.Context, id string) error {
	return d.c.Call(ctx, "", "sandbox.delete", &msg.SandboxRequest{Id: id}, &msg.Empty{})
}

func (d *driver) Get(ctx context.Context, id string) (v v1.Sandbox, err error) {
	var doc msg.Document
	if err := d.c.Call(ctx, "", "sandbox.get", &msg.SandboxRequest{Id: id}, &doc); err != nil {
		return v, err
	}
	return v, json.Unmarshal(doc.Json, &v)
}

func (d *driver) Restart(ctx context.Context) error {
	d.c.Close()
	if err := d.e.Close(ctx); err != nil {
		return err
	}
	d.e = d.bed.start()
	d.c = d.control(d.e)
	return nil
}

func (d *driver) AtRest(_ context.Context, states map[string]v1.State) error {
	want := v1.Resources{Slots: int64(len(states))}
	paused := int64(0)
	for id, state := range states {
		if stands := d.back.guest(id).stands(); stands != (state == v1.StatePaused) {
			return fmt.Errorf("%s is %s, and that it stands still is %t", id, state, stands)
		}
		if state == v1.StatePaused {
			paused++
			continue
		}
		want.CPUMillis += v1.DefaultCPUMillis
		want.MemoryBytes += v1.DefaultMemoryBytes
	}
	if n := d.e.Node(); n.Allocated != want || n.Paused != paused || n.Sandboxes != int64(len(states)) {
		return fmt.Errorf("the node has %d sandboxes, %d paused, with %+v; want %d, %d, %+v", n.Sandboxes, n.Paused, n.Allocated, len(states), paused, want)
	}
	_, orphans, err := d.e.Audit(d.t.Context())
	if err == nil && len(orphans) > 0 {
		err = fmt.Errorf("orphans: %v", orphans)
	}
	return err
}

type driverStream struct{ st *aether.Stream }

func (d *driver) Attach(ctx context.Context, id string) (lifecycle.Stream, error) {
	st, err := d.c.Open(context.WithoutCancel(ctx), id, "process.attach", &msg.AttachRequest{})
	if err != nil {
		return nil, err
	}
	return driverStream{st}, nil
}

func (s driverStream) Close() { s.st.Cancel() }

func (s driverStream) Ping(ctx context.Context) error {
	if err := s.st.Send(ctx, aether.KindInput, []byte("x")); err != nil {
		return err
	}
	f, err := s.st.Recv(ctx)
	if err == nil && string(f.Payload) != "x" {
		err = fmt.Errorf("got %q", f.Payload)
	}
	return err
}

// Many clients do what they like with some sandboxes, and a model checks what comes of it.
func TestLifecycleAgainstAModel(t *testing.T) {
	t.Parallel()
	rounds := 30
	if testing.Short() {
		rounds = 10
	}
	t.Run("plain", func(t *testing.T) {
		t.Parallel()
		random := seeded(t)
		d := newDriver(t, rand.New(rand.NewPCG(random.Uint64(), 0)), false, nil)
		lifecycle.Run(t, random, d, lifecycle.Options{Rounds: rounds, Sandboxes: 6, Clients: 12, Ops: 6, Restarts: true, Pause: time.Millisecond})
	})
	t.Run("faults", func(t *testing.T) {
		t.Parallel()
		random := seeded(t)
		d := newDriver(t, rand.New(rand.NewPCG(random.Uint64(), 0)), true, nil)
		lifecycle.Run(t, random, d, lifecycle.Options{Rounds: rounds, Sandboxes: 4, Clients: 10, Ops: 5, Faults: true, Restarts: true, Pause: time.Millisecond})
	})
	t.Run("full", func(t *testing.T) {
		t.Parallel()
		random := seeded(t)
		room := v1.Resources{Slots: 8, CPUMillis: 1 << 40, MemoryBytes: 4 * v1.DefaultMemoryBytes}
		d := newDriver(t, rand.New(rand.NewPCG(random.Uint64(), 0)), true, &room)
		lifecycle.Run(t, random, d, lifecycle.Options{Rounds: rounds, Sandboxes: 8, Clients: 12, Ops: 6, Faults: true, Full: true, Restarts: true, Pause: time.Millisecond})
	})
}
