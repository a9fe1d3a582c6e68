package bench_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/bench"
)

func names(results []bench.Result) (out []string) {
	for _, r := range results {
		out = append(out, r.Name)
	}
	return out
}

func TestPause(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	res, err := bench.Pause(t.Context(), d, bench.PauseOptions{Idle: 4, Rounds: 2, Touched: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"pause, idle", "resume, idle", "resume to first exec, idle", "exec that wakes, idle",
		"pause, 1 MiB touched", "resume, 1 MiB touched", "resume to first exec, 1 MiB touched", "exec that wakes, 1 MiB touched",
	}
	if got := names(res); !slices.Equal(got, want) {
		t.Fatalf("%q", got)
	}
	for i, n := range []int{4, 2, 2, 2, 2, 1, 1, 1} {
		check(t, res[i], want[i], n, 0)
	}
	if _, ok := res[4].Extra["freed_percent_least"]; !ok {
		t.Errorf("%+v", res[4])
	}
	clean(t, s)
	s.Fail("POST /v1/sandboxes/{id}/pause", 1, errs.New(errs.SwapFull, "test", "no room"))
	if res, err = bench.Pause(t.Context(), d, bench.PauseOptions{Idle: 4}); !errors.Is(err, errs.SwapFull) || len(res) != 1 || res[0].Errors != 1 {
		t.Errorf("%+v, %v", res, err)
	}
	clean(t, s)
}

// What a sandbox remembers of its memory changes while it is paused.
func TestPauseComparesMemory(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	s.Before("POST /v1/sandboxes/{id}/resume", func() {
		for _, id := range s.Sandboxes() {
			if err := os.WriteFile(filepath.Join(s.Root(id), "tmp/bench-touch/before"), []byte("another\n"), 0o600); err != nil {
				t.Error(err)
			}
		}
	})
	_, err := bench.Pause(t.Context(), d, bench.PauseOptions{Rounds: 1, Touched: 1 << 20})
	if err == nil || !strings.Contains(err.Error(), "memory after a pause is not what it was before") {
		t.Error(err)
	}
	clean(t, s)
}

func TestJob(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	free := int64(0)
	res, err := bench.Job(t.Context(), d, bench.Load{N: 3, Parallel: 2}, bench.JobOptions{
		Touched: 1 << 20, Check: true, Available: func() (int64, error) { free += 3 << 20; return free, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"create and touch", "pause of all by one call", "create and touch as many more", "rm of the new",
		"resume of all by one call", "memory compared", "rm",
	}
	if got := names(res); !slices.Equal(got, want) {
		t.Fatalf("%q", got)
	}
	for i := range want {
		check(t, res[i], want[i], 3, 0)
	}
	pause := res[1]
	if pause.Latency.P50 != 1 || pause.Extra["MemAvailable_back_percent_of_touched"] != 100 || pause.Extra["memory_before_MiB"] != 3 || pause.Extra["memory_back_percent"] != 0 {
		t.Errorf("%+v", pause)
	}
	clean(t, s)
	s.Fail("one of turn", 1, errs.New(errs.SwapFull, "test", "no room"))
	res, err = bench.Job(t.Context(), d, bench.Load{N: 2, Parallel: 2}, bench.JobOptions{Touched: 1 << 20})
	if err != nil || len(res) != 5 || res[1].Errors != 1 || res[1].OK != 1 {
		t.Errorf("%+v, %v", res, err)
	}
	clean(t, s)
}

func TestQoS(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	res, err := bench.QoS(t.Context(), d, bench.QoSOptions{Rounds: 2, Steps: 3, Cores: 2, Line: "true", Hog: "sleep 60", Compare: true})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"exec, empty node", "exec, be hogs", "exec, ls hogs", "session, empty node", "session, be hogs", "session, ls hogs"}
	if got := names(res); !slices.Equal(got, want) {
		t.Fatalf("%q", got)
	}
	for i, r := range res {
		check(t, r, want[i], 6, 0)
		if _, ok := r.Extra["p50_ratio"]; ok == strings.HasSuffix(r.Name, "empty node") {
			t.Errorf("%s: %v", r.Name, r.Extra)
		}
	}
	clean(t, s)
}

func TestChurn(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	held := []map[string]int{{"cgroup": 2, "mount": 1}, {"cgroup": 3, "mount": 1}, {"cgroup": 2, "mount": 1}}
	audit := func() (map[string]int, error) { // what is still on its way goes
		now := held[0]
		if len(held) > 1 {
			held = held[1:]
		}
		return now, nil
	}
	o := bench.ChurnOptions{Samples: 5, Settle: time.Minute, Audit: audit}
	r, err := bench.Churn(t.Context(), d, bench.Load{N: 20, Parallel: 4}, o)
	if err != nil {
		t.Fatal(err)
	}
	check(t, r, "churn", 20, 0)
	if len(r.Samples) != 5 || r.Samples[0].Cycles != 0 || r.Samples[4].Cycles != 20 || r.Samples[4].Resident != 1<<20 || r.Samples[4].Files != 20 ||
		r.Extra["audit_left"] != 0 || r.Extra["server_resident_KiB_after"] != 1024 {
		t.Errorf("%+v", r)
	}
	held = []map[string]int{{"cgroup": 2}, {"cgroup": 4, "process": 1}}
	o.Settle = 0
	if r, err = bench.Churn(t.Context(), d, bench.Load{N: 2, Parallel: 1}, o); err == nil || r.Extra["audit_left"] != 3 {
		t.Errorf("%+v, %v", r, err)
	}
	clean(t, s)
}
