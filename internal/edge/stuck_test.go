package edge

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// stuckOnce blocks its first create until the caller leaves, and removals until gate is closed.
type stuckOnce struct {
	backend.Backend
	reached chan struct{}
	gate    chan struct{}
}

func (s *stuckOnce) Create(ctx context.Context, spec backend.Spec, r backend.StepReport) (backend.Instance, error) {
	select {
	case <-s.reached:
		return s.Backend.Create(ctx, spec, r)
	default:
	}
	close(s.reached)
	<-ctx.Done()
	return nil, ctx.Err()
}

func (s *stuckOnce) Delete(ctx context.Context, id string) error {
	<-s.gate
	return s.Backend.Delete(ctx, id)
}

// Who asks again with the key of a create that is being undone gets a sandbox, not its failure.
func TestKeyOfACreateThatIsUndone(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	stuck := &stuckOnce{reached: make(chan struct{}), gate: make(chan struct{})}
	b.wrap = func(be backend.Backend) backend.Backend { stuck.Backend = be; return stuck }
	e := b.start()
	withKey := func(r *v1.EdgeCreate) { r.IdempotencyKey = "k" }
	first, second := b.control(e), b.control(e)
	failed := make(chan error, 1)
	go func() {
		_, err := b.create(first, e, withKey)
		failed <- err
	}()
	<-stuck.reached
	first.Close()
	if err := <-failed; err == nil {
		t.Error("no error for who left")
	}
	type result struct {
		v   v1.Sandbox
		err error
	}
	again := make(chan result, 1)
	go func() {
		v, err := b.create(second, e, withKey)
		again <- result{v, err}
	}()
	time.Sleep(20 * time.Millisecond) // it meets the first one, whose removal is stuck
	close(stuck.gate)
	r := <-again
	if r.err != nil || r.v.State != v1.StateRunning || e.get(r.v.ID) == nil {
		t.Errorf("%+v, %v", r.v, r.err)
	}
}

type easy struct{ backend.Backend }

func (easy) Delete(context.Context, string) error { return nil }

// A removal that gave up waiting for the create that it overtook is not the last one.
func TestRemovalThatWaitedTooLongIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, _, err := openJournal(filepath.Join(t.TempDir(), "journal"))
		if err != nil {
			t.Fatal(err)
		}
		defer j.close()
		s := newSandbox(easy{}, nil, v1.Sandbox{ID: "x", State: v1.StateCreating})
		e := &Edge{
			cfg: Config{Now: time.Now, Log: slog.New(slog.DiscardHandler)}, journal: j, admit: &admission{}, feed: newFeed(8, 0),
			stop: make(chan struct{}), removing: make(chan struct{}, 1), sandboxes: map[string]*sandbox{"x": s}, keys: map[string]string{},
		}
		if err := e.end(t.Context(), s, v1.EndRequest); !errors.Is(err, errs.DeadlineExceeded) {
			t.Errorf("the removal of a sandbox whose create hangs: %v", err)
		}
		close(s.created) // the create ends after all, but left its directory, say
		time.Sleep(2 * removeTime)
		select {
		case <-s.removed:
		default:
			t.Error("nobody removes it any more")
		}
		close(e.stop)
		e.wg.Wait()
	})
}
