package edges

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dsec/aether"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

const defaultSize = 3

// Config of a Pool.
type Config struct {
	// Token makes the credential that a new connection is opened with.
	Token func() (string, error)
	Agent string        // program and version, for the edge's log
	Size  int           // connections per edge; 0: 3
	TLS   *tls.Config   // for edges reached over TCP; nil: plain
	Dial  time.Duration // limit of dial and handshake; 0: 5 s
	Log   *slog.Logger
}

// Pool holds connections to edges, keyed by node, epoch and address: a connection never
// outlives the registration it was made for.
type Pool struct {
	cfg Config

	mu     sync.Mutex
	edges  map[string]*edge // by node id
	closed bool
}

type edge struct {
	epoch   uint64
	address string
	slots   []slot
	next    atomic.Uint32
}

// slot is one connection, dialled when first needed and again when it broke.
type slot struct {
	dial sync.Mutex // held while dialling, so that a burst dials once
	conn atomic.Pointer[aether.Conn]
}

// New returns an empty pool.
func New(cfg Config) *Pool {
	if cfg.Size == 0 {
		cfg.Size = defaultSize
	}
	if cfg.Dial == 0 {
		cfg.Dial = 5 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Pool{cfg: cfg, edges: map[string]*edge{}}
}

// Conn returns a live connection to an edge; errs.EdgeUnreachable.
func (p *Pool) Conn(ctx context.Context, node v1.Node) (*aether.Conn, error) {
	e, err := p.edge(node)
	if err != nil {
		return nil, err
	}
	s := &e.slots[int(e.next.Add(1))%len(e.slots)]
	if c := s.live(); c != nil {
		return c, nil
	}
	s.dial.Lock()
	defer s.dial.Unlock()
	if c := s.live(); c != nil {
		return c, nil
	}
	c, err := p.dial(ctx, node)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.edges[node.ID] != e {
		c.Close()
		return nil, unreachable(node, "the edge was registered anew", nil)
	}
	s.conn.Store(c)
	return c, nil
}

func (s *slot) live() *aether.Conn {
	c := s.conn.Load()
	if c == nil {
		return nil
	}
	select {
	case <-c.Done():
		return nil
	default:
		return c
	}
}

func (p *Pool) edge(node v1.Node) (*edge, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errs.New(errs.ShuttingDown, "edge.dial", "the server is stopping")
	}
	e := p.edges[node.ID]
	switch {
	case e != nil && e.epoch == node.Epoch && e.address == node.Address:
		return e, nil
	case e != nil && e.epoch > node.Epoch:
		return nil, unreachable(node, "the node has started afresh", nil)
	case e != nil:
		e.close()
	}
	e = &edge{epoch: node.Epoch, address: node.Address, slots: make([]slot, p.cfg.Size)}
	p.edges[node.ID] = e
	return e, nil
}

func (e *edge) close() {
	for i := range e.slots {
		if c := e.slots[i].conn.Load(); c != nil {
			c.Close()
		}
	}
}

func (p *Pool) dial(ctx context.Context, node v1.Node) (*aether.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Dial)
	defer cancel()
	token, err := p.cfg.Token()
	if err != nil {
		return nil, err
	}
	conn, err := dialAddress(ctx, node.Address, p.cfg.TLS)
	if err != nil {
		return nil, unreachable(node, "dial "+node.Address, err)
	}
	c, err := aether.NewClient(ctx, conn, aether.ClientConfig{Token: token, Agent: p.cfg.Agent})
	if err != nil {
		return nil, unreachable(node, "handshake with "+node.Address, err)
	}
	p.cfg.Log.Debug("connected to edge", "node", node.ID, "address", node.Address)
	return c, nil
}

// unreachable hides the cause's own code: a token that the edge refuses, say, is not the
// fault of the client who asked.
func unreachable(node v1.Node, message string, cause error) error {
	e := errs.New(errs.EdgeUnreachable, "edge.dial", message)
	e.Node, e.Cause = node.ID, cause
	return e
}

// dialAddress connects to "unix:/path", "tcp:host:port" or "host:port".
func dialAddress(ctx context.Context, address string, conf *tls.Config) (net.Conn, error) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		var d net.Dialer
		return d.DialContext(ctx, "unix", "/"+strings.TrimLeft(path, "/"))
	}
	address = strings.TrimPrefix(strings.TrimPrefix(address, "tcp:"), "//")
	if conf != nil {
		d := tls.Dialer{Config: conf}
		return d.DialContext(ctx, "tcp", address)
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", address)
}

// Forget closes the connections to a node that is no longer registered.
func (p *Pool) Forget(nodeID string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.edges[nodeID]; e != nil {
		e.close()
		delete(p.edges, nodeID)
	}
}

// Streams returns the number of open streams to all edges.
func (p *Pool) Streams() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, e := range p.edges {
		for i := range e.slots {
			if c := e.slots[i].live(); c != nil {
				n += c.Streams()
			}
		}
	}
	return n
}

// Close ends all connections.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for id, e := range p.edges {
		e.close()
		delete(p.edges, id)
	}
}
