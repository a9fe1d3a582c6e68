package edge

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/backend"
)

// dying is a backend whose sandboxes can die by themselves and whose removals wait to be let go.
type dying struct {
	backend.Backend
	die, goOn chan struct{}
	begun     chan string

	mu   sync.Mutex
	at   int // removals at work
	most int
}

type dyingInstance struct {
	backend.Instance
	b *dying
}

func (i *dyingInstance) Done() <-chan struct{} { return i.b.die }

func (b *dying) Create(ctx context.Context, s backend.Spec, report backend.StepReport) (backend.Instance, error) {
	i, err := b.Backend.Create(ctx, s, report)
	if err != nil {
		return nil, err
	}
	return &dyingInstance{i, b}, nil
}

func (b *dying) Delete(ctx context.Context, id string) error {
	b.mu.Lock()
	b.at++
	b.most = max(b.most, b.at)
	b.mu.Unlock()
	b.begun <- id
	<-b.goOn
	err := b.Backend.Delete(ctx, id)
	b.mu.Lock()
	b.at--
	b.mu.Unlock()
	return err
}

// Removing a sandbox that died a moment ago does not meet its clean-up in the backend: that one closed what the
// other was about to use, and the removal failed.
func TestRemovalWaitsForTheCleanUpOfADeadOne(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	d := &dying{die: make(chan struct{}), goOn: make(chan struct{}, 8), begun: make(chan string, 8)}
	b.wrap = func(inner backend.Backend) backend.Backend { d.Backend = inner; return d }
	e := b.start()
	v, err := b.create(b.control(e), e, nil)
	if err != nil {
		t.Fatal(err)
	}
	close(d.die)
	<-d.begun // its clean-up
	s := e.get(v.ID)
	removed := make(chan error, 1)
	go func() {
		_, err := e.remove(context.Background(), v.ID, v1.EndRequest)
		removed <- err
	}()
	for s.snapshot().State != v1.StateStopping { // the removal has begun
		runtime.Gosched()
	}
	select {
	case <-d.begun:
		t.Error("the removal does not wait for the clean-up")
	case <-time.After(200 * time.Millisecond): // too short on a busy machine means a bug not seen, never a failure
	}
	close(d.goOn)
	if err := <-removed; err != nil {
		t.Error(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.most != 1 {
		t.Errorf("%d removals of one sandbox were in the backend at once", d.most)
	}
}
