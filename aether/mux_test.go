package aether

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// plan is what one stream of the property test does.
type plan struct {
	up, down []int // sizes of the frames each way; odd sizes go as messages
	cancelAt int   // client cancels after so many received frames; -1: never
	fail     bool  // server ends with an error
	lazy     bool  // client sends nothing before it has received all
}

func drawPlan(t *rapid.T) plan {
	size := rapid.OneOf(rapid.IntRange(1, 100), rapid.IntRange(1, 200_000))
	return plan{
		up:       rapid.SliceOfN(size, 0, 6).Draw(t, "up"),
		down:     rapid.SliceOfN(size, 0, 6).Draw(t, "down"),
		cancelAt: rapid.IntRange(-5, 6).Draw(t, "cancel"),
		fail:     rapid.Bool().Draw(t, "fail"),
		lazy:     rapid.Bool().Draw(t, "lazy"),
	}
}

// block is deterministic content of one frame.
func block(dir byte, stream, i, n int) []byte {
	b := make([]byte, n)
	for j := range b {
		b[j] = dir + byte(stream*31+i*7+j)
	}
	return b
}

func sendAll(ctx context.Context, s *Stream, dir byte, id int, sizes []int) error {
	for i, n := range sizes {
		var err error
		if n%2 == 1 {
			err = s.SendMessage(ctx, rawMessage(block(dir, id, i, n)))
		} else {
			err = s.Send(ctx, Kind(i%4), block(dir, id, i, n))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func sumOf(dir byte, id int, sizes []int) (sum uint32) {
	for i, n := range sizes {
		sum = crc32.Update(sum, crc32.IEEETable, block(dir, id, i, n))
	}
	return sum
}

// Any mix of streams on one connection, direct or over a relay, with tight windows: each
// stream sees exactly its own bytes in order and its own end.
func TestMuxProperty(t *testing.T) {
	t.Parallel()
	for _, hops := range []int{0, 1} {
		t.Run(fmt.Sprintf("hops=%d", hops), func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, func(rt *rapid.T) {
				plans := rapid.SliceOfN(rapid.Custom(drawPlan), 1, 8).Draw(rt, "plans")
				runPlans(rt, t, hops, plans)
			})
		})
	}
}

func runPlans(rt *rapid.T, t *testing.T, hops int, plans []plan) {
	handler := func(ctx context.Context, s *Stream) (Message, error) {
		var id msg.Selector
		if err := s.Parse(&id); err != nil {
			return nil, err
		}
		p := plans[id.Pid]
		sent := make(chan error, 1)
		go func() { sent <- sendAll(ctx, s, 'd', int(id.Pid), p.down) }()
		var sum uint32
		for {
			f, err := s.Recv(ctx)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				<-sent
				return nil, err
			}
			sum = crc32.Update(sum, crc32.IEEETable, f.Payload)
		}
		if err := <-sent; err != nil {
			return nil, err
		}
		if p.fail {
			return nil, errs.New(errs.SessionBusy, "test", fmt.Sprint(sum))
		}
		return &msg.Exit{StdoutBytes: uint64(sum)}, nil
	}
	cfg := ServerConfig{Window: MinWindow, Handlers: map[string]Handler{"plan": handler}}
	c, stop := rapidPair(rt, t, cfg)
	defer stop()
	if hops > 0 {
		up := c
		var stopRelay func()
		c, stopRelay = rapidPair(rt, t, ServerConfig{Window: MinWindow, Route: to(up)})
		defer stopRelay()
	}
	var wg sync.WaitGroup
	problems := make(chan error, len(plans))
	for id, p := range plans {
		wg.Go(func() {
			if err := runClient(t.Context(), c, id, p); err != nil {
				problems <- fmt.Errorf("stream %d, %+v: %w", id, p, err)
			}
		})
	}
	wg.Wait()
	close(problems)
	for err := range problems {
		rt.Error(err)
	}
	if c.Err() != nil {
		rt.Fatalf("connection: %v", c.Err())
	}
	if n := c.Streams(); n != 0 {
		rt.Fatalf("%d streams left", n)
	}
}

func rapidPair(rt *rapid.T, t *testing.T, cfg ServerConfig) (*Conn, func()) {
	cs, ss := socketPair(t)
	srv := NewServer(cfg)
	done := make(chan struct{})
	go func() { defer close(done); srv.ServeConn(context.Background(), ss) }()
	c, err := NewClient(context.Background(), cs, ClientConfig{Window: MinWindow})
	if err != nil {
		rt.Fatal(err)
	}
	return c, func() { c.Close(); srv.Close(); <-done }
}

func runClient(ctx context.Context, c *Conn, id int, p plan) error {
	s, err := c.Open(ctx, "", "plan", &msg.Selector{Pid: uint32(id)})
	if err != nil {
		return err
	}
	send := func() {
		if sendAll(ctx, s, 'u', id, p.up) == nil {
			s.CloseSend()
		}
	}
	if !p.lazy {
		go send()
	}
	var sum uint32
	n, frames, want := 0, 0, 0
	for _, k := range p.down {
		want += k
	}
	for {
		if p.lazy && n == want {
			p.lazy = false
			go send()
		}
		if frames == p.cancelAt {
			s.Cancel()
		}
		f, err := s.Recv(ctx)
		if errors.Is(err, errs.RequestCanceled) && p.cancelAt >= 0 {
			return nil
		}
		if errors.Is(err, io.EOF) || errors.Is(err, errs.SessionBusy) {
			break
		}
		if err != nil {
			return err
		}
		frames++
		n += len(f.Payload)
		sum = crc32.Update(sum, crc32.IEEETable, f.Payload)
	}
	if sum != sumOf('d', id, p.down) {
		return fmt.Errorf("received %d bytes with sum %08x", n, sum)
	}
	var r msg.Exit
	err = s.Result(&r)
	up := sumOf('u', id, p.up)
	if p.fail {
		if !errors.Is(err, errs.SessionBusy) || errs.Of(err).Message != fmt.Sprint(up) {
			return fmt.Errorf("want the error of the plan with %d, got %w", up, err)
		}
		return nil
	}
	if err != nil || uint32(r.StdoutBytes) != up {
		return fmt.Errorf("server saw %08x, want %08x, %w", r.StdoutBytes, up, err)
	}
	return nil
}
