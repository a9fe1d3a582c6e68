package aether

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"dsec/aether/msg"
)

func benchConn(b *testing.B, network string) *Conn {
	if network == "unix" {
		c, _ := startPair(b, ServerConfig{}, ClientConfig{})
		return c
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	cs, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	ss, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	c, _ := startOn(b, cs, ss, ServerConfig{}, ClientConfig{})
	return c
}

func BenchmarkCall(b *testing.B) {
	for _, network := range []string{"unix", "tcp"} {
		b.Run(network, func(b *testing.B) {
			c := benchConn(b, network)
			benchCalls(b, c)
		})
	}
}

func benchCalls(b *testing.B, c *Conn) {
	req := &msg.InputRequest{Data: make([]byte, 32)}
	times := make([]time.Duration, 0, 1<<18)
	b.ReportAllocs()
	for b.Loop() {
		var resp msg.InputRequest
		t := time.Now()
		if err := c.Call(context.Background(), "sb", "echo", req, &resp); err != nil {
			b.Fatal(err)
		}
		if len(times) < cap(times) {
			times = append(times, time.Since(t))
		}
	}
	slices.Sort(times)
	b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds()), "p99-ns")
}

func BenchmarkCallParallel(b *testing.B) {
	for _, network := range []string{"unix", "tcp"} {
		b.Run(fmt.Sprintf("%s/16", network), func(b *testing.B) {
			c := benchConn(b, network)
			benchParallel(b, c)
		})
	}
}

func benchParallel(b *testing.B, c *Conn) {
	req := &msg.InputRequest{Data: make([]byte, 32)}
	b.SetParallelism(8) // times GOMAXPROCS
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			var resp msg.InputRequest
			if err := c.Call(context.Background(), "sb", "echo", req, &resp); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
}

func BenchmarkStream(b *testing.B) {
	for _, network := range []string{"unix", "tcp"} {
		b.Run(network, func(b *testing.B) { benchStream(b, benchConn(b, network)) })
	}
}

// benchStream receives 64 MiB per iteration.
func benchStream(b *testing.B, c *Conn) {
	const size = 64 << 20
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		s, err := c.Open(context.Background(), "sb", "source", &msg.ReadRequest{Length: size})
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		for {
			f, err := s.Recv(context.Background())
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				b.Fatal(err)
			}
			n += len(f.Payload)
		}
		if n != size {
			b.Fatal(n)
		}
	}
}

func BenchmarkFrame(b *testing.B) {
	for _, size := range []int{32, 64 << 10} {
		payload := make([]byte, size)
		b.Run(fmt.Sprintf("encode/%d", size), func(b *testing.B) {
			b.SetBytes(int64(size))
			b.ReportAllocs()
			var h rawHeader
			for b.Loop() {
				h.encode(typeData, 1, 7, 9, payload)
			}
		})
		b.Run(fmt.Sprintf("decode/%d", size), func(b *testing.B) {
			b.SetBytes(int64(size))
			b.ReportAllocs()
			conn := &loopConn{frame: rawFrame(typeData, 1, 7, 9, payload)}
			r := frameReader{conn: conn, maxPayload: MaxPayload, beforeWait: func() {}}
			for b.Loop() {
				if _, _, err := r.next(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// loopConn delivers one frame for ever.
type loopConn struct {
	net.Conn
	frame []byte
	at    int
}

func (c *loopConn) Read(p []byte) (n int, err error) {
	for n < len(p) {
		m := copy(p[n:], c.frame[c.at:])
		n += m
		c.at = (c.at + m) % len(c.frame)
	}
	return n, nil
}

// The hot paths of one frame allocate nothing.
func TestFramePathsDoNotAllocate(t *testing.T) {
	payload := make([]byte, 1000)
	r := frameReader{conn: &loopConn{frame: rawFrame(typeData, 1, 7, 9, payload)}, maxPayload: MaxPayload, beforeWait: func() {}}
	if n := testing.AllocsPerRun(1000, func() {
		if _, _, err := r.next(); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("decoding a frame: %v allocations", n)
	}
	c, p := rawServer(t, ClientConfig{})
	go io.Copy(io.Discard, p.conn)
	s, err := c.Open(t.Context(), "", "x", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.addCredit(1 << 30)
	for _, size := range []int{100, 32 << 10} {
		payload := make([]byte, size)
		if n := testing.AllocsPerRun(1000, func() {
			if err := s.Send(context.Background(), KindInput, payload); err != nil {
				t.Fatal(err)
			}
		}); n >= 1 && !raceEnabled { // the race detector makes pools forget
			t.Errorf("sending %d bytes: %v allocations", size, n)
		}
	}
}
