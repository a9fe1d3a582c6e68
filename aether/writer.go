package aether

import (
	"context"
	"errors"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"dsec/api/v1/errs"
)

const (
	// queueLimit is where senders of the application wait. Frames of the protocol itself
	// and relayed frames pass it: they are bounded by credit, streams and queueMax.
	queueLimit = 1 << 20
	// queueMax ends a connection whose peer makes us queue without reading.
	queueMax = 64 << 20
	// directSize is from where writing a payload uncopied beats copying it.
	directSize = 16 << 10
	// writePiece is what a stuck peer must take within the write timeout.
	writePiece = 256 << 10
	// maxRounds is how often one sender writes for others before it hands over.
	maxRounds = 8
)

// writer collects frames of many goroutines and writes them in as few calls as it can.
// Whoever adds a frame to an idle writer becomes the flusher (add returns true) and must
// call one of the flush methods; frames added meanwhile go with the flusher's next write.
// So there is no writer goroutine to wake, and none to pay for on an idle connection.
type writer struct {
	conn    net.Conn
	raw     syscall.RawConn // nil when conn has no descriptor of its own
	timeout time.Duration
	failed  func(error) // called once, without locks

	mu       sync.Mutex
	queue    []*buffer // frames that no flusher has taken yet, in pieces of writePiece
	flushing bool
	queued   int           // bytes in queue and in the flusher's hands
	space    chan struct{} // closed when queued falls; nil when nobody waits
	sealed   bool          // the last frame has been added
	err      error

	// The fields below belong to the flusher.
	head rawHeader // of flushDirect
	out  [2][]byte // what the next raw write offers
	n    int
	werr error
	try  func(fd uintptr) bool
}

func (w *writer) init(conn net.Conn, timeout time.Duration, failed func(error)) {
	w.conn, w.timeout, w.failed = conn, timeout, failed
	if sc, ok := conn.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			w.raw = raw
			w.try = w.tryOnce
		}
	}
}

// add queues a frame and reports whether the caller has become the flusher.
func (w *writer) add(h *rawHeader, payload []byte) (lead bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.addLocked(h, payload)
}

// addLast is add for the frame after which there is none.
func (w *writer) addLast(h *rawHeader, payload []byte) (lead bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	lead = w.addLocked(h, payload)
	w.sealed = true
	return lead
}

func (w *writer) addLocked(h *rawHeader, payload []byte) (lead bool) {
	if w.err != nil || w.sealed {
		return false
	}
	w.append(h, payload)
	lead = !w.flushing
	w.flushing = true
	return lead
}

func (w *writer) append(h *rawHeader, payload []byte) {
	n := HeaderSize + len(payload)
	last := len(w.queue) - 1
	if last < 0 || len(w.queue[last].b) >= writePiece {
		w.queue = append(w.queue, getBuffer(n))
		last++
	}
	b := w.queue[last].grow(n)
	b.b = append(append(b.b, h[:]...), payload...)
	w.queue[last] = b
	w.queued += n
}

// addDirect is add for a large payload: if the writer is idle, the frame is not queued
// but left to flushDirect, which must then follow.
func (w *writer) addDirect(h *rawHeader, payload []byte) (lead bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil || w.sealed {
		return false
	}
	if w.flushing {
		w.append(h, payload)
		return false
	}
	w.flushing = true
	w.queued += HeaderSize + len(payload)
	w.head = *h
	return true
}

// flushDirect writes the frame that addDirect left, then what was queued meanwhile.
func (w *writer) flushDirect(payload []byte) {
	err := w.write(w.head[:], payload)
	if w.took(HeaderSize+len(payload), err) {
		w.flush()
	}
}

// flush writes until the queue is empty. It may block; the reader uses flushOrHandOver.
func (w *writer) flush() {
	for range maxRounds {
		b := w.take()
		if b == nil {
			return
		}
		n := len(b.b)
		err := w.write(b.b, nil)
		b.put()
		if !w.took(n, err) {
			return
		}
	}
	go w.flushAll()
}

func (w *writer) flushAll() {
	for {
		b := w.take()
		if b == nil {
			return
		}
		n := len(b.b)
		err := w.write(b.b, nil)
		b.put()
		if !w.took(n, err) {
			return
		}
	}
}

// flushOrHandOver writes what the socket takes at once and leaves the rest to a goroutine.
func (w *writer) flushOrHandOver() {
	if w.raw == nil {
		go w.flushAll()
		return
	}
	for {
		b := w.take()
		if b == nil {
			return
		}
		n := len(b.b)
		done, err := w.writeNow(b.b, nil)
		if err == nil && done < n {
			go func() {
				err := w.write(b.b[done:], nil)
				b.put()
				if w.took(n, err) {
					w.flushAll()
				}
			}()
			return
		}
		b.put()
		if !w.took(n, err) {
			return
		}
	}
}

// take hands the next piece of the queue to the flusher; nil ends its duty.
func (w *writer) take() *buffer {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.queue) == 0 {
		w.flushing = false
		return nil
	}
	b := w.queue[0]
	rest := copy(w.queue, w.queue[1:])
	w.queue[rest] = nil
	w.queue = w.queue[:rest]
	return b
}

// took accounts for n bytes written; false ends the flusher's duty after an error.
func (w *writer) took(n int, err error) bool {
	w.mu.Lock()
	w.queued -= n
	first := err != nil && w.err == nil
	if first {
		w.err = err
	}
	if w.err != nil {
		for _, b := range w.queue {
			b.put()
		}
		w.queue, w.queued, w.flushing = nil, 0, false
		err = w.err
	}
	if w.space != nil && w.queued <= queueLimit/2 {
		close(w.space)
		w.space = nil
	}
	w.mu.Unlock()
	if first {
		w.failed(err)
	}
	return err == nil
}

// stop makes all further frames vanish and wakes waiting senders.
func (w *writer) stop(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
	if w.space != nil {
		close(w.space)
		w.space = nil
	}
}

// wait blocks a sender of the application while the queue is long.
func (w *writer) wait(ctx context.Context) error {
	for {
		w.mu.Lock()
		if w.err != nil || w.queued <= queueLimit {
			w.mu.Unlock()
			return nil
		}
		if w.space == nil {
			w.space = make(chan struct{})
		}
		space := w.space
		w.mu.Unlock()
		select {
		case <-space:
		case <-ctx.Done():
			return ctxError(ctx, "aether.send")
		}
	}
}

// settle waits until no flusher is at work. Only closing needs it, so it polls.
func (w *writer) settle(timeout time.Duration) {
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		w.mu.Lock()
		busy := w.flushing
		w.mu.Unlock()
		if !busy {
			return
		}
	}
}

// pending returns the bytes not yet written.
func (w *writer) pending() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.queued
}

// yield lets goroutines that are about to send do so before a flush, when there are any.
func yield(streams int64) {
	if streams > 1 {
		runtime.Gosched()
	}
}

func (w *writer) write(p, q []byte) error {
	if w.raw != nil {
		n, err := w.writeNow(p, q)
		if err != nil {
			return err
		}
		if n >= len(p) {
			p, q = q[n-len(p):], nil
		} else {
			p = p[n:]
		}
	} else if len(q) > 0 { // one record of TLS, one hand-over of a pipe
		b := getBuffer(len(p) + len(q))
		defer b.put()
		b.b = append(append(b.b, p...), q...)
		p, q = b.b, nil
	}
	for _, s := range [2][]byte{p, q} {
		if err := w.writeSlowly(s); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) writeSlowly(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	for len(p) > 0 {
		piece := p[:min(len(p), writePiece)]
		if w.timeout > 0 {
			if err := w.conn.SetWriteDeadline(time.Now().Add(w.timeout)); err != nil {
				return err
			}
		}
		n, err := w.conn.Write(piece)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return errs.New(errs.ConnectionLost, "aether.write", "the peer takes no data for "+w.timeout.String())
		}
		if err != nil {
			return err
		}
		p = p[n:]
	}
	if w.timeout <= 0 {
		return nil
	}
	return w.conn.SetWriteDeadline(time.Time{})
}

// writeNow writes what fits into the socket's buffer.
func (w *writer) writeNow(p, q []byte) (int, error) {
	w.out = [2][]byte{p, q}
	w.n, w.werr = 0, nil
	err := w.raw.Write(w.try)
	w.out = [2][]byte{}
	if err == nil {
		err = w.werr
	}
	return w.n, err
}

// tryOnce is one write(2) or writev(2) that does not wait.
func (w *writer) tryOnce(fd uintptr) bool {
	for {
		n, err := writev(int(fd), w.out[0], w.out[1])
		switch err {
		case nil:
			w.n = n
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
		default:
			w.werr = err
		}
		return true
	}
}
