package objecttest

import (
	"context"
	"io"
	"strings"
	"sync"

	"dsec/internal/image/object"
)

// Op is a method of a store.
type Op string

// Ops.
const (
	Put    Op = "put"
	Get    Op = "get"
	Stat   Op = "stat"
	Delete Op = "delete"
	List   Op = "list"
)

// Count is what one kind of operation did.
type Count struct {
	Calls int64
	Bytes int64 // of bodies that passed
}

// Counter counts what passes through a store.
type Counter struct {
	object.Store

	mu  sync.Mutex
	ops map[Op]map[string]Count // op, first segment of the key
}

// Counting counts the operations on s.
func Counting(s object.Store) *Counter {
	c := &Counter{Store: s}
	c.Reset()
	return c
}

// Reset starts at zero.
func (c *Counter) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ops = map[Op]map[string]Count{}
}

// Of returns what op did on keys of the class, their first segment; "" is all.
func (c *Counter) Of(op Op, class string) Count {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all Count
	for k, n := range c.ops[op] {
		if class == "" || k == class {
			all.Calls += n.Calls
			all.Bytes += n.Bytes
		}
	}
	return all
}

func (c *Counter) add(op Op, key string, calls, bytes int64) {
	class, _, _ := strings.Cut(key, "/")
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.ops[op]
	if m == nil {
		m = map[string]Count{}
		c.ops[op] = m
	}
	n := m[class]
	n.Calls += calls
	n.Bytes += bytes
	m[class] = n
}

// Put implements [object.Store].
func (c *Counter) Put(ctx context.Context, key string, size int64, r io.Reader) error {
	c.add(Put, key, 1, 0)
	return c.Store.Put(ctx, key, size, &countReader{c, Put, key, r})
}

// Get implements [object.Store].
func (c *Counter) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	c.add(Get, key, 1, 0)
	rc, err := c.Store.Get(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	return body{&countReader{c, Get, key, rc}, rc}, nil
}

// Stat implements [object.Store].
func (c *Counter) Stat(ctx context.Context, key string) (object.Info, error) {
	c.add(Stat, key, 1, 0)
	return c.Store.Stat(ctx, key)
}

// Delete implements [object.Store].
func (c *Counter) Delete(ctx context.Context, key string) error {
	c.add(Delete, key, 1, 0)
	return c.Store.Delete(ctx, key)
}

// List implements [object.Store].
func (c *Counter) List(ctx context.Context, prefix string, each func(object.Info) error) error {
	c.add(List, prefix, 1, 0)
	return c.Store.List(ctx, prefix, each)
}

type countReader struct {
	c   *Counter
	op  Op
	key string
	r   io.Reader
}

func (r *countReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.c.add(r.op, r.key, 0, int64(n))
	return n, err
}

type body struct {
	io.Reader
	io.Closer
}

// Fault is what a [Faulty] store does to one operation.
type Fault struct {
	// Err is returned instead of doing it; for a Get with Cut set, after the cut.
	Err error
	// Done makes a Put or Delete take effect although Err is returned, as when the
	// answer is lost.
	Done bool
	// Cut ends a Get's body after so many bytes, with Err.
	Cut int64
	// Flip, if not nil, changes a piece of a Get's body, which begins at off of the object.
	Flip func(off int64, p []byte)
}

// Faulty asks fault, before each operation, what to do to it; nil is nothing. It may
// be called concurrently.
func Faulty(s object.Store, fault func(op Op, key string) *Fault) object.Store {
	return &faulty{s, fault}
}

type faulty struct {
	s     object.Store
	fault func(op Op, key string) *Fault
}

func (f *faulty) ask(op Op, key string) Fault {
	if x := f.fault(op, key); x != nil {
		return *x
	}
	return Fault{}
}

func (f *faulty) Put(ctx context.Context, key string, size int64, r io.Reader) error {
	x := f.ask(Put, key)
	if x.Err != nil && !x.Done {
		return x.Err
	}
	if err := f.s.Put(ctx, key, size, r); err != nil {
		return err
	}
	return x.Err
}

func (f *faulty) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	x := f.ask(Get, key)
	if x.Err != nil && x.Cut == 0 {
		return nil, x.Err
	}
	rc, err := f.s.Get(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	return body{&faultyReader{x: x, r: rc, off: off}, rc}, nil
}

func (f *faulty) Stat(ctx context.Context, key string) (object.Info, error) {
	if x := f.ask(Stat, key); x.Err != nil {
		return object.Info{}, x.Err
	}
	return f.s.Stat(ctx, key)
}

func (f *faulty) Delete(ctx context.Context, key string) error {
	x := f.ask(Delete, key)
	if x.Err != nil && !x.Done {
		return x.Err
	}
	if err := f.s.Delete(ctx, key); err != nil {
		return err
	}
	return x.Err
}

func (f *faulty) List(ctx context.Context, prefix string, each func(object.Info) error) error {
	if x := f.ask(List, prefix); x.Err != nil {
		return x.Err
	}
	return f.s.List(ctx, prefix, each)
}

type faultyReader struct {
	x    Fault
	r    io.Reader
	off  int64
	done int64
}

func (r *faultyReader) Read(p []byte) (int, error) {
	if r.x.Cut > 0 {
		if r.done >= r.x.Cut {
			return 0, r.x.Err
		}
		p = p[:min(int64(len(p)), r.x.Cut-r.done)]
	}
	n, err := r.r.Read(p)
	if r.x.Flip != nil && n > 0 {
		r.x.Flip(r.off, p[:n])
	}
	r.off += int64(n)
	r.done += int64(n)
	return n, err
}
