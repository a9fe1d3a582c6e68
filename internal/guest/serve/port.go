package serve

import (
	"context"
	"io"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/internal/guest/port"
)

// portDial carries bytes between the client and what listens in the sandbox. The client's
// FIN ends the service's input. A server end of a stream has no FIN before its last
// frame, so the end of the service's output is told by one Empty message; the stream
// itself ends when both directions have, or the connection breaks.
func (g *Guest) portDial(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var r msg.DialRequest
	if err := s.Parse(&r); err != nil {
		return nil, err
	}
	var c *port.Conn
	var err error
	if r.UnixPath != "" {
		c, err = port.DialUnix(ctx, r.UnixPath)
	} else {
		c, err = port.Dial(ctx, r.Host, r.Port)
	}
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(ctx, c.Close)() // ends both directions
	// A message now tells the client that the connection is made.
	if err := s.SendMessage(ctx, &msg.Empty{}); err != nil {
		c.Close()
		return nil, err
	}
	up := make(chan struct{})
	go func() {
		defer close(up)
		in := &incoming{ctx: ctx, s: s}
		for {
			b, err := in.next()
			if err == io.EOF {
				c.CloseWrite()
				return
			}
			if err == nil {
				_, err = c.Write(b)
			}
			if err != nil {
				stop()
				return
			}
		}
	}()
	err = g.download(ctx, s, c)
	if err == nil {
		err = s.SendMessage(ctx, &msg.Empty{})
	}
	if err != nil {
		stop()
	}
	<-up
	c.Close()
	return nil, nil
}

func (g *Guest) download(ctx context.Context, s *aether.Stream, c *port.Conn) error {
	// Small until there is traffic: many connections only wait.
	buf := make([]byte, 4<<10)
	for {
		n, err := c.Read(buf)
		if n > 0 {
			if err := s.Send(ctx, aether.KindInput, buf[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if n == len(buf) && n < 64<<10 {
			buf = make([]byte, 64<<10)
		}
	}
}
