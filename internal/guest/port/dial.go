package port

import (
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

const phase = "guest.port"

// Conn is a connected stream socket whose sides close separately.
type Conn struct {
	file *os.File
	raw  syscall.RawConn
}

// Dial connects to a TCP port of the sandbox's loopback: host is empty (127.0.0.1, then
// ::1), "localhost", "127.0.0.1" or "::1". Errors: errs.PortClosed, errs.BadRequest.
func Dial(ctx context.Context, host string, port uint32) (*Conn, error) {
	if port == 0 || port > 65535 {
		return nil, errs.New(errs.BadRequest, phase, "port must be between 1 and 65535")
	}
	v4 := &unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}}
	v6 := &unix.SockaddrInet6{Port: int(port), Addr: [16]byte{15: 1}}
	var list []unix.Sockaddr
	switch host {
	case "", "localhost":
		list = []unix.Sockaddr{v4, v6}
	case "127.0.0.1":
		list = []unix.Sockaddr{v4}
	case "::1":
		list = []unix.Sockaddr{v6}
	default:
		return nil, errs.New(errs.BadRequest, phase, "host must be empty, localhost, 127.0.0.1 or ::1")
	}
	var first error
	for _, a := range list {
		c, err := connect(ctx, a)
		if err == nil {
			return c, nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, refused(ctx, "port "+strconv.Itoa(int(port)), first)
}

// DialUnix connects to a stream socket by its path inside the sandbox; "@name" is an
// abstract one.
func DialUnix(ctx context.Context, path string) (*Conn, error) {
	if path == "" || len(path) > 107 || strings.IndexByte(path, 0) >= 0 || path[0] != '/' && path[0] != '@' {
		return nil, errs.New(errs.BadRequest, phase, "unix_path must be absolute, or start with @, and at most 107 bytes")
	}
	c, err := connect(ctx, &unix.SockaddrUnix{Name: path})
	if err != nil {
		return nil, refused(ctx, "socket "+strconv.Quote(path), err)
	}
	return c, nil
}

// refused says why nothing answers.
func refused(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	code := errs.PortClosed
	if errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM) {
		code = errs.PermissionDenied
	}
	return errs.Wrap(code, phase, "connect to "+what+" in the sandbox", err)
}

func connect(ctx context.Context, addr unix.Sockaddr) (*Conn, error) {
	family := unix.AF_INET
	switch addr.(type) {
	case *unix.SockaddrInet6:
		family = unix.AF_INET6
	case *unix.SockaddrUnix:
		family = unix.AF_UNIX
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if family != unix.AF_UNIX {
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	err = unix.Connect(fd, addr)
	for err == unix.EAGAIN { // a Unix socket whose queue is full
		select {
		case <-ctx.Done():
			unix.Close(fd)
			return nil, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
		err = unix.Connect(fd, addr)
	}
	if err != nil && err != unix.EINPROGRESS && err != unix.EINTR {
		unix.Close(fd)
		return nil, err
	}
	c := &Conn{file: os.NewFile(uintptr(fd), "port")}
	if c.raw, err = c.file.SyscallConn(); err == nil {
		err = c.finish(ctx)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// finish waits for a connection that is being made.
func (c *Conn) finish(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { c.file.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var res error
	err := c.raw.Write(func(fd uintptr) bool {
		if _, err := unix.Getpeername(int(fd)); err == nil {
			return true
		}
		n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil {
			res = err
			return true
		}
		if n != 0 {
			res = syscall.Errno(n)
			return true
		}
		return false
	})
	if res != nil {
		return res
	}
	return err
}

// Read reads; io.EOF is the other side's end.
func (c *Conn) Read(b []byte) (int, error) {
	n, err := c.file.Read(b)
	if errors.Is(err, syscall.ECONNRESET) {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// Write writes all of b.
func (c *Conn) Write(b []byte) (int, error) { return c.file.Write(b) }

// CloseWrite ends our side; the other may go on.
func (c *Conn) CloseWrite() error {
	var res error
	err := c.raw.Control(func(fd uintptr) { res = unix.Shutdown(int(fd), unix.SHUT_WR) })
	if err != nil {
		return err
	}
	return res
}

// Close closes both sides and ends every Read and Write.
func (c *Conn) Close() { c.file.Close() }
