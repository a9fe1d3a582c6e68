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

// restartBusy makes a sandbox and starts its edge again on a backend whose next adoptions fail.
func restartBusy(t *testing.T, b *bed, failures int32) (e *Edge, id string, tries *atomic.Int32) {
	t.Helper()
	first := b.start()
	sb, err := b.create(b.control(first), first, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	tries = new(atomic.Int32)
	tries.Store(failures)
	b.wrap = func(be backend.Backend) backend.Backend {
		return away{Backend: be, adopt: errs.New(errs.GuestUnreachable, "test.adopt", "busy"), tries: tries}
	}
	return b.start(), sb.ID, tries
}

// A sandbox that does not answer at once when its edge starts is as it was, and what is
// asked of it waits until it does.
func TestAdoptionIsTriedAgain(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e, id, tries := restartBusy(t, b, 3)
	c := b.control(e)
	if v := e.get(id).snapshot(); v.State != v1.StateRunning || v.Error != nil {
		t.Errorf("while it does not answer: %+v", v)
	}
	if err := c.Call(t.Context(), id, "guest.info", &msg.Empty{}, &msg.GuestInfo{}); err != nil {
		t.Errorf("an operation that waits for it: %v", err)
	}
	if n := tries.Load(); n != -1 {
		t.Errorf("it was adopted with %d failures left", n)
	}
	v, err := call[v1.Sandbox](t, c, "sandbox.get", &msg.SandboxRequest{Id: id})
	if err != nil || v.State != v1.StateRunning || v.Usage == nil {
		t.Errorf("once it answers: %+v, %v", v, err)
	}
}

func TestOperationsBeforeAdoptionCanBeRetried(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.adopt = time.Hour
	e, id, _ := restartBusy(t, b, 1<<30)
	c := b.control(e)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() {
		_, err := e.get(id).connect(ctx)
		failed <- err
	}()
	cancel()
	if x := errs.Of(<-failed); x.Code != errs.GuestUnreachable || !x.Retryable || x.Sandbox != id {
		t.Errorf("%+v", x)
	}
	// A removal does not wait for it.
	if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: id}, &msg.Empty{}); err != nil {
		t.Error(err)
	}
	if err := c.Call(t.Context(), id, "guest.info", &msg.Empty{}, &msg.GuestInfo{}); !errors.Is(err, errs.SandboxGone) {
		t.Error(err)
	}
	if n := e.Node(); n.Allocated != (v1.Resources{}) || n.Sandboxes != 0 {
		t.Errorf("something is left: %+v", n)
	}
}

// What turns out to be lost only at a later try is.
func TestAdoptionLearnsLaterThatItIsLost(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var tries atomic.Int32
	first := b.start()
	sb, err := b.create(b.control(first), first, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	tries.Store(1)
	b.wrap = func(be backend.Backend) backend.Backend {
		return away{Backend: lostBackend{be}, adopt: errors.New("busy"), tries: &tries}
	}
	e := b.start()
	<-e.get(sb.ID).created
	v := e.get(sb.ID).snapshot()
	if v.State != v1.StateFailed || v.Error == nil || v.Error.Code != string(errs.SandboxLost) || e.Node().Allocated.Slots != 0 {
		t.Errorf("%+v", v)
	}
}

// lostBackend has lost every sandbox that ran.
type lostBackend struct{ backend.Backend }

func (lostBackend) Adopt(context.Context, backend.Spec, json.RawMessage) (backend.Instance, error) {
	return nil, errs.New(errs.SandboxLost, "test.adopt", "its first process has ended")
}
