package client

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"dsec/api/v1/errs"
)

// maxForwarded is how many connections of one Forward run at once; more wait to be taken.
const maxForwarded = 256

// ForwardOptions change Forward.
type ForwardOptions struct {
	// Host is the address in the sandbox; empty: its loopback.
	Host string
	// Failed is told of a connection that could not be passed on, such as to a port on
	// which nothing listens (yet). It may be called from several goroutines.
	Failed func(error)
}

// Forward passes every connection that l takes on to a port of the sandbox, and closes l.
// It goes on until ctx ends, when it returns nil once all connections are closed, or the
// sandbox is gone (which it learns within a few seconds though nobody connects), or l fails.
func (s *Sandbox) Forward(ctx context.Context, l net.Listener, port int, o ForwardOptions) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() { l.Close() })()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer l.Close()
	wg.Go(func() {
		if err := s.untilGone(ctx); err != nil {
			cancel(err)
		}
	})
	room := make(chan struct{}, maxForwarded)
	for {
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			return forwardEnd(ctx, nil)
		}
		conn, err := l.Accept()
		if err != nil {
			cancel(nil)
			return forwardEnd(ctx, err)
		}
		wg.Go(func() {
			defer func() { <-room }()
			defer conn.Close()
			err := s.forwardOne(ctx, conn, o.Host, port)
			switch {
			case err == nil || ctx.Err() != nil:
			case gone(err):
				cancel(err)
			case o.Failed != nil:
				o.Failed(err)
			}
		})
	}
}

// forwardCheck is how often Forward looks whether the sandbox is still there.
const forwardCheck = 2 * time.Second

// untilGone returns why the sandbox is gone, or nil when ctx ends. It asks the guest, since
// that needs no other right than a connection does; any other failure may pass.
func (s *Sandbox) untilGone(ctx context.Context) error {
	tick := time.NewTicker(forwardCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		cctx, cancel := context.WithTimeout(ctx, forwardDial)
		_, err := s.Guest(cctx)
		cancel()
		if gone(err) {
			return err
		}
	}
}

// gone says whether err tells that a sandbox is no more.
func gone(err error) bool {
	return errors.Is(err, errs.SandboxGone) || errors.Is(err, errs.SandboxLost) || errors.Is(err, errs.SandboxNotFound)
}

// forwardEnd is why a Forward ended: the sandbox, the listener, or (nil) its caller.
func forwardEnd(ctx context.Context, accept error) error {
	var gone *errs.Error
	if cause := context.Cause(ctx); errors.As(cause, &gone) {
		return cause
	}
	if accept != nil && !errors.Is(accept, net.ErrClosed) {
		return errs.Wrap(errs.ConnectionLost, "client.forward", "take a connection", accept)
	}
	return nil
}

// forwardDial bounds the wait for the service in the sandbox.
const forwardDial = 30 * time.Second

func (s *Sandbox) forwardOne(ctx context.Context, conn net.Conn, host string, port int) error {
	dctx, cancel := context.WithTimeout(ctx, forwardDial)
	inside, err := s.Dial(dctx, host, port)
	cancel()
	if err != nil {
		return err
	}
	defer inside.Close()
	defer context.AfterFunc(ctx, func() {
		conn.Close()
		inside.Close()
	})()
	// Each direction ends on its own: a client may have said all it has and still listen.
	var wg sync.WaitGroup
	wg.Go(func() { pass(inside, conn) })
	wg.Go(func() { pass(conn, inside) })
	wg.Wait()
	return nil
}

// pass copies one direction and tells the receiver of its end; a broken one ends both.
func pass(to, from net.Conn) {
	_, err := io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, make([]byte, stdinBuffer))
	half, ok := to.(interface{ CloseWrite() error })
	if err != nil || !ok || half.CloseWrite() != nil {
		to.Close()
		from.Close()
	}
}
