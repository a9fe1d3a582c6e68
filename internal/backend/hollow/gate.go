package hollow

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// kept is how much a guest's connection takes while the sandbox is paused, as the kernel keeps it for a real one.
const kept = 1 << 20

// gate is the guest's end of a connection: while the sandbox is paused the guest gets nothing of
// what comes, and says nothing.
type gate struct {
	net.Conn

	mu     sync.Mutex
	change sync.Cond
	paused bool
	closed bool
	woken  bool // the deadline is set's
	came   []byte
}

func newGate(c net.Conn) *gate {
	g := &gate{Conn: c}
	g.change.L = &g.mu
	return g
}

func (g *gate) set(paused bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.paused = paused
	g.change.Broadcast()
	if !paused && len(g.came) > 0 { // a Read that takes what comes gives it on now
		g.woken = g.Conn.SetReadDeadline(time.Unix(1, 0)) == nil
	}
}

// Read implements net.Conn.
func (g *gate) Read(p []byte) (int, error) {
	for {
		if n := g.pass(p); n > 0 {
			return n, nil
		}
		n, err := g.Conn.Read(p)
		if errors.Is(err, os.ErrDeadlineExceeded) && g.wake() {
			err = g.Conn.SetReadDeadline(time.Time{})
		}
		if n, done := g.take(p[:n], err); done {
			return n, err
		}
	}
}

// wake tells whether set ended the read.
func (g *gate) wake() (woken bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	woken, g.woken = g.woken, false
	return woken
}

// pass returns of what came, once the sandbox runs.
func (g *gate) pass(p []byte) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.paused && !g.closed && len(g.came) >= kept {
		g.change.Wait()
	}
	if g.paused {
		return 0
	}
	n := copy(p, g.came)
	g.came = g.came[n:]
	return n
}

// take keeps what was read for later, or says that it is the guest's now.
func (g *gate) take(p []byte, err error) (n int, done bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err != nil || !g.paused && len(g.came) == 0 && len(p) > 0 {
		return len(p), true
	}
	g.came = append(g.came, p...)
	return 0, false
}

// Write implements net.Conn.
func (g *gate) Write(p []byte) (int, error) {
	g.mu.Lock()
	for g.paused && !g.closed {
		g.change.Wait()
	}
	g.mu.Unlock()
	return g.Conn.Write(p)
}

// Close implements net.Conn.
func (g *gate) Close() error {
	g.mu.Lock()
	g.closed = true
	g.change.Broadcast()
	g.mu.Unlock()
	return g.Conn.Close()
}
