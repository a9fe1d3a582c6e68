package store

import (
	"context"
	"sync"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image"

	"golang.org/x/sys/unix"
)

// Mounts shares layer mounts: each layer is mounted at most once, however many
// use it, and stays mounted for a while after the last one. A mount is held by
// its descriptor alone, so a process that dies leaves none behind, and sandboxes
// that cloned it keep theirs. It is safe for concurrent use.
type Mounts struct {
	use   func(context.Context, image.Layer) (image.LayerFiles, func(), error)
	idle  time.Duration
	mount func(context.Context, image.LayerFiles) (int, error)

	mu     sync.Mutex
	byMeta map[string]*mounted // a metadata blob names its data blob
	closed bool
}

type mounted struct {
	ready chan struct{} // closed when fd or err is set
	data  string        // digest of its data; none if empty
	fd    int
	done  func() // the layer's files are not needed any more
	err   error
	users int
	timer *time.Timer // runs while users is 0
}

// NewMounts shares mounts of s's layers, each kept for idle after its last use.
func NewMounts(s *Store, idle time.Duration) *Mounts {
	return &Mounts{use: s.Use, idle: idle, mount: image.Mount, byMeta: map[string]*mounted{}}
}

// Acquire returns the descriptor of l's detached mount, mounting it if needed,
// and a function to call once when done with it. The descriptor is shared: do
// not close it; [image.Clone] it for one's own.
func (m *Mounts) Acquire(ctx context.Context, l image.Layer) (fd int, release func(), err error) {
	key := l.MetaDigest
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return -1, nil, errs.New(errs.ShuttingDown, phase, "layer mounts are closed")
	}
	e := m.byMeta[key]
	if e == nil {
		e = &mounted{ready: make(chan struct{}), data: l.DataDigest, fd: -1}
		m.byMeta[key] = e
		// Not under ctx: others may wait for it when this caller has gone.
		go m.open(context.WithoutCancel(ctx), e, l, key)
	}
	e.users++
	if e.timer != nil {
		e.timer.Stop()
		e.timer = nil
	}
	m.mu.Unlock()

	release = sync.OnceFunc(func() { m.release(e, key) })
	select {
	case <-e.ready:
	case <-ctx.Done():
		release()
		return -1, nil, errs.Wrap(errs.RequestCanceled, phase, "wait for layer mount", ctx.Err())
	}
	if e.err != nil {
		release()
		return -1, nil, e.err
	}
	return e.fd, release, nil
}

func (m *Mounts) open(ctx context.Context, e *mounted, l image.Layer, key string) {
	fd := -1
	files, done, err := m.use(ctx, l)
	if err == nil {
		if fd, err = m.mount(ctx, files); err != nil {
			done()
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	e.fd, e.done, e.err = fd, done, err
	if err != nil && m.byMeta[key] == e {
		delete(m.byMeta, key) // the next one tries anew
	}
	close(e.ready)
	m.maybeDrop(e, key)
}

func (m *Mounts) release(e *mounted, key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e.users--
	m.maybeDrop(e, key)
}

// maybeDrop starts the idle time of a mount that no one uses, or ends it at once
// if no one can come any more. m.mu is held.
func (m *Mounts) maybeDrop(e *mounted, key string) {
	if e.users > 0 || e.fd < 0 {
		return
	}
	if m.closed || m.byMeta[key] != e {
		m.drop(e, key)
		return
	}
	if e.timer != nil {
		e.timer.Stop()
	}
	var t *time.Timer
	t = time.AfterFunc(m.idle, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if e.timer == t { // not used since
			m.drop(e, key)
		}
	})
	e.timer = t
}

func (m *Mounts) drop(e *mounted, key string) {
	if e.timer != nil {
		e.timer.Stop()
		e.timer = nil
	}
	if m.byMeta[key] == e {
		delete(m.byMeta, key)
	}
	if e.fd >= 0 {
		unix.Close(e.fd)
		e.fd = -1
		e.done()
	}
}

// Forget unmounts a layer that no one uses, and all that have the same data.
func (m *Mounts) Forget(l image.Layer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, e := range m.byMeta {
		if e.users == 0 && (key == l.MetaDigest || l.DataDigest != "" && e.data == l.DataDigest) {
			m.drop(e, key)
		}
	}
}

// Held counts the layers mounted now, and those of them in use.
func (m *Mounts) Held() (mounted, inUse int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.byMeta {
		mounted++
		if e.users > 0 {
			inUse++
		}
	}
	return mounted, inUse
}

// Close unmounts what no one uses; the rest goes when it is released.
func (m *Mounts) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	for key, e := range m.byMeta {
		m.maybeDrop(e, key)
	}
}
