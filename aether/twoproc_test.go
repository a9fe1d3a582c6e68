package aether

import (
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// benchSocketEnv makes this test binary the server of BenchmarkTwoProcesses.
const benchSocketEnv = "AETHER_BENCH_SOCKET"

// BenchmarkTwoProcesses measures calls and streams between processes, as edge and guest
// are: the server is this test binary, run again.
func BenchmarkTwoProcesses(b *testing.B) {
	sock := filepath.Join(b.TempDir(), "s")
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), benchSocketEnv+"="+sock)
	stdin, err := cmd.StdinPipe() // its end stops the child
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	defer cmd.Wait()
	defer stdin.Close()
	var conn net.Conn
	for range 500 {
		if conn, err = net.Dial("unix", sock); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil {
		b.Fatal(err)
	}
	c, err := NewClient(context.Background(), conn, ClientConfig{})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	b.Run("call", func(b *testing.B) { benchCalls(b, c) })
	b.Run("parallel", func(b *testing.B) { benchParallel(b, c) })
	b.Run("stream", func(b *testing.B) { benchStream(b, c) })
	relayed, _ := startPair(b, ServerConfig{Route: to(c)}, ClientConfig{})
	b.Run("relayed call", func(b *testing.B) { benchCalls(b, relayed) })
	b.Run("relayed stream", func(b *testing.B) { benchStream(b, relayed) })
}

// serveForBenchmark is the other process; it ends with its standard input.
func serveForBenchmark(sock string) error {
	l, err := net.Listen("unix", sock)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return NewServer(ServerConfig{Handlers: testHandlers()}).Serve(ctx, l)
}

// BenchmarkFloor is the least that a call between two processes can cost here: one write
// and one read each way on a Unix socket, with nothing around them.
func BenchmarkFloor(b *testing.B) {
	c, s := socketPair(b)
	go func() {
		buf := make([]byte, 100)
		for {
			n, err := s.Read(buf)
			if err != nil {
				return
			}
			s.Write(buf[:n])
		}
	}()
	buf := make([]byte, 100)
	for b.Loop() {
		c.Write(buf)
		if _, err := c.Read(buf); err != nil {
			b.Fatal(err)
		}
	}
	c.Close()
	s.Close()
}
