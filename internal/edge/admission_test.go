package edge

import (
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// A machine that has no process ids left, say, refuses a sandbox and says what to do, and takes it once it has.
func TestAdmissionTellsWhatElseIsShort(t *testing.T) {
	t.Parallel()
	now, few := time.Unix(1, 0), true
	a := &admission{
		capacity: v1.Resources{Slots: 10, CPUMillis: 10, MemoryBytes: 10}, now: func() time.Time { return now },
		free: func() (int64, int64) { return 1, 1 },
		other: func() (string, string, string) {
			if few {
				return "kernel.pid_max", "all are taken", "raise it"
			}
			return "", "", ""
		},
	}
	one := func() *share { return &share{need: v1.Resources{Slots: 1, CPUMillis: 1, MemoryBytes: 1}} }
	x := errs.Of(a.take(one()))
	if x.Code != errs.NodeFull || x.Details["resource"] != "kernel.pid_max" || x.Hint() != "raise it" || x.RetryAfter == 0 {
		t.Errorf("%+v", x)
	}
	few, now = false, now.Add(freeEvery)
	if err := a.take(one()); err != nil {
		t.Error(err)
	}
}
