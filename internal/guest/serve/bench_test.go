package serve

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/aether/msg"
)

func connected(b *testing.B) *guest {
	runtime.GC()
	return start(b)
}

func BenchmarkExecTrue(b *testing.B) {
	g := connected(b)
	req := &msg.ExecRequest{Start: &msg.StartRequest{Cmd: "/bin/true"}}
	for b.Loop() {
		call[msg.ExecResult](b, g.Conn, "process.exec", req)
	}
}

func BenchmarkSession(b *testing.B) {
	for _, shell := range []string{"bash", "dash"} {
		b.Run(shell, func(b *testing.B) {
			g := connected(b)
			s := call[msg.SessionInfo](b, g.Conn, "session.open", &msg.SessionOpenRequest{Shell: shell})
			req := &msg.SessionRunRequest{Id: s.Id, Command: "true"}
			for b.Loop() {
				call[msg.SessionResult](b, g.Conn, "session.exec", req)
			}
		})
	}
}

func BenchmarkStdout(b *testing.B) {
	g := connected(b)
	const size = 1 << 30
	b.SetBytes(size)
	for b.Loop() {
		p := startProcess(b, g.Conn, &msg.StartRequest{Cmd: "head", Args: []string{"-c", fmt.Sprint(size), "/dev/zero"}})
		n := 0
		for {
			f, err := p.Recv(b.Context())
			if err != nil {
				break
			}
			n += len(f.Payload)
		}
		if n != size {
			b.Fatal(n)
		}
	}
}

func privateDirty(b *testing.B, pid int) float64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var kib float64
		if n, _ := fmt.Sscanf(line, "Private_Dirty: %f kB", &kib); n == 1 {
			return kib
		}
	}
	b.Fatal("no Private_Dirty")
	return 0
}

func BenchmarkMemory(b *testing.B) {
	for b.Loop() {
		g := start(b)
		call[msg.GuestInfo](b, g.Conn, "guest.info", &msg.Empty{})
		syscall.Sync()
		time.Sleep(idle + 2*time.Second)
		b.ReportMetric(privateDirty(b, g.pid), "KiB-connected")
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() { call[msg.ExecResult](b, g.Conn, "process.exec", &msg.ExecRequest{Start: sh("echo x")}) })
		}
		wg.Wait()
		startProcess(b, g.Conn, &msg.StartRequest{Cmd: "head", Args: []string{"-c", "10000000", "/dev/zero"}})
		b.ReportMetric(privateDirty(b, g.pid), "KiB-busy")
		time.Sleep(idle + 2*time.Second)
		b.ReportMetric(privateDirty(b, g.pid), "KiB-after")
	}
}
