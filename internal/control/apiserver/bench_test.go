package apiserver_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/capability"
	"dsec/internal/control/edges"
)

// cpuTime is what the process has used so far.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

const benchBody = `{"image":"debian","cpu_millis":1000,"memory_bytes":536870912,"env":{"LANG":"C.UTF-8"},"labels":{"job":"bench","step":"1"}}`

// The CPU of one create: through HTTP, apiserver and the fake edge (create), and the
// edge's part alone (edge). The difference is what the apiserver costs, with the
// client's side of HTTP in it. The number of sandboxes grows with b.N.
func BenchmarkCreate(b *testing.B) {
	b.Run("create", func(b *testing.B) {
		w := newWorld(b, roomy)
		conn, err := net.Dial("tcp", w.ctl.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		defer conn.Close()
		r := bufio.NewReader(conn)
		req := fmt.Sprintf("POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
			rootToken, len(benchBody), benchBody)
		start := cpuTime(b)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := io.WriteString(conn, req); err != nil {
				b.Fatal(err)
			}
			res, err := http.ReadResponse(r, nil)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != 201 {
				b.Fatal(err, res.Status)
			}
		}
		b.ReportMetric(float64((cpuTime(b)-start).Microseconds())/float64(b.N), "cpu-us/op")
	})
	b.Run("edge", func(b *testing.B) {
		w := newWorld(b, roomy)
		key, err := w.store.SigningKey(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		signer, err := capability.NewSigner(key, nil)
		if err != nil {
			b.Fatal(err)
		}
		pool := edges.New(edges.Config{Token: func() (string, error) {
			return signer.Sign(capability.Claims{Subject: "bench", Sandbox: "*", Rights: []v1.Right{v1.RightAdmin}, Expires: time.Now().Add(time.Minute)})
		}})
		defer pool.Close()
		node := w.edge.Node()
		ask := v1.EdgeCreate{Spec: v1.Spec{Image: "debian", Labels: map[string]string{"job": "bench", "step": "1"}}, Image: &testImage}
		ask.Spec.SetDefaults()
		n := uint64(0)
		start := cpuTime(b)
		b.ReportAllocs()
		for b.Loop() {
			n++
			ask.ID = v1.SandboxID(node.ID, node.Epoch, n)
			if _, err := pool.Create(b.Context(), node, &ask); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64((cpuTime(b)-start).Microseconds())/float64(b.N), "cpu-us/op")
	})
}

// One exec through the relay: HTTP upgrade, routing, splice.
func BenchmarkRelayedCall(b *testing.B) {
	w := newWorld(b, roomy)
	sb := w.create(strings.NewReader(benchBody))
	c := dialAether(b, w, rootToken)
	start := cpuTime(b)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := echo(b.Context(), c, sb.ID, "x"); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64((cpuTime(b)-start).Microseconds())/float64(b.N), "cpu-us/op")
}
