package store

import (
	"context"
	"errors"
	"os"
	"sync"

	"dsec/api/v1/errs"
	"dsec/internal/image/chunk"
)

// followStep is how much more there must be of a data blob for it to be taken along.
const followStep = 4 << 20

var errRewritten = errors.New("the blob was rewritten")

// followed is a data blob that goes into the object store while it is written. A blob that
// is rewritten, or small, does not: that is left to who comes after.
type followed struct {
	*os.File
	ctx     context.Context
	session *chunk.Session // nil: nothing follows

	mu      sync.Mutex
	more    *sync.Cond // written, whole or err changed
	written int64      // bytes from the start
	whole   bool       // nothing more comes
	err     error      // no use to go on

	done chan struct{} // closed when name and failed are set; nil if nothing follows yet
	name string
	fail error
}

func newFollowed(ctx context.Context, f *os.File, session *chunk.Session) *followed {
	d := &followed{File: f, ctx: ctx, session: session}
	d.more = sync.NewCond(&d.mu)
	return d
}

// Write implements layer.Blob. It fails if what was written could not be stored.
func (d *followed) Write(p []byte) (int, error) {
	n, err := d.File.Write(p)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.written += int64(n)
	if err == nil && d.err != nil && !errors.Is(d.err, errRewritten) {
		err = d.err
	}
	if d.session != nil && d.done == nil && d.err == nil && d.written >= followStep {
		d.done = make(chan struct{})
		go d.follow()
	}
	d.more.Broadcast()
	return n, err
}

// WriteAt implements layer.Blob.
func (d *followed) WriteAt(p []byte, off int64) (int, error) {
	d.end(errRewritten)
	return d.File.WriteAt(p, off)
}

// Truncate implements layer.Blob.
func (d *followed) Truncate(size int64) error {
	d.end(errRewritten)
	return d.File.Truncate(size)
}

// follow puts what is written.
func (d *followed) follow() {
	defer close(d.done)
	ctx, cancel := context.WithCancel(d.ctx)
	defer cancel()
	unhook := context.AfterFunc(ctx, func() { d.stop(context.Cause(ctx)) }) // grow waits for a condition
	defer unhook()
	d.name, _, d.fail = d.session.PutData(ctx, chunk.Blob{R: d.File, Grow: d.grow})
	if d.fail != nil {
		d.stop(d.fail)
	}
}

func (d *followed) grow(_ context.Context, pos int64) (size int64, done bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.err == nil && !d.whole && d.written < pos+followStep {
		d.more.Wait()
	}
	return d.written, d.whole, d.err
}

// stop ends the following; what it stored is left to the collector.
func (d *followed) stop(why error) {
	d.mu.Lock()
	if d.err == nil && !d.whole {
		d.err = why
	}
	d.more.Broadcast()
	d.mu.Unlock()
}

// end is stop, and waits until nobody reads the blob any more.
func (d *followed) end(why error) {
	d.stop(why)
	d.mu.Lock()
	done := d.done
	d.mu.Unlock()
	if done != nil {
		<-done
	}
}

// finish says that the blob is whole, size bytes, and returns the name of its map, or
// none if it is yet to be put.
func (d *followed) finish(size int64) (string, error) {
	d.mu.Lock()
	d.whole = true
	d.more.Broadcast()
	done := d.done
	d.mu.Unlock()
	if done == nil {
		return "", nil
	}
	<-done
	switch {
	case d.fail == nil && d.written == size:
		return d.name, nil
	case d.fail == nil, errors.Is(d.err, errRewritten):
		return "", nil
	}
	return "", errs.Wrap(errs.Of(d.fail).Code, phase, "store the data blob", d.fail)
}
