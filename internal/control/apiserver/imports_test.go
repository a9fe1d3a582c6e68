package apiserver

import (
	"context"
	"errors"
	"runtime"
	"testing"

	"dsec/api/v1/errs"
)

func TestTheQueueOfImportsIsBounded(t *testing.T) {
	t.Parallel()
	q := newImports(1)
	stop := make(chan struct{})
	done, err := q.begin(t.Context(), stop)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	ctx, cancel := context.WithCancel(t.Context())
	for range importQueue {
		go func() { _, err := q.begin(ctx, stop); ended <- err }()
	}
	for q.waiting.Load() < importQueue {
		runtime.Gosched()
	}
	if _, err := q.begin(t.Context(), stop); !errors.Is(err, errs.NodeFull) || errs.Of(err).RetryAfter == 0 {
		t.Errorf("one more than may wait: %v", err)
	}
	cancel()
	for range importQueue {
		if err := <-ended; !errors.Is(err, errs.RequestCanceled) {
			t.Errorf("who went away: %v", err)
		}
	}
	go func() { _, err := q.begin(t.Context(), stop); ended <- err }()
	for q.waiting.Load() == 0 {
		runtime.Gosched()
	}
	close(stop)
	if err := <-ended; !errors.Is(err, errs.ShuttingDown) {
		t.Errorf("when the server stops: %v", err)
	}
	done()
	if done, err = q.begin(t.Context(), stop); err != nil {
		t.Errorf("the turn was not given back: %v", err)
	}
	done()
}
