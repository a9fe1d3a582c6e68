package edge

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// file is what the hollow backend has of a sandbox.
func (b *bed) file(id string) string { return filepath.Join(b.dir, "hollow", id) }

func (b *bed) there(id string) bool {
	b.t.Helper()
	_, err := os.Lstat(b.file(id))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		b.t.Fatal(err)
	}
	return err == nil
}

// failing is a backend whose next removals fail.
type failing struct {
	backend.Backend
	left *atomic.Int32
}

func (f failing) Delete(ctx context.Context, id string) error {
	if f.left.Add(-1) >= 0 {
		return errors.New("device or resource busy")
	}
	return f.Backend.Delete(ctx, id)
}

func TestReconcilerRemovesOrphans(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var fail atomic.Int32
	b.wrap = func(be backend.Backend) backend.Backend { return failing{be, &fail} }
	e := b.start()
	kept, err := b.create(b.control(e), e, nil)
	if err != nil {
		t.Fatal(err)
	}
	orphan := v1.SandboxID(e.ID(), e.epoch, 1<<40)
	if err := os.WriteFile(b.file(orphan), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	e.reconciler.round(t.Context())
	if !b.there(orphan) {
		t.Error("removed when it was seen once: somebody may have been at work on it")
	}
	fail.Store(1)
	e.reconciler.round(t.Context())
	if !b.there(orphan) || e.reconciler.counts().Failed != 1 {
		t.Errorf("a removal that fails: %+v", e.reconciler.counts())
	}
	e.reconciler.round(t.Context())
	want := Reconciled{Rounds: 3, Orphans: 1, Failed: 1}
	if got := e.reconciler.counts(); b.there(orphan) || got != want {
		t.Errorf("%+v, want %+v; there: %v", got, want, b.there(orphan))
	}
	if !b.there(kept.ID) || e.get(kept.ID).snapshot().State != v1.StateRunning {
		t.Error("a sandbox that has a record was touched")
	}
}

func TestReconcilerFindsWhatVanished(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	c := b.control(e)
	v, err := b.create(c, e, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(b.file(v.ID)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		e.reconciler.round(t.Context())
	}
	got := e.get(v.ID).snapshot()
	if got.State != v1.StateFailed || got.Error == nil || got.Error.Code != string(errs.SandboxLost) || got.EndedAt == nil {
		t.Errorf("%+v", got)
	}
	if n := e.Node(); n.Allocated != (v1.Resources{}) {
		t.Errorf("it still holds %+v", n.Allocated)
	}
	if n := e.reconciler.counts(); n.Lost != 1 {
		t.Errorf("%+v", n)
	}
	if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: v.ID}, &msg.Empty{}); err != nil {
		t.Error(err)
	}
}

// What a dead sandbox left since its removal failed is removed later, and what it was admitted with is free then.
func TestReconcilerCleansUpAfterTheDead(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	first := b.start()
	v, err := b.create(b.control(first), first, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	var fail atomic.Int32
	fail.Store(1)
	b.wrap = func(be backend.Backend) backend.Backend { return failing{lostBackend{be}, &fail} }
	e := b.start()
	if e.get(v.ID).snapshot().State != v1.StateFailed || !b.there(v.ID) || e.Node().Allocated.Slots != 1 {
		t.Fatalf("%+v", e.get(v.ID).snapshot())
	}
	for range 2 {
		e.reconciler.round(t.Context())
	}
	if b.there(v.ID) || e.Node().Allocated != (v1.Resources{}) || e.reconciler.counts().Remnants != 1 {
		t.Errorf("%+v, %+v", e.Node(), e.reconciler.counts())
	}
}

// A sandbox that this process cannot use may well run.
func TestReconcilerLeavesWhatIsOutOfReach(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.adopt = time.Millisecond
	e, id, _ := restartBusy(t, b, 1<<30)
	<-e.get(id).created
	for range 3 {
		e.reconciler.round(t.Context())
	}
	if v := e.get(id).snapshot(); !b.there(id) || v.Error == nil || v.Error.Code != string(errs.BackendUnusable) || e.Node().Allocated.Slots != 1 {
		t.Errorf("%+v", v)
	}
}

func TestReconcilerForgetsStaleRecords(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	id := v1.SandboxID(e.ID(), e.epoch, 1<<40)
	if err := e.journal.note(record{Sandbox: v1.Sandbox{ID: id, State: v1.StateRunning}}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		e.reconciler.round(t.Context())
	}
	if ids := e.journal.ids(); len(ids) != 0 || e.reconciler.counts().Forgotten != 1 {
		t.Errorf("%v, %+v", ids, e.reconciler.counts())
	}
}

// Rounds without a pause between them, during creates and removals, find nothing to do.
func TestReconcilerDoesNotRaceWithWork(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	c := b.control(e)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				v, err := b.create(c, e, nil)
				if err == nil {
					err = c.Call(t.Context(), v.ID, "guest.info", &msg.Empty{}, &msg.GuestInfo{})
				}
				if err == nil {
					err = c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: v.ID}, &msg.Empty{})
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	over := make(chan struct{})
	go func() { wg.Wait(); close(over) }()
	for busy := true; busy; {
		e.reconciler.round(t.Context())
		select {
		case <-over:
			busy = false
		default:
		}
	}
	if got := e.reconciler.counts(); got != (Reconciled{Rounds: got.Rounds}) {
		t.Errorf("%+v", got)
	}
}

// It goes on by itself, for ever.
func TestReconcilerRuns(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.reconcile = time.Millisecond
	e := b.start()
	for i := range 3 {
		orphan := v1.SandboxID(e.ID(), e.epoch, 1<<40+uint64(i))
		if err := os.WriteFile(b.file(orphan), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		b.eventually(fmt.Sprintf("orphan %d is removed", i), func() bool { return !b.there(orphan) })
	}
}
