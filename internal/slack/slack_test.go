package slack

import (
	"os"
	"strings"
	"testing"
)

func TestRelaxMonitor(t *testing.T) {
	RelaxMonitor()
	dir, err := os.Open("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	tids, err := dir.Readdirnames(-1)
	if err != nil {
		t.Fatal(err)
	}
	var relaxed []string
	for _, tid := range tids {
		if b, err := os.ReadFile("/proc/" + tid + "/timerslack_ns"); err == nil && strings.TrimSpace(string(b)) == "1000000" {
			relaxed = append(relaxed, tid)
		}
	}
	if len(relaxed) != 1 || relaxed[0] != tids[1] {
		t.Errorf("of %v these have the monitor's slack: %v", tids, relaxed)
	}
}
