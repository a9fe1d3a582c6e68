package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/internal/bench"
	"dsec/internal/clienttest"
)

func dsec(t *testing.T) (*clienttest.Server, bench.DSec) {
	t.Helper()
	s := clienttest.New(t)
	c, err := client.New(client.Options{URL: s.URL, Token: clienttest.Token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return s, bench.DSec{Client: c, Spec: client.Spec{Image: "busybox"}}
}

// clean fails if a benchmark left something.
func clean(t *testing.T, s *clienttest.Server) {
	t.Helper()
	if left := s.Sandboxes(); len(left) > 0 {
		t.Errorf("%d sandboxes left", len(left))
	}
}

func check(t *testing.T, r bench.Result, name string, n, failed int) {
	t.Helper()
	l := r.Latency
	if r.Name != name || r.N != n || r.Errors != failed || r.OK != n-failed || r.Seconds <= 0 || r.Host.Cores < 1 || r.Host.Kernel == "" || r.Host.Memory == 0 {
		t.Errorf("%+v", r)
	}
	if r.OK > 0 && (l.P50 > l.P90 || l.P90 > l.P99 || l.P99 > l.Max || l.Max <= 0) {
		t.Errorf("latencies %+v", l)
	}
	if got, want := r.RatePerS*r.Seconds, float64(r.OK); got < want-0.01 || got > want+0.01 {
		t.Errorf("rate × time is %g, want the %g successes", got, want)
	}
}

func TestCreate(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	res, err := bench.Create(t.Context(), d, bench.Load{N: 10, Parallel: 4}, true)
	if err != nil || len(res) != 2 {
		t.Fatal(res, err)
	}
	check(t, res[0], "create", 10, 0)
	check(t, res[1], "rm", 10, 0)
	clean(t, s)
	if res, err = bench.Create(t.Context(), d, bench.Load{N: 3, Parallel: 1}, false); err != nil || len(res) != 1 {
		t.Fatal(res, err)
	}
	check(t, res[0], "create", 3, 0)
	clean(t, s)
}

// Failures are shown and do not count in the rate, and what was made is removed.
func TestCreateCountsOnlySuccesses(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	s.Fail("POST /v1/sandboxes", 3, errs.New(errs.NodeFull, "edge.admit", "memory is used up"))
	s.Fail("process.exec", 2, errs.New(errs.GuestUnreachable, "route", "no guest"))
	for _, hold := range []bool{true, false} {
		res, err := bench.Create(t.Context(), d, bench.Load{N: 10, Parallel: 2}, hold)
		if err != nil {
			t.Fatal(err)
		}
		failed := 0
		if hold {
			failed = 5
			if len(res[0].ErrorSamples) != 2 || !strings.Contains(strings.Join(res[0].ErrorSamples, " "), "memory is used up") {
				t.Errorf("samples %q", res[0].ErrorSamples)
			}
		}
		check(t, res[0], "create", 10, failed)
		clean(t, s)
	}
}

func TestExecSession(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	r, err := bench.Exec(t.Context(), d, bench.Load{N: 20, Parallel: 4}, 2)
	if err != nil || r.Extra["sandboxes"] != 2 {
		t.Fatal(r, err)
	}
	check(t, r, "exec", 20, 0)
	if r, err = bench.Session(t.Context(), d, bench.Load{N: 20, Parallel: 4}, 2, "true"); err != nil {
		t.Fatal(err)
	}
	check(t, r, "session", 20, 0)
	if _, err := bench.Session(t.Context(), d, bench.Load{N: 1, Parallel: 1}, 1, "exit 3"); err == nil || !strings.Contains(err.Error(), "exit code 3") {
		t.Errorf("a failing command: %v", err)
	}
	s.Fail("POST /v1/sandboxes", 1, errs.New(errs.NodeFull, "edge.admit", "full"))
	if _, err := bench.Exec(t.Context(), d, bench.Load{N: 1, Parallel: 2}, 3); err == nil || !strings.Contains(err.Error(), "full") {
		t.Errorf("no sandbox: %v", err)
	}
	clean(t, s)
}

// What is measured is each thing apart, and all of it goes: sandboxes and snapshots.
func TestSnapshotFork(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	res, err := bench.Snapshot(t.Context(), d, bench.Load{N: 2, Parallel: 3}, []int64{1 << 20, 2 << 20})
	if err != nil || len(res) != 7 {
		t.Fatal(res, err)
	}
	for i, name := range []string{"create", "snapshot of 1 MiB", "second, 1 MiB on 1 MiB", "create from 1 MiB", "snapshot of 2 MiB", "second, 1 MiB on 2 MiB", "create from 2 MiB"} {
		if res[i].Name == "snapshot of 1 MiB" || res[i].Name == "snapshot of 2 MiB" {
			res[i].RatePerS = float64(res[i].OK) / res[i].Seconds
		}
		check(t, res[i], name, 2, 0)
	}
	r, err := bench.Fork(t.Context(), d, bench.Load{N: 2, Parallel: 1}, 1<<20, 4)
	if err != nil || r.Extra["children"] != 4 {
		t.Fatal(r, err)
	}
	check(t, r, "fork x4", 2, 0)
	s.Fail("one of batch", 1, errs.New(errs.NodeFull, "edge.admit", "full"))
	if r, err = bench.Fork(t.Context(), d, bench.Load{N: 2, Parallel: 1}, 1<<20, 4); err != nil {
		t.Fatal(err)
	}
	check(t, r, "fork x4", 2, 1)
	clean(t, s)
	if left, err := d.Client.Snapshots(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("snapshots left: %v, %v", left, err)
	}
}

func TestDuration(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	r, err := bench.Exec(t.Context(), d, bench.Load{Duration: 50 * time.Millisecond, Parallel: 2}, 1)
	if err != nil || r.OK == 0 || r.Seconds < 0.05 {
		t.Errorf("%+v, %v", r, err)
	}
	clean(t, s)
}

func TestTransfers(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	res, err := bench.Files(t.Context(), d, bench.Load{N: 2, Parallel: 2}, 3<<20+7, "/tmp")
	if err != nil || len(res) != 2 {
		t.Fatal(res, err)
	}
	check(t, res[0], "file up", 2, 0)
	check(t, res[1], "file down", 2, 0)
	r, err := bench.Stream(t.Context(), d, bench.Load{N: 2, Parallel: 1}, 5<<20)
	if err != nil {
		t.Fatal(err)
	}
	check(t, r, "stream", 2, 0)
	for _, r := range append(res, r) {
		if growth, ok := r.Extra["server_memory_growth_MiB"]; r.Extra["MiB_per_s"] <= 0 || !ok || growth != 0 {
			t.Errorf("%s: %v %v", r.Name, r.Extra, r.Notes)
		}
	}
	s.Fail("GET /metrics", 1000, errs.New(errs.MissingRight, "auth", "right read is missing"))
	if r, err = bench.Stream(t.Context(), d, bench.Load{N: 1, Parallel: 1}, 10); err != nil || len(r.Notes) != 1 || r.OK != 1 {
		t.Errorf("without metrics: %+v, %v", r, err)
	}
	clean(t, s)
}

func TestMemory(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	r, err := bench.Memory(t.Context(), d, 3, 2, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	check(t, r, "memory", 3, 0)
	if _, ok := r.Extra["KiB_per_sandbox"]; !ok {
		t.Errorf("%+v", r)
	}
	clean(t, s)
}

// slow is a Target whose boxes are counted, to stop a benchmark in the middle.
type slow struct {
	mu           sync.Mutex
	alive, made  int
	cancel       context.CancelFunc
	removeFailed bool
}

func (*slow) Name() string { return "slow" }

func (s *slow) Create(context.Context) (bench.Box, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive++
	if s.made++; s.made == 5 {
		s.cancel()
	}
	return s, nil
}

func (s *slow) Exec(ctx context.Context, _ string, _ ...string) error { return ctx.Err() }

func (s *slow) Remove(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.removeFailed {
		return errors.New("stuck")
	}
	s.alive--
	return nil
}

func TestInterruptRemovesEverything(t *testing.T) {
	t.Parallel()
	for _, hold := range []bool{true, false} {
		ctx, cancel := context.WithCancel(t.Context())
		s := &slow{cancel: cancel}
		res, err := bench.Create(ctx, s, bench.Load{N: 1000, Parallel: 3}, hold)
		if !errors.Is(err, context.Canceled) || s.alive != 0 || res[0].Errors != 0 {
			t.Errorf("hold %t: %d alive, %+v, %v", hold, s.alive, res[0], err)
		}
	}
	s := &slow{cancel: func() {}, removeFailed: true}
	if _, err := bench.Exec(t.Context(), s, bench.Load{N: 1, Parallel: 1}, 1); err == nil || !strings.Contains(err.Error(), "stuck") {
		t.Errorf("a removal that fails: %v", err)
	}
}

func TestLoadIsChecked(t *testing.T) {
	t.Parallel()
	for _, l := range []bench.Load{{N: 1}, {Parallel: 1}, {N: -1, Parallel: 1}, {N: 1, Parallel: -1}} {
		if _, err := bench.Create(t.Context(), &slow{cancel: func() {}}, l, true); err == nil {
			t.Errorf("%+v was accepted", l)
		}
	}
}

func TestReports(t *testing.T) {
	t.Parallel()
	_, d := dsec(t)
	res, err := bench.Create(t.Context(), d, bench.Load{N: 2, Parallel: 1}, true)
	if err != nil {
		t.Fatal(err)
	}
	res[0].ErrorSamples = []string{"boom"}
	var b bytes.Buffer
	if err := bench.Table(&b, res); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"p99 ms", "create", "rm", "error: boom", "cores"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	j, err := json.Marshal(res[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"name", "n", "ok", "errors", "seconds", "rate_per_s", "latency_ms", "p50", "p90", "p99", "max", "host", "cpu", "cores", "memory", "kernel", "client_cpu_seconds"} {
		if !bytes.Contains(j, []byte(`"`+key+`":`)) {
			t.Errorf("no key %q in %s", key, j)
		}
	}
}

// What a benchmark makes has a lease, which is renewed while the benchmark lives and not
// beyond: a killed one leaves nothing.
func TestSandboxesAreHeldByALease(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	renewed := make(chan struct{}, 1000)
	s.Before("POST /v1/sandboxes/{id}/renew", func() { renewed <- struct{}{} })
	held, release := d.Hold(t.Context(), time.Second)
	box, err := held.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if sb, err := d.Client.Get(t.Context(), s.Sandboxes()[0]); err != nil || sb.Spec.Lease != 1 {
		t.Errorf("made: %+v, %v", sb, err)
	}
	<-renewed
	<-renewed
	release()
	for len(renewed) > 0 {
		<-renewed
	}
	if err := box.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	if len(renewed) > 0 {
		t.Error("it is renewed after the end of the benchmark")
	}
	clean(t, s)
}
