package apiserver

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"strings"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/iam"
)

const upgradeProtocol = "aether/1"

// caller is the principal of an Aether connection.
type caller struct {
	*iam.Principal
	quota *quota
}

type callerKey struct{}

func (s *Server) newRelay() *aether.Server {
	return aether.NewServer(aether.ServerConfig{
		Node: "apiserver",
		Auth: func(ctx context.Context, _ *msg.Hello) (any, error) {
			// The upgrade has authenticated; a token in HELLO has nothing to add.
			return ctx.Value(callerKey{}), nil
		},
		Route: s.route,
		Quota: func(principal any) aether.Quota { return principal.(*caller).quota },
		Log:   func(event string, err error) { s.cfg.Log.Debug("aether: "+event, "err", err) },
	})
}

// aether upgrades a request to an Aether connection and serves it.
func (s *Server) aether(_ context.Context, req *request, hr *http.Request, _ *struct{}) error {
	if !strings.EqualFold(hr.Header.Get("Upgrade"), upgradeProtocol) || !headerHas(hr.Header, "Connection", "upgrade") {
		return errs.New(errs.BadRequest, "aether.upgrade", `send "Connection: Upgrade" and "Upgrade: `+upgradeProtocol+`" over HTTP/1.1`)
	}
	quota, leave, err := s.quotas.connect(req.principal.TokenID)
	if err != nil {
		return err
	}
	defer leave()
	conn, rw, err := http.NewResponseController(req).Hijack()
	if err != nil {
		return errs.New(errs.BadRequest, "aether.upgrade", "this connection cannot be upgraded; use HTTP/1.1").Because(err)
	}
	req.status = http.StatusSwitchingProtocols
	if err := sayUpgraded(conn, req.id); err != nil {
		conn.Close()
		return errs.Wrap(errs.RequestCanceled, "aether.upgrade", "answer", err)
	}
	// Not the request's context: net/http ends that in its own ways after a hijack.
	ctx, cancel := context.WithCancelCause(context.WithValue(s.ctx, callerKey{}, &caller{req.principal, quota}))
	defer cancel(nil)
	defer s.sessions.add(req.principal, cancel)()
	s.metrics.relays.Inc()
	defer s.metrics.relays.Dec()
	return s.relay.ServeConn(ctx, unread(conn, rw.Reader))
}

func sayUpgraded(conn net.Conn, id string) error {
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return err
	}
	_, err := conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + upgradeProtocol +
		"\r\n" + headerRequestID + ": " + id + "\r\n\r\n"))
	if err != nil {
		return err
	}
	return conn.SetDeadline(time.Time{})
}

func headerHas(h http.Header, name, token string) bool {
	for _, v := range h.Values(name) {
		for part := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(part), token) {
				return true
			}
		}
	}
	return false
}

// unread gives back what net/http had read ahead.
func unread(conn net.Conn, r *bufio.Reader) net.Conn {
	if r.Buffered() == 0 {
		return conn
	}
	ahead := make([]byte, r.Buffered())
	_, _ = r.Read(ahead) // buffered: it cannot fail
	return &prefixedConn{Conn: conn, ahead: ahead}
}

type prefixedConn struct {
	net.Conn
	ahead []byte
}

// Read implements net.Conn.
func (c *prefixedConn) Read(p []byte) (int, error) {
	if len(c.ahead) > 0 {
		n := copy(p, c.ahead)
		c.ahead = c.ahead[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// route decides where a client's stream goes.
func (s *Server) route(ctx context.Context, principal any, open *msg.Open) (aether.Relay, error) {
	to, err := s.routeTo(ctx, principal.(*caller).Principal, open)
	group := aether.GuestGroup(open.Method)
	if open.Method == aether.MethodBatch {
		group = aether.MethodBatch
	}
	if group == "" {
		group = "other"
	}
	result := "ok"
	if err != nil {
		result = string(errs.Of(err).Code)
	}
	s.metrics.streams.WithLabelValues(group, result).Inc()
	return to, err
}

func (s *Server) routeTo(ctx context.Context, p *iam.Principal, open *msg.Open) (aether.Relay, error) {
	if err := s.cfg.IAM.Check(p); err != nil {
		return aether.Relay{}, err
	}
	if err := p.Require(v1.RightSandbox); err != nil {
		return aether.Relay{}, err
	}
	if s.drain.Err() != nil { // before an edge that stops with us seems to be lost
		return aether.Relay{}, errs.New(errs.ShuttingDown, "aether.route", "the server is stopping")
	}
	switch {
	case open.Method == aether.MethodBatch:
		if !relayWhole(open) {
			return aether.Relay{}, nil // taken apart here; each operation is then routed by itself
		}
	case aether.GuestGroup(open.Method) == "": // what an edge serves for the control plane is reached by REST
		return aether.Relay{}, errs.New(errs.UnknownMethod, "aether.route", "no method "+quoted(open.Method)+" is served to clients")
	}
	if open.Target == "" {
		return aether.Relay{}, errs.New(errs.BadRequest, "aether.route", "the stream names no sandbox as its target").With("field", "target")
	}
	node, _, err := s.cfg.Registry.Locate(open.Target)
	if err != nil {
		return aether.Relay{}, err
	}
	up, err := s.cfg.Edges.Conn(ctx, node)
	if err != nil {
		return aether.Relay{}, err
	}
	return aether.Relay{Conn: up, Target: open.Target}, nil
}

// relayWhole says whether a batch may go to one edge as it is. The edge trusts us, so every
// operation in it must be one that we would relay by itself, for the sandbox that the
// batch is for.
func relayWhole(open *msg.Open) bool {
	if open.Target == "" {
		return false
	}
	var b msg.Batch
	if b.ParseWire(open.Body) != nil {
		return false
	}
	for _, op := range b.Ops {
		if aether.GuestGroup(op.Method) == "" || op.Target != "" && op.Target != open.Target {
			return false
		}
	}
	return true
}
