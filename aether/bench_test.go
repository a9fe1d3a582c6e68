package aether

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

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
	b.ReportAllocs()
	for b.Loop() {
		var resp msg.InputRequest
		if err := c.Call(context.Background(), "sb", "echo", req, &resp); err != nil {
			b.Fatal(err)
		}
	}
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
