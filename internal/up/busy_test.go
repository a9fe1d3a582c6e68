package up

import (
	"testing"
	"time"
)

func TestBusyTime(t *testing.T) {
	t.Parallel()
	busy, err := parseBusy("cpu  100 20 300 9000 500 6 7 999 50 60\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
	if want := 433 * 10 * time.Millisecond; err != nil || busy != want { // what a hypervisor took is not ours
		t.Errorf("%v, %v; want %v", busy, err, want)
	}
	for _, bad := range []string{"", "cpu 1 2 3\n", "intr 1 2 3 4 5 6 7 8 9\n", "cpu a 2 3 4 5 6 7 8 9\n"} {
		if _, err := parseBusy(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	first, err := busyTime()
	if err != nil || first <= 0 {
		t.Errorf("of this machine: %v, %v", first, err)
	}
}
