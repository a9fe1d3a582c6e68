package edge

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// lasting is a backend whose creates come half-way and then take for ever, and whose
// removals fail a few times.
type lasting struct {
	backend.Backend
	begun    chan string
	failures atomic.Int32
}

func (l *lasting) Create(ctx context.Context, spec backend.Spec, r backend.StepReport) (backend.Instance, error) {
	if _, err := l.Backend.Create(ctx, spec, r); err != nil {
		return nil, err
	}
	l.begun <- spec.ID
	<-ctx.Done()
	return nil, ctx.Err()
}

func (l *lasting) Delete(ctx context.Context, id string) error {
	if l.failures.Add(-1) >= 0 {
		return errors.New("device or resource busy")
	}
	return l.Backend.Delete(ctx, id)
}

// An edge that is told to stop undoes what it is making, says so, and its next start
// knows those ids as removed.
func TestStopUndoesCreates(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	half := &lasting{begun: make(chan string)}
	b.wrap = func(be backend.Backend) backend.Backend { half.Backend = be; return half }
	e := b.start()
	failed := make(chan error)
	const n = 3
	var ids []string
	for range n {
		c := b.control(e)
		go func() {
			_, err := b.create(c, e, nil)
			failed <- err
		}()
		ids = append(ids, <-half.begun)
	}
	closed := make(chan error)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		closed <- e.Close(ctx)
	}()
	for range n {
		if x := errs.Of(<-failed); x.Code != errs.ShuttingDown || !x.Retryable || x.Sandbox == "" {
			t.Errorf("a create that the stop ended: %+v", x)
		}
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if left, err := half.List(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("left when it has stopped: %v, %v", left, err)
	}
	b.wrap = nil
	e = b.start()
	c := b.control(e)
	for _, id := range ids {
		if err := c.Call(t.Context(), "", "sandbox.get", &msg.SandboxRequest{Id: id}, &msg.Empty{}); !errors.Is(err, errs.SandboxGone) {
			t.Errorf("%s after the next start: %v", id, err)
		}
	}
}

// A create whose caller went away is undone though that fails at first: nobody else
// knows of it.
func TestUndoingACreateIsTriedAgain(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	half := &lasting{begun: make(chan string)}
	half.failures.Store(1)
	b.wrap = func(be backend.Backend) backend.Backend { half.Backend = be; return half }
	e := b.start()
	c := b.control(e)
	ended := make(chan error, 1)
	go func() {
		_, err := b.create(c, e, nil)
		ended <- err
	}()
	id := <-half.begun
	s := e.get(id)
	c.Close()
	if err := <-ended; err == nil {
		t.Error("the create succeeded")
	}
	select {
	case <-s.removed:
	case <-time.After(20 * time.Second):
		t.Fatalf("it is still there: %+v", s.snapshot())
	}
	if err := b.control(e).Call(t.Context(), "", "sandbox.get", &msg.SandboxRequest{Id: id}, &msg.Empty{}); !errors.Is(err, errs.SandboxGone) {
		t.Error(err)
	}
	if n := e.Node(); n.Allocated != (v1.Resources{}) || n.Sandboxes != 0 {
		t.Errorf("something is left: %+v", n)
	}
}

// slowImages is at work on an image's layers until it is told to stop.
type slowImages struct {
	noImages
	begun chan string
}

func (i slowImages) Collapse(ctx context.Context, img *v1.Image, _ int64, _ int, _ func(v1.ImageProgress)) (v1.Image, error) {
	i.begun <- img.Digest
	<-ctx.Done()
	return v1.Image{}, errs.Wrap(errs.RequestCanceled, "test", "merge", ctx.Err())
}

// Layers of one image are merged at a time; whoever waits or works for somebody who goes away ends, and
// so does all of it when the edge stops.
func TestCollapsesWaitAndEnd(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	images := slowImages{begun: make(chan string, 10)}
	b.images = images
	e := b.start()
	c := b.control(e)
	collapse := func(digest string) (end context.CancelFunc, failed chan error) {
		ctx, cancel := context.WithCancel(t.Context())
		doc, err := document(v1.EdgeCollapse{Image: v1.Image{Digest: digest}})
		if err != nil {
			t.Fatal(err)
		}
		failed = make(chan error, 1)
		go func() { failed <- c.Call(ctx, "", "image.collapse", doc, &msg.Document{}) }()
		return cancel, failed
	}
	endFirst, first := collapse("first")
	if got := <-images.begun; got != "first" {
		t.Fatal(got)
	}
	endSecond, second := collapse("second")
	select {
	case got := <-images.begun:
		t.Fatalf("%s is at work beside the first", got)
	case err := <-second:
		t.Fatal(err)
	case <-time.After(50 * time.Millisecond):
	}
	endSecond()
	<-second
	_, third := collapse("third")
	endFirst()
	<-first
	for got := <-images.begun; got != "third"; got = <-images.begun { // the second's end may not have come yet when its turn did
		if got != "second" {
			t.Fatalf("%s is at work", got)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := e.Close(ctx); err != nil {
		t.Error(err)
	}
	if err := <-third; err == nil {
		t.Error("the work that the stop ended is reported as done")
	}
}
