package httpupgrade

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"dsec/api/v1/errs"
)

// Protocol is the value of the Upgrade header.
const Protocol = "aether/1"

const phase = "aether.upgrade"

// Upgrade answers 101 to a request for Protocol and takes its connection over. On error
// nothing has been written to w yet, unless the connection itself broke.
func Upgrade(w http.ResponseWriter, r *http.Request) (net.Conn, error) {
	switch {
	case r.Method != http.MethodGet:
		return nil, errs.New(errs.BadRequest, phase, "an upgrade to "+Protocol+" is a GET request")
	case !hasToken(r.Header, "Connection", "upgrade") || !hasToken(r.Header, "Upgrade", Protocol):
		return nil, errs.New(errs.BadRequest, phase, "this path wants the headers 'Connection: Upgrade' and 'Upgrade: "+Protocol+"'")
	}
	conn, rw, err := http.NewResponseController(w).Hijack()
	if errors.Is(err, http.ErrNotSupported) {
		return nil, errs.New(errs.NotSupported, phase, "the connection cannot be upgraded; use HTTP/1.1").Because(err)
	}
	if err != nil {
		return nil, errs.Wrap(errs.ConnectionLost, phase, "take the connection over", err)
	}
	conn.SetDeadline(time.Time{}) // the HTTP server's deadlines are not ours
	_, err = fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", Protocol)
	if err != nil {
		conn.Close()
		return nil, errs.Wrap(errs.ConnectionLost, phase, "answer the upgrade", err)
	}
	return withBuffered(conn, rw.Reader), nil
}

// hasToken reports whether a comma-separated header holds a token, in any case.
func hasToken(h http.Header, name, token string) bool {
	for _, line := range h.Values(name) {
		for part := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(part), token) {
				return true
			}
		}
	}
	return false
}

// withBuffered returns conn, preceded by what r has read beyond the HTTP head.
func withBuffered(conn net.Conn, r *bufio.Reader) net.Conn {
	n := r.Buffered()
	if n == 0 {
		return conn
	}
	head, _ := r.Peek(n)
	return &prefixed{Conn: conn, head: append([]byte(nil), head...)}
}

// prefixed is a connection with bytes to be read first.
type prefixed struct {
	net.Conn
	head []byte
}

func (c *prefixed) Read(p []byte) (int, error) {
	if len(c.head) == 0 {
		return c.Conn.Read(p)
	}
	n := copy(p, c.head)
	if c.head = c.head[n:]; len(c.head) == 0 {
		c.head = nil
	}
	return n, nil
}

// SyscallConn keeps the fast write path of plain sockets.
func (c *prefixed) SyscallConn() (syscall.RawConn, error) {
	if sc, ok := c.Conn.(syscall.Conn); ok {
		return sc.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}
