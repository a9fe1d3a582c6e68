package container

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/backend"
	"dsec/internal/backend/container/cgroup"
)

// spin keeps so many processors busy in a box, in the background.
func (b *box) spin(n int) {
	b.t.Helper()
	if out, code := b.sh(fmt.Sprintf("for i in $(seq %d); do (while :; do :; done) </dev/null >/dev/null 2>&1 & done", n)); code != 0 {
		b.t.Fatal(out)
	}
}

func (b *box) cpu() float64 {
	b.t.Helper()
	u, err := b.Usage(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return u.CPUSeconds
}

// await waits until a box has used so many CPU seconds more.
func (b *box) await(seconds float64) {
	b.t.Helper()
	for before := b.cpu(); b.cpu()-before < seconds; time.Sleep(10 * time.Millisecond) {
		if err := b.t.Context().Err(); err != nil {
			b.t.Fatal(err)
		}
	}
}

// Best effort has what is left of the processors: all if nobody else wants them, next to nothing if others do.
// It is counted by work done, not by time, so that the machine may do other things meanwhile.
func TestBestEffortDoesNotDisturb(t *testing.T) {
	t.Parallel()
	n := runtime.NumCPU()
	all := func(q v1.QoS) func(*backend.Spec) {
		return func(s *backend.Spec) { s.Sandbox.QoS, s.Sandbox.CPUMillis = q, int64(2000*n) } // its limit never stops it
	}
	ls, be := newBox(t, all(v1.QoSLatency)), newBox(t, all(v1.QoSBest))
	parent := idleParent(t, be)
	if idle, err := os.ReadFile(filepath.Join(parent, "cpu.idle")); err != nil || strings.TrimSpace(string(idle)) != "1" {
		t.Fatalf("%s is not of the idle class: %q, %v", parent, idle, err)
	}
	be.spin(n)
	be.await(0.01) // it does run: little, since others of this machine may be as busy
	ls.spin(4 * n) // so many that no processor is without one, however the kernel spreads them
	ls.await(0.5)  // spread by then
	lsBefore, beBefore := ls.cpu(), be.cpu()
	ls.await(float64(n))
	lsWork, beWork := ls.cpu()-lsBefore, be.cpu()-beBefore
	t.Logf("ls %.2f s, be %.2f s", lsWork, beWork)
	if beWork > 0.15*lsWork { // at the least usual weight it would be a quarter
		t.Errorf("while ls worked for %.2f s, be did for %.2f s", lsWork, beWork)
	}
}

// idleParent is the parent of a box's group that has one of the idle class.
func idleParent(t *testing.T, b *box) string {
	t.Helper()
	for _, p := range b.Instance.(*instance).b.cgroups.Paths(b.ID()) {
		if dir := filepath.Dir(p); strings.HasSuffix(dir, cgroup.IdleSuffix) {
			return dir
		}
	}
	t.Fatal("it has no group of the idle class")
	return ""
}
