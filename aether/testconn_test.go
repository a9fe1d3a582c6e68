package aether

import (
	"net"
	"sync/atomic"
)

// stuckConn stops reading when told to. It hides the descriptor, as TLS does.
type stuckConn struct {
	net.Conn
	stop    atomic.Bool
	release chan struct{}
}

func (c *stuckConn) Read(p []byte) (int, error) {
	if c.stop.Load() {
		<-c.release
	}
	return c.Conn.Read(p)
}
