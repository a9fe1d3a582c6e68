package apiserver

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"dsec/api/v1/errs"
)

const (
	// defaultImports bounds the memory and the disk's queue that imports take together.
	defaultImports = 2
	// importQueue and importWait bound those that wait for their turn.
	importQueue = 64
	importWait  = 10 * time.Minute
	// importAgain is when a full queue may have room.
	importAgain = 5 * time.Second
)

// imports lets some imports run at a time and others wait.
type imports struct {
	slots   chan struct{}
	waiting atomic.Int64
}

func newImports(n int) *imports { return &imports{slots: make(chan struct{}, n)} }

// begin waits for a turn until ctx or stop ends; done must be called after the import.
func (i *imports) begin(ctx context.Context, stop <-chan struct{}) (done func(), err error) {
	done = func() { <-i.slots }
	select {
	case i.slots <- struct{}{}:
		return done, nil
	default:
	}
	if i.waiting.Add(1) > importQueue {
		i.waiting.Add(-1)
		return nil, i.busy(fmt.Sprintf("%d imports wait for their turn", importQueue))
	}
	defer i.waiting.Add(-1)
	turn := time.NewTimer(importWait)
	defer turn.Stop()
	select {
	case i.slots <- struct{}{}:
		return done, nil
	case <-turn.C:
		return nil, i.busy("others took all turns for " + importWait.String())
	case <-stop:
		return nil, errs.New(errs.ShuttingDown, "image.import", "the server is stopping")
	case <-ctx.Done():
		return nil, errs.Wrap(errs.RequestCanceled, "image.import", "wait for a turn", ctx.Err())
	}
}

func (i *imports) busy(why string) error {
	return errs.New(errs.NodeFull, "image.import", fmt.Sprintf("%d imports run at a time, and %s", cap(i.slots), why)).
		With("resource", "imports").After(importAgain)
}
