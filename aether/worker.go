package aether

import (
	"context"
	"sync"

	"dsec/aether/msg"
)

// maxIdleWorkers bounds the goroutines that wait for the next operation. A new goroutine
// would have to grow its stack again in every call, which costs a fifth of a short one.
const maxIdleWorkers = 8

// job is one stream to serve.
type job struct {
	ctx  context.Context
	c    *Conn
	s    *Stream
	open *msg.Open
}

// workers runs jobs, on waiting goroutines where there are any. Workers wait only while
// the server has connections.
type workers struct {
	mu    sync.Mutex
	users int
	idle  []chan job // most recently used last: its stack is warm
}

// join and leave count the connections.
func (w *workers) join() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.users++
}

func (w *workers) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.users--; w.users == 0 {
		for _, ch := range w.idle {
			close(ch)
		}
		w.idle = nil
	}
}

func (w *workers) run(j job) {
	w.mu.Lock()
	n := len(w.idle)
	if n == 0 {
		w.mu.Unlock()
		go w.work(j)
		return
	}
	ch := w.idle[n-1]
	w.idle = w.idle[:n-1]
	w.mu.Unlock()
	ch <- j // has room: the worker waits or is about to
}

func (w *workers) work(j job) {
	var ch chan job
	for ok := true; ok; j, ok = <-ch {
		j.c.serve(j.ctx, j.s, j.open)
		if ch == nil {
			ch = make(chan job, 1)
		}
		j = job{} // keeps nothing alive while it waits
		w.mu.Lock()
		if w.users == 0 || len(w.idle) >= maxIdleWorkers {
			w.mu.Unlock()
			return
		}
		w.idle = append(w.idle, ch)
		w.mu.Unlock()
	}
}
