package edge

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// away is a backend that does not work for a while.
type away struct {
	backend.Backend
	check, adopt error
	tries        *atomic.Int32 // of adoption that fail; nil: all
}

func (a away) Check(ctx context.Context) error {
	if a.check != nil {
		return a.check
	}
	return a.Backend.Check(ctx)
}

func (a away) Adopt(ctx context.Context, s backend.Spec, handle json.RawMessage) (backend.Instance, error) {
	if a.adopt != nil && (a.tries == nil || a.tries.Add(-1) >= 0) {
		return nil, a.adopt
	}
	return a.Backend.Adopt(ctx, s, handle)
}

func TestABackendThatIsAwayForgetsNoSandbox(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]away{
		"check": {check: errors.New("no space left on device")},
		"adopt": {adopt: errors.New("too many open files")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			b.adopt = 100 * time.Millisecond
			e := b.start()
			first, err := b.create(b.control(e), e, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := e.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			for range 2 { // the second start reads what the first has kept
				b.wrap = func(be backend.Backend) backend.Backend { broken.Backend = be; return broken }
				e = b.start()
				c := b.control(e)
				v, err := call[v1.Sandbox](t, c, "sandbox.get", &msg.SandboxRequest{Id: first.ID})
				for err == nil && v.State == v1.StateRunning && broken.adopt != nil { // until it is given up
					time.Sleep(time.Millisecond)
					v, err = call[v1.Sandbox](t, c, "sandbox.get", &msg.SandboxRequest{Id: first.ID})
				}
				if err != nil || v.State != v1.StateFailed || v.Error == nil || v.Error.Code != string(errs.BackendUnusable) || !v.Error.Infra {
					t.Fatalf("while its backend is away: %+v, %v", v, err)
				}
				if n := e.Node().Allocated.Slots; n != 1 {
					t.Errorf("it may run, but %d slots are taken", n)
				}
				if broken.check != nil {
					if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: first.ID}, &msg.Empty{}); !errors.Is(err, errs.BackendUnusable) {
						t.Errorf("a removal that cannot be done: %v", err)
					}
				}
				if err := e.Close(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			b.wrap = nil
			e = b.start()
			c := b.control(e)
			if err := c.Call(t.Context(), first.ID, "guest.info", &msg.Empty{}, &msg.GuestInfo{}); err != nil {
				t.Errorf("its backend is back, but it does not answer: %v", err)
			}
			v, err := call[v1.Sandbox](t, c, "sandbox.get", &msg.SandboxRequest{Id: first.ID})
			if err != nil || v.State != v1.StateRunning || v.Error != nil {
				t.Errorf("its backend is back: %+v, %v", v, err)
			}
			if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: first.ID}, &msg.Empty{}); err != nil {
				t.Errorf("delete: %v", err)
			}
		})
	}
}
