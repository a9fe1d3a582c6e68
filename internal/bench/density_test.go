package bench_test

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/bench"
)

// machine is one whose memory shrinks by each with every reading.
type machine struct {
	mu        sync.Mutex
	available int64
	each      int64
	guests    int
}

func (m *machine) Memory() (bench.MemoryState, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.available -= m.each
	const total = 1 << 34
	return bench.MemoryState{Total: total, Available: m.available, Used: total - m.available, By: map[string]int64{"anonymous": total - m.available}}, nil
}

func (m *machine) Guests(ids []string) (bench.GuestMemory, error) {
	m.guests = len(ids)
	return bench.GuestMemory{Looked: len(ids), PSS: 3 << 10, Private: 2 << 10, Threads: 3 * len(ids)}, nil
}

func densityOptions(m *machine) bench.DensityOptions {
	return bench.DensityOptions{Images: []string{"busybox", "busybox"}, Points: 4, Execs: 30, ExecParallel: 3, Peek: m, Seed: 7}
}

func TestDensity(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	m := &machine{available: 1 << 33, each: 1 << 20}
	o := densityOptions(m)
	var audited []string
	o.Audit = func(ids []string) error { audited = ids; return nil }
	stages := map[string]int64{}
	var mu sync.Mutex
	o.Progress = func(stage string, done, _ int64) {
		mu.Lock()
		defer mu.Unlock()
		stages[stage] = max(stages[stage], done)
	}
	r, err := bench.RunDensity(t.Context(), d, bench.Load{N: 40, Parallel: 4}, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Err(); err != nil {
		t.Error(err)
	}
	check(t, r.Create, "create", 40, 0)
	check(t, r.Exec, "exec", 30, 0)
	check(t, r.Remove, "rm", 40, 0)
	clean(t, s)
	if r.Live != 40 || len(r.Points) != 4 || r.Points[1].Count != 20 || r.Points[3].Count != 40 || r.First <= 0 || r.Last <= 0 || r.Audit != "clean" || len(audited) != 40 || m.guests != 40 {
		t.Errorf("%+v", r)
	}
	// Four readings on the way and one at the end, after the one before.
	if want := int64(5 << 20 / 40); r.Each != want || r.Points[0].Each != 1<<20/10 {
		t.Errorf("%d bytes each, want %d; at the first point %d", r.Each, want, r.Points[0].Each)
	}
	if c := r.Memory[0]; c.Name != "anonymous" || c.With-c.Before != 5<<20 {
		t.Errorf("%+v", c)
	}
	n := 0
	for _, b := range r.Histogram {
		n += b.Count
	}
	if n != 30 || stages["create"] != 40 || stages["exec"] != 30 || stages["remove"] != 40 {
		t.Errorf("%d in the histogram; %v", n, stages)
	}
}

// It stops where memory gets short, says so, and removes what it made.
func TestDensityStopsWhereMemoryIsShort(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	m := &machine{available: 1 << 30, each: 100 << 20}
	o := densityOptions(m)
	o.MinFree = 800 << 20
	r, err := bench.RunDensity(t.Context(), d, bench.Load{N: 40, Parallel: 1}, o)
	if err != nil {
		t.Fatal(err)
	}
	if r.Live != 20 || r.Create.Errors != 0 || r.Err() == nil || !strings.Contains(r.Err().Error(), "20 of 40") {
		t.Errorf("%d live, %v", r.Live, r.Err())
	}
	clean(t, s)
}

func TestDensityTellsWhatFailed(t *testing.T) {
	t.Parallel()
	s, d := dsec(t)
	s.Fail("process.exec", 2, errs.New(errs.GuestUnreachable, "route", "no guest"))
	o := densityOptions(&machine{available: 1 << 33})
	o.Audit = func([]string) error { return errors.New("a mount is left") }
	r, err := bench.RunDensity(t.Context(), d, bench.Load{N: 10, Parallel: 2}, o)
	if err != nil {
		t.Fatal(err)
	}
	check(t, r.Exec, "exec", 30, 2)
	if r.Err() == nil || r.Audit != "a mount is left" {
		t.Errorf("%v, audit %q", r.Err(), r.Audit)
	}
	clean(t, s)
}

func TestDensityReport(t *testing.T) {
	t.Parallel()
	d := &bench.Density{
		Images: []string{"a", "b"}, Asked: 2, Live: 2, Each: 3 << 20, UsedBytes: 1 << 33, Audit: "clean", First: 100, Last: 80,
		Memory:    []bench.Category{{Name: "anonymous", Before: 1 << 20, With: 5 << 20}},
		Points:    []bench.DensityPoint{{Count: 1, UsedBytes: 1 << 32, Each: 1 << 20, Rate: 12, Latency: bench.Latency{P50: 1, P99: 3}}, {Count: 2, UsedBytes: 1 << 33, Each: 2 << 20, Rate: 10, Latency: bench.Latency{P50: 2, P99: 4}}},
		Histogram: []bench.Bucket{{UpTo: 1, Count: 5}, {Count: 1}},
	}
	dir := filepath.Join(t.TempDir(), "new")
	if err := d.Report(dir); err != nil {
		t.Fatal(err)
	}
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	var again bench.Density
	if err := json.Unmarshal(read("density.json"), &again); err != nil || again.Each != d.Each || len(again.Points) != 2 || again.Memory[0] != d.Memory[0] {
		t.Errorf("%+v, %v", again, err)
	}
	text := string(read("density.md"))
	for _, want := range []string{"2 of 2 asked for, of a, b", "| memory of one sandbox | 3072.0 KiB |", "80/s against 100/s: 0.800", "| anonymous | 1.0 | 5.0 | 2048.0 |", "| longer | 1 |", "density.svg"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	var table bytes.Buffer
	if err := d.Table(&table); err != nil || !strings.Contains(table.String(), "KiB EACH") {
		t.Errorf("%s, %v", &table, err)
	}
	curves, dec := 0, xml.NewDecoder(bytes.NewReader(read("density.svg")))
	for {
		tok, err := dec.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := tok.(xml.StartElement); ok && e.Name.Local == "polyline" {
			curves++
			if got := strings.Fields(e.Attr[len(e.Attr)-1].Value); len(got) != 2 {
				t.Errorf("a curve of %v", got)
			}
		}
	}
	if curves != 6 {
		t.Errorf("%d curves", curves)
	}
}

func TestMachine(t *testing.T) {
	t.Parallel()
	id := v1.SandboxID("testaa", 1, 2)
	proc := t.TempDir()
	for name, text := range map[string]string{
		"meminfo":           "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nBuffers:  10 kB\nCached:  50 kB\nShmem:  20 kB\nAnonPages:  7 kB\nPageTables: 3 kB\nSecPageTables: 1 kB\n",
		"12/comm":           "dsec-guest\n",
		"12/cgroup":         "4:memory:/a/dsec-0123/" + id + "\n2:cpu:/a/dsec-0123/" + id + "\n",
		"12/smaps_rollup":   "00400000-7fff ---p 00000000 00:00 0    [rollup]\nRss:   900 kB\nPss:      600 kB\nPrivate_Dirty:  500 kB\n",
		"12/status":         "Name:\tdsec-guest\nThreads:\t5\n",
		"13/comm":           "dsec-guest\n",
		"13/cgroup":         "4:memory:/a/dsec-0123/another\n",
		"14/comm":           "bash\n",
		"14/cgroup":         "4:memory:/a/dsec-0123/" + id + "\n",
		"self/not-a-number": "",
	} {
		path := filepath.Join(proc, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := bench.Machine{Proc: proc}
	s, err := m.Memory()
	if err != nil || s.Used != 600<<10 || s.Available != 400<<10 || s.By["files"] != 40<<10 || s.By["page tables"] != 4<<10 {
		t.Errorf("%+v, %v", s, err)
	}
	if g, err := m.Guests([]string{id, "other"}); err != nil || g != (bench.GuestMemory{Looked: 1, PSS: 600 << 10, Private: 500 << 10, Threads: 5}) {
		t.Errorf("%+v, %v", g, err)
	}
}
