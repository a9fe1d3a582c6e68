package edge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/backend/hollow"
	"dsec/internal/capability"
)

var testKey = []byte("0123456789abcdef0123456789abcdef")

type fakeCluster struct {
	epoch      atomic.Uint64
	superseded chan struct{}
}

func (c *fakeCluster) AllocateEpoch(_ context.Context, _ string, above uint64) (uint64, error) {
	c.epoch.Store(max(c.epoch.Load(), above) + 1)
	return c.epoch.Load(), nil
}
func (c *fakeCluster) SigningKey(context.Context) ([]byte, error) { return testKey, nil }
func (c *fakeCluster) Register(context.Context, v1.Node) (Registration, error) {
	return c, nil
}
func (c *fakeCluster) Withdraw(context.Context) error { return nil }
func (c *fakeCluster) Superseded() <-chan struct{}    { return c.superseded }

type noImages struct{}

func (noImages) Import(context.Context, io.Reader, string, func(v1.ImageProgress)) (v1.Image, error) {
	return v1.Image{}, errs.New(errs.NotSupported, "test", "no images")
}
func (noImages) Delete(context.Context, string) error     { return nil }
func (noImages) List(context.Context) ([]v1.Image, error) { return nil, nil }
func (noImages) Ready(*v1.Image) error                    { return nil }
func (noImages) Has(string) bool                          { return false }
func (noImages) Pull(context.Context, v1.RegistryRequest, func(v1.ImageProgress)) (v1.Image, error) {
	return v1.Image{}, errs.New(errs.NotSupported, "test", "no images")
}
func (noImages) Push(context.Context, *v1.Image, v1.RegistryRequest, func(v1.ImageProgress)) (v1.Pushed, error) {
	return v1.Pushed{}, errs.New(errs.NotSupported, "test", "no images")
}
func (noImages) Export(context.Context, *v1.Image, string, io.Writer) error {
	return errs.New(errs.NotSupported, "test", "no images")
}
func (noImages) Pack(context.Context, Pack) (v1.Image, error) {
	return v1.Image{}, errs.New(errs.NotSupported, "test", "no images")
}
func (noImages) Collapse(context.Context, *v1.Image, int64, int, func(v1.ImageProgress)) (v1.Image, error) {
	return v1.Image{}, errs.New(errs.NotSupported, "test", "no images")
}
func (noImages) Roots() ([]v1.Layer, error)     { return []v1.Layer{{MetaDigest: "own"}}, nil }
func (noImages) Cache([]v1.Layer) v1.ImageCache { return v1.ImageCache{} }
func (noImages) Warm(context.Context, *v1.Image, bool, func(done, total int64)) (bool, error) {
	return false, nil
}
func (noImages) Evict([]v1.Layer) (int64, int, error) { return 0, 0, nil }
func (noImages) Trim(v1.EdgeKeep) error               { return nil }

// bed is a node that edges come and go on.
type bed struct {
	t        *testing.T
	dir      string
	cluster  *fakeCluster
	boot     string
	now      atomic.Int64
	random   atomic.Uint64
	free     atomic.Int64 // memory
	capacity v1.Resources
	largest  v1.Resources
	wrap     func(backend.Backend) backend.Backend
	images   Images
	adopt    time.Duration

	reconcile time.Duration
}

func newBed(t *testing.T) *bed {
	b := &bed{t: t, dir: t.TempDir(), cluster: &fakeCluster{superseded: make(chan struct{})}, boot: "boot1", images: noImages{},
		capacity: v1.Resources{Slots: 100, CPUMillis: 1 << 40, MemoryBytes: 1 << 50}}
	b.now.Store(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano())
	b.free.Store(1 << 40)
	return b
}

func (b *bed) start() *Edge {
	b.t.Helper()
	e, err := b.tryStart()
	if err != nil {
		b.t.Fatal(err)
	}
	return e
}

func (b *bed) tryStart() (*Edge, error) {
	b.t.Helper()
	hb, err := hollow.New(filepath.Join(b.dir, "hollow"))
	if err != nil {
		b.t.Fatal(err)
	}
	var be backend.Backend = hb
	if b.wrap != nil {
		be = b.wrap(be)
	}
	e, err := Start(b.t.Context(), Config{
		Dir: filepath.Join(b.dir, "edge"), Listen: "unix:" + filepath.Join(b.dir, "edge.sock"), Backends: []backend.Backend{be}, Images: b.images, Cluster: b.cluster,
		Capacity: b.capacity, Largest: b.largest, Reserve: Reserve{MemoryBytes: 1 << 30}, Log: slog.New(slog.DiscardHandler),
		Now:    func() time.Time { return time.Unix(0, b.now.Add(int64(time.Millisecond))).UTC() },
		Random: func() uint64 { return b.random.Add(1) }, FreeSpace: func() (int64, int64) { return 1 << 40, b.free.Load() }, BootID: b.boot, AdoptTime: b.adopt, ReconcileEvery: b.reconcile,
	})
	if err != nil {
		hb.Close()
		return nil, err
	}
	b.t.Cleanup(func() {
		if err := e.Close(context.Background()); err != nil {
			b.t.Errorf("close: %v", err)
		}
		hb.Close()
	})
	return e, nil
}

// eventually waits for a condition.
func (b *bed) eventually(what string, is func() bool) {
	b.t.Helper()
	for range 6000 {
		if is() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	b.t.Fatal("not after a long time: " + what)
}

// dial connects with a capability over sandbox.
func (b *bed) dial(e *Edge, sandbox string, rights ...v1.Right) *aether.Conn {
	b.t.Helper()
	signer, err := capability.NewSigner(testKey, e.cfg.Now)
	if err != nil {
		b.t.Fatal(err)
	}
	token, err := signer.Sign(capability.Claims{Subject: "test", Sandbox: sandbox, Rights: rights, Expires: e.cfg.Now().Add(time.Hour)})
	if err != nil {
		b.t.Fatal(err)
	}
	c, err := dialToken(e, token)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { c.Close() })
	return c
}

func dialToken(e *Edge, token string) (*aether.Conn, error) {
	network, address, _ := strings.Cut(e.Address(), ":")
	conn, err := net.Dial(network, address)
	if err != nil {
		return nil, err
	}
	return aether.NewClient(context.Background(), conn, aether.ClientConfig{Token: token})
}

func (b *bed) control(e *Edge) *aether.Conn {
	return b.dial(e, capability.AnySandbox, v1.RightAdmin)
}

func call[T any](t *testing.T, c *aether.Conn, method string, req aether.Message) (T, error) {
	t.Helper()
	var out T
	var d msg.Document
	if err := c.Call(t.Context(), "", method, req, &d); err != nil {
		return out, err
	}
	if err := json.Unmarshal(d.Json, &out); err != nil {
		t.Fatalf("%s: %v in %s", method, err, d.Json)
	}
	return out, nil
}

func (b *bed) create(c *aether.Conn, e *Edge, change func(*v1.EdgeCreate)) (v1.Sandbox, error) {
	b.t.Helper()
	req := v1.EdgeCreate{ID: v1.SandboxID(e.ID(), e.epoch, b.random.Add(1)), Spec: v1.Spec{Backend: v1.BackendHollow}}
	if change != nil {
		change(&req)
	}
	raw, err := json.Marshal(req)
	if err != nil {
		b.t.Fatal(err)
	}
	return call[v1.Sandbox](b.t, c, "sandbox.create", &msg.Document{Json: raw})
}

func TestLifecycle(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	c := b.control(e)
	s, err := b.create(c, e, nil)
	if err != nil {
		t.Fatal(err)
	}
	if s.State != v1.StateRunning || s.Generation != 2 || s.Node != e.ID() || s.StartedAt == nil {
		t.Errorf("created: %+v", s)
	}
	got, err := call[v1.Sandbox](t, c, "sandbox.get", &msg.SandboxRequest{Id: s.ID})
	if err != nil || got.ID != s.ID || got.Usage == nil {
		t.Errorf("get: %+v, %v", got, err)
	}
	var info msg.GuestInfo
	if err := c.Call(t.Context(), s.ID, "guest.info", &msg.Empty{}, &info); err != nil || info.Version != "hollow" {
		t.Errorf("guest.info over the edge: %+v, %v", info, err)
	}
	if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: s.ID}, &msg.Empty{}); err != nil {
		t.Fatal(err)
	}
	for _, method := range []string{"sandbox.get", "sandbox.delete"} {
		if err := c.Call(t.Context(), "", method, &msg.SandboxRequest{Id: s.ID}, &msg.Empty{}); !errors.Is(err, errs.SandboxGone) {
			t.Errorf("%s of a removed one: %v", method, err)
		}
	}
	if err := c.Call(t.Context(), s.ID, "guest.info", &msg.Empty{}, &info); !errors.Is(err, errs.SandboxGone) {
		t.Errorf("guest.info of a removed one: %v", err)
	}
	never := v1.SandboxID(e.ID(), e.epoch, 1<<40)
	if err := c.Call(t.Context(), never, "guest.info", &msg.Empty{}, &info); !errors.Is(err, errs.SandboxNotFound) {
		t.Errorf("guest.info of one that never was: %v", err)
	}
	if used := e.Node().Allocated; used != (v1.Resources{}) {
		t.Errorf("still allocated: %+v", used)
	}
	if _, orphans, err := e.Audit(t.Context()); err != nil || len(orphans) != 0 {
		t.Errorf("audit: %v, %v", orphans, err)
	}
}

func TestAdmissionNamesTheResource(t *testing.T) {
	t.Parallel()
	for resource, capacity := range map[string]v1.Resources{
		"slots":        {Slots: 2, CPUMillis: 1 << 40, MemoryBytes: 1 << 50},
		"cpu_millis":   {Slots: 99, CPUMillis: 2500, MemoryBytes: 1 << 50},
		"memory_bytes": {Slots: 99, CPUMillis: 1 << 40, MemoryBytes: 2*v1.DefaultMemoryBytes + 1},
	} {
		t.Run(resource, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.capacity = capacity
			e := b.start()
			c := b.control(e)
			var first v1.Sandbox
			for n := range 2 {
				s, err := b.create(c, e, nil)
				if err != nil {
					t.Fatalf("create %d: %v", n, err)
				}
				first = s
			}
			_, err := b.create(c, e, nil)
			x := errs.Of(err)
			if x.Code != errs.NodeFull || x.Details["resource"] != resource || x.RetryAfter <= 0 || x.Sandbox == "" || !x.Infra {
				t.Errorf("third create: %+v", x)
			}
			_, err = b.create(c, e, func(r *v1.EdgeCreate) { r.Spec.CPUMillis, r.Spec.MemoryBytes = 1<<41, 1<<51 })
			// Slots, which come first, are only full.
			if x := errs.Of(err); resource != "slots" && (x.Code != errs.SpecTooLarge || x.Retryable || x.Infra) {
				t.Errorf("more than the whole node: %+v", x)
			}
			if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: first.ID}, &msg.Empty{}); err != nil {
				t.Fatal(err)
			}
			if _, err := b.create(c, e, nil); err != nil {
				t.Errorf("after a removal: %v", err)
			}
		})
	}
	// Overcommit is for many: one sandbox gets no more than the machine has.
	t.Run("largest", func(t *testing.T) {
		t.Parallel()
		b := newBed(t)
		b.largest = v1.Resources{CPUMillis: 2000, MemoryBytes: 1 << 30}
		e := b.start()
		c := b.control(e)
		for range 3 {
			if _, err := b.create(c, e, func(r *v1.EdgeCreate) { r.Spec.CPUMillis, r.Spec.MemoryBytes = 2000, 1<<30 }); err != nil {
				t.Fatal(err)
			}
		}
		for resource, ask := range map[string]v1.Spec{
			"cpu_millis": {CPUMillis: 2001, MemoryBytes: 1 << 30}, "memory_bytes": {CPUMillis: 2000, MemoryBytes: 1<<30 + 1},
		} {
			_, err := b.create(c, e, func(r *v1.EdgeCreate) { r.Spec.CPUMillis, r.Spec.MemoryBytes = ask.CPUMillis, ask.MemoryBytes })
			if x := errs.Of(err); x.Code != errs.SpecTooLarge || x.Details["resource"] != resource {
				t.Errorf("%s: %+v", resource, x)
			}
		}
	})
	t.Run("free_memory", func(t *testing.T) {
		t.Parallel()
		b := newBed(t)
		e := b.start()
		b.free.Store(1 << 20)
		b.now.Add(int64(time.Second)) // it does not look on every create
		if _, err := b.create(b.control(e), e, nil); errs.Of(err).Details["resource"] != "free_memory" {
			t.Errorf("create on a node without free memory: %v", err)
		}
	})
}

func TestAdmissionNeverOversells(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.capacity.Slots = 10
	e := b.start()
	c := b.control(e)
	var ok atomic.Int64
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, err := b.create(c, e, nil); err == nil {
				ok.Add(1)
			} else if !errors.Is(err, errs.NodeFull) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if ok.Load() != 10 {
		t.Errorf("%d sandboxes in 10 slots", ok.Load())
	}
}

func TestRestartAdopts(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	c := b.control(e)
	var ids []string
	for range 5 {
		s, err := b.create(c, e, func(r *v1.EdgeCreate) { r.Spec.Labels = map[string]string{"job": "x"} })
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
	}
	// One vanishes while the edge is away, another is half-made, a third has no record.
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(b.dir, "hollow", ids[0])); err != nil {
		t.Fatal(err)
	}
	stray := v1.SandboxID(e.ID(), e.epoch, 1<<41)
	if err := os.WriteFile(filepath.Join(b.dir, "hollow", stray), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	e2 := b.start()
	if e2.ID() != e.ID() || e2.epoch != e.epoch {
		t.Fatalf("identity changed over a restart: %s/%d, %s/%d", e.ID(), e.epoch, e2.ID(), e2.epoch)
	}
	c2 := b.control(e2)
	var info msg.GuestInfo
	for _, id := range ids[1:] {
		if err := c2.Call(t.Context(), id, "guest.info", &msg.Empty{}, &info); err != nil {
			t.Errorf("an adopted sandbox does not answer: %v", err)
		}
	}
	lost, err := call[v1.Sandbox](t, c2, "sandbox.get", &msg.SandboxRequest{Id: ids[0]})
	if err != nil || lost.State != v1.StateFailed || lost.Error == nil || lost.Error.Code != string(errs.SandboxLost) || !lost.Error.Infra {
		t.Errorf("a vanished sandbox: %+v, %v", lost, err)
	}
	if n := e2.Node(); n.Allocated.Slots != 4 {
		t.Errorf("allocated after adoption: %+v", n.Allocated)
	}
	if _, err := os.Lstat(filepath.Join(b.dir, "hollow", stray)); err == nil {
		t.Error("a sandbox without a record was left")
	}
	for _, id := range ids {
		if err := c2.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: id}, &msg.Empty{}); err != nil {
			t.Errorf("delete: %v", err)
		}
	}
}

func TestRemovedIsGoneAfterRestarts(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	c := b.control(e)
	s, err := b.create(c, e, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: s.ID}, &msg.Empty{}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second reads what the first has rewritten
		if err := e.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		e = b.start()
		c = b.control(e)
		for _, method := range []string{"sandbox.get", "sandbox.delete"} {
			if err := c.Call(t.Context(), "", method, &msg.SandboxRequest{Id: s.ID}, &msg.Empty{}); !errors.Is(err, errs.SandboxGone) {
				t.Errorf("%s of one removed before: %v", method, err)
			}
		}
	}
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.boot = "boot2"
	e = b.start()
	if err := b.control(e).Call(t.Context(), "", "sandbox.get", &msg.SandboxRequest{Id: s.ID}, &msg.Empty{}); !errors.Is(err, errs.SandboxLost) {
		t.Errorf("one removed before a reboot: %v", err)
	}
}

func TestRebootLosesSandboxes(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	s, err := b.create(b.control(e), e, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.boot = "boot2"
	e2 := b.start()
	if e2.epoch != e.epoch+1 {
		t.Errorf("epoch %d after %d", e2.epoch, e.epoch)
	}
	var info msg.GuestInfo
	if err := b.control(e2).Call(t.Context(), s.ID, "guest.info", &msg.Empty{}, &info); !errors.Is(err, errs.SandboxLost) {
		t.Errorf("an id of an old epoch: %v", err)
	}
	if ids, err := e2.backends[v1.BackendHollow].List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("left from before the reboot: %v, %v", ids, err)
	}
}

func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	c := b.control(e)
	withKey := func(r *v1.EdgeCreate) { r.IdempotencyKey = "k" }
	var mu sync.Mutex
	ids := map[string]bool{}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			s, err := b.create(c, e, withKey)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			ids[s.ID] = true
			mu.Unlock()
		})
	}
	wg.Wait()
	if len(ids) != 1 {
		t.Errorf("one key made %d sandboxes", len(ids))
	}
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	e2 := b.start()
	s, err := b.create(b.control(e2), e2, withKey)
	if err != nil || !ids[s.ID] {
		t.Errorf("after a restart the key made %s: %v", s.ID, err)
	}
}

func TestRights(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	s, err := b.create(b.control(e), e, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dialToken(e, "dcap1.forged.forged"); !errors.Is(err, errs.BadToken) {
		t.Errorf("a forged capability: %v", err)
	}
	own := b.dial(e, s.ID, v1.RightSandbox)
	var info msg.GuestInfo
	if err := own.Call(t.Context(), s.ID, "guest.info", &msg.Empty{}, &info); err != nil {
		t.Errorf("own sandbox: %v", err)
	}
	other := v1.SandboxID(e.ID(), e.epoch, 1<<42)
	if err := own.Call(t.Context(), other, "guest.info", &msg.Empty{}, &info); !errors.Is(err, errs.BadToken) {
		t.Errorf("another's sandbox: %v", err)
	}
	if err := own.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: s.ID}, &msg.Empty{}); !errors.Is(err, errs.MissingRight) {
		t.Errorf("management with a sandbox's capability: %v", err)
	}
	reader := b.dial(e, s.ID, v1.RightRead)
	if err := reader.Call(t.Context(), s.ID, "guest.info", &msg.Empty{}, &info); !errors.Is(err, errs.MissingRight) {
		t.Errorf("operating with the right to read: %v", err)
	}
}

func TestWatch(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	c := b.control(e)
	before, err := b.create(c, e, nil)
	if err != nil {
		t.Fatal(err)
	}
	st, err := c.Open(t.Context(), "", "edge.watch", &msg.EdgeWatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Cancel()
	next := func() v1.EdgeEvent {
		t.Helper()
		f, err := st.Recv(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var d msg.Document
		if err := d.ParseWire(f.Payload); err != nil {
			t.Fatal(err)
		}
		var ev v1.EdgeEvent
		if err := json.Unmarshal(d.Json, &ev); err != nil {
			t.Fatal(err)
		}
		return ev
	}
	if ev := next(); !ev.Reset || len(ev.Sandboxes) != 1 || ev.Sandboxes[0].ID != before.ID || ev.Node == nil {
		t.Fatalf("first event: %+v", ev)
	}
	s, err := b.create(c, e, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: s.ID}, &msg.Empty{}); err != nil {
		t.Fatal(err)
	}
	var states []string
	seq := uint64(0)
	for !slices.Contains(states, "removed") {
		ev := next()
		if ev.Seq < seq {
			t.Errorf("numbers go back: %d after %d", ev.Seq, seq)
		}
		seq = ev.Seq
		for _, x := range ev.Sandboxes {
			states = append(states, string(x.State))
		}
		if slices.Contains(ev.Removed, s.ID) {
			states = append(states, "removed")
		}
	}
	if want := []string{"creating", "running", "stopping", "removed"}; !slices.Equal(states, want) {
		t.Errorf("saw %v, want %v", states, want)
	}
	// One that is too old gets everything again.
	old, err := c.Open(t.Context(), "", "edge.watch", &msg.EdgeWatchRequest{From: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer old.Cancel()
	st = old
	if ev := next(); !ev.Reset {
		t.Errorf("a watcher from long ago got %+v", ev)
	}
}

func TestTTLRemoves(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	c := b.control(e)
	s, err := b.create(c, e, func(r *v1.EdgeCreate) { r.Spec.MaxTTL = 0.05 })
	if err != nil || s.ExpiresAt == nil {
		t.Fatalf("%+v, %v", s, err)
	}
	deadline := time.Now().Add(20 * time.Second)
	for e.get(s.ID) != nil {
		if time.Now().After(deadline) {
			t.Fatal("it is still there long after its time")
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// A lease keeps a sandbox as long as someone renews it; a restart gives a whole new one.
func TestLease(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	c := b.control(e)
	leased := func(r *v1.EdgeCreate) { r.Spec.Lease = v1.MinLease }
	var ids []string
	for _, change := range []func(*v1.EdgeCreate){leased, leased, nil} {
		s, err := b.create(c, e, change)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
	}
	kept, left, without := ids[0], ids[1], ids[2]
	renew := func(c *aether.Conn, id string) error {
		return c.Call(t.Context(), "", "sandbox.renew", &msg.SandboxRequest{Id: id}, &msg.Empty{})
	}
	until := func(what string, e *Edge, id string, each func()) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); e.get(id) != nil; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: it is still there", what)
			}
			b.now.Add(int64(5 * time.Millisecond))
			each()
		}
	}
	until("not renewed", e, left, func() {
		if err := renew(c, kept); err != nil {
			t.Fatalf("renew: %v", err)
		}
	})
	if e.get(kept) == nil || e.get(without) == nil {
		t.Fatal("a renewed one, or one without a lease, was removed")
	}
	if err := renew(c, left); !errors.Is(err, errs.SandboxGone) {
		t.Errorf("renew after the end: %v", err)
	}
	if err := renew(c, without); err != nil {
		t.Errorf("renew without a lease: %v", err)
	}
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.now.Add(int64(time.Hour)) // longer away than any lease
	e2 := b.start()
	if e2.get(kept) == nil {
		t.Fatal("a restart ended the lease")
	}
	c2 := b.control(e2)
	if err := renew(c2, kept); err != nil {
		t.Errorf("renew after the restart: %v", err)
	}
	until("not renewed after a restart", e2, kept, func() {})
	if e2.get(without) == nil {
		t.Error("one without a lease was removed")
	}
	if _, err := b.create(c2, e2, func(r *v1.EdgeCreate) { r.Spec.Lease = 0.5 }); !errors.Is(err, errs.BadSpec) {
		t.Errorf("a lease below the minimum: %v", err)
	}
}

// slow delays creates until released, and can fail them.
type slow struct {
	backend.Backend
	gate chan struct{}
	fail error
}

func (s *slow) Create(ctx context.Context, spec backend.Spec, r backend.StepReport) (backend.Instance, error) {
	if s.gate != nil {
		select {
		case <-s.gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if s.fail != nil {
		return nil, s.fail
	}
	return s.Backend.Create(ctx, spec, r)
}

// A journal that is damaged stops the edge while its sandboxes may run; after a restart
// of the machine none does.
func TestDamagedJournalMattersUntilTheMachineRestarts(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	if _, err := b.create(b.control(e), e, nil); err != nil {
		t.Fatal(err)
	}
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(b.dir, "edge", "journal")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	bad := append(good[:len(good)-30:len(good)-30], make([]byte, 30)...) // zeros to the end, no newline
	if err := os.WriteFile(path, bad, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := b.tryStart(); !errors.Is(err, errs.DataCorrupt) || !strings.Contains(err.Error(), path) {
		t.Fatalf("with a damaged journal: %v", err)
	}
	b.boot = "boot2"
	e = b.start()
	if n := e.Node().Sandboxes; n != 0 {
		t.Errorf("%d sandboxes after a restart of the machine", n)
	}
	if kept, err := os.ReadFile(path + ".damaged"); err != nil || string(kept) != string(bad) {
		t.Errorf("the damaged file is not kept: %v", err)
	}
}

func TestDeleteDuringCreate(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.wrap = func(be backend.Backend) backend.Backend { return &slow{Backend: be, gate: make(chan struct{})} }
	e := b.start()
	c := b.control(e)
	id := v1.SandboxID(e.ID(), e.epoch, 7)
	failed := make(chan error)
	go func() {
		_, err := b.create(c, e, func(r *v1.EdgeCreate) { r.ID = id })
		failed <- err
	}()
	for e.get(id) == nil {
		time.Sleep(time.Millisecond)
	}
	if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: id}, &msg.Empty{}); err != nil {
		t.Errorf("delete of a sandbox being created: %v", err)
	}
	if err := <-failed; err == nil {
		t.Error("the create succeeded although it was deleted")
	}
	if e.get(id) != nil || e.Node().Allocated.Slots != 0 {
		t.Error("something is left")
	}
}

func TestVanishedCallerLeavesNothing(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.wrap = func(be backend.Backend) backend.Backend { return &slow{Backend: be, gate: make(chan struct{})} }
	e := b.start()
	c := b.control(e)
	id := v1.SandboxID(e.ID(), e.epoch, 8)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := b.create(c, e, func(r *v1.EdgeCreate) { r.ID = id }); err == nil {
			t.Error("no error")
		}
	}()
	for e.get(id) == nil {
		time.Sleep(time.Millisecond)
	}
	c.Close()
	<-done
	deadline := time.Now().Add(20 * time.Second)
	for e.get(id) != nil || e.Node().Allocated.Slots != 0 {
		if time.Now().After(deadline) {
			t.Fatal("the sandbox of a caller that went away is still there")
		}
		time.Sleep(time.Millisecond)
	}
}

func TestFailedCreateSaysWhoAndWhere(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.wrap = func(be backend.Backend) backend.Backend {
		return &slow{Backend: be, fail: fmt.Errorf("start: %w", errs.New(errs.DiskFull, "test.create", "no space"))}
	}
	e := b.start()
	_, err := b.create(b.control(e), e, nil)
	x := errs.Of(err)
	if x.Code != errs.DiskFull || x.Node != e.ID() || x.Sandbox == "" || x.Phase != "test.create" {
		t.Errorf("%+v", x)
	}
	if n := e.Node(); n.CreatesFail != 1 || n.Allocated.Slots != 0 || n.Sandboxes != 0 {
		t.Errorf("%+v", n)
	}
}

func TestSupersededEdgeStops(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	close(b.cluster.superseded)
	select {
	case <-e.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("it goes on serving beside its successor")
	}
}

// crowd counts removals that are at work at once, and lets each take a while.
type crowd struct {
	backend.Backend
	now, most atomic.Int64
	gate      chan struct{}
}

func (c *crowd) Delete(ctx context.Context, id string) error {
	n := c.now.Add(1)
	defer c.now.Add(-1)
	for most := c.most.Load(); n > most && !c.most.CompareAndSwap(most, n); most = c.most.Load() {
	}
	select {
	case <-c.gate:
	case <-ctx.Done():
		return ctx.Err()
	}
	return c.Backend.Delete(ctx, id)
}

// The kernel frees what each removal leaves from one queue, which blocks when it gets too much.
func TestRemovalsAreBounded(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.capacity.Slots = 1000
	busy := &crowd{gate: make(chan struct{})}
	b.wrap = func(be backend.Backend) backend.Backend { busy.Backend = be; return busy }
	e := b.start()
	c := b.control(e)
	const extra = 20
	var ids []string
	for range removals + extra {
		v, err := b.create(c, e, nil)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, v.ID)
	}
	var wg sync.WaitGroup
	for _, id := range ids[:removals] {
		wg.Go(func() {
			if _, err := e.remove(t.Context(), id, v1.EndRequest); err != nil {
				t.Error(err)
			}
		})
	}
	for busy.now.Load() < removals {
		time.Sleep(time.Millisecond)
	}
	// One more waits, no longer than its caller does, and then is tried again.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := e.remove(ctx, ids[removals], v1.EndRequest); !errors.Is(err, errs.DeadlineExceeded) {
		t.Errorf("a removal beyond the bound: %v", err)
	}
	for _, id := range ids[removals+1:] {
		wg.Go(func() {
			if _, err := e.remove(t.Context(), id, v1.EndRequest); err != nil {
				t.Error(err)
			}
		})
	}
	close(busy.gate)
	wg.Wait()
	for deadline := time.Now().Add(20 * time.Second); e.get(ids[removals]) != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the removal whose caller left was never tried again")
		}
	}
	if most := busy.most.Load(); most != removals {
		t.Errorf("%d removals at once, want %d", most, removals)
	}
}

// A create that failed while the node stops, with more to remove than it may at once, leaves
// nothing to the next start.
func TestStoppingNodeLeavesNoFailedCreate(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.wrap = func(be backend.Backend) backend.Backend { return &slow{Backend: be, fail: errors.New("no")} }
	e := b.start()
	for range removals {
		e.removing <- struct{}{}
	}
	id := v1.SandboxID(e.ID(), e.epoch, 9)
	c := b.control(e)
	failed := make(chan error)
	go func() {
		_, err := b.create(c, e, func(r *v1.EdgeCreate) { r.ID = id })
		failed <- err
	}()
	for e.get(id) == nil {
		time.Sleep(time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_ = e.Close(ctx) // which waits for creates to be undone as long as its caller does
	if err := <-failed; err == nil {
		t.Error("the create succeeded")
	}
	b.wrap = nil
	if e := b.start(); e.get(id) != nil || e.Node().Allocated.Slots != 0 {
		t.Errorf("left: %+v", e.get(id).snapshot())
	}
}
