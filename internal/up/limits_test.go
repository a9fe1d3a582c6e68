package up

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	v1 "dsec/api/v1"
)

func TestShortOfPIDs(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ loadavg, pidMax, threadsMax, want string }{
		{"0.20 0.18 0.12 1/80 11206\n", "32768\n", "192000\n", ""},
		{"9.20 8.18 7.12 3/31600 4\n", "32768\n", "192000\n", ""},
		{"9.20 8.18 7.12 3/31800 4\n", "32768\n", "192000\n", "kernel.pid_max"}, // one in 32 is kept
		{"9.20 8.18 7.12 3/3600 4\n", "32768\n", "4000\n", "kernel.threads-max"},
		{"", "32768\n", "192000\n", ""}, // what cannot be read stops nobody
	} {
		proc := t.TempDir()
		for name, text := range map[string]string{"loadavg": c.loadavg, "sys/kernel/pid_max": c.pidMax, "sys/kernel/threads-max": c.threadsMax} {
			path := filepath.Join(proc, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		resource, text, advice := shortOfPIDs(proc)
		if resource != c.want || (c.want != "") != strings.Contains(advice, "sysctl") || (c.want != "") != (text != "") {
			t.Errorf("loadavg %q: %q, %q, %q; want %q", c.loadavg, resource, text, advice, c.want)
		}
	}
}

// As many sandboxes of the default size are admitted as --slots says.
func TestOvercommitFitsTheSlots(t *testing.T) {
	t.Parallel()
	if cpu, memory := Overcommit(1); cpu != DefaultCPUOvercommit || memory != DefaultMemoryOvercommit {
		t.Errorf("for one sandbox: %g, %g", cpu, memory)
	}
	const slots = 1 << 30
	cpu, memory := Overcommit(slots)
	_, total, err := memoryInfo()
	if err != nil {
		t.Fatal(err)
	}
	if cpu*float64(runtime.NumCPU()*1000) < slots*v1.DefaultCPUMillis || memory*float64(total) < slots*(v1.DefaultMemoryBytes-1) {
		t.Errorf("for %d sandboxes: %g, %g", slots, cpu, memory)
	}
}
