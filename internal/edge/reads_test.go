package edge

import (
	"testing"
	"time"

	v1 "dsec/api/v1"
)

func TestReadsCountForWhoeverReads(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(0)
	asked := 0
	of := map[int]string{1: "a", 2: "b", 3: "unknown"}
	r := NewReads(func(pid int) (string, bool) { asked++; s, ok := of[pid]; return s, ok }, func() time.Time { return now })
	r.begin("a")
	r.begin("b")
	for range 3 {
		r.Note(1, 10, 4, time.Second)
	}
	r.Note(2, 5, 0, 0)
	r.Note(3, 7, 7, 0) // of a sandbox that is gone
	r.Note(0, 1, 1, 0) // out of sight
	r.Note(9, 2, 2, 0) // of none
	if want := (v1.ImageReads{ReadBytes: 30, FetchedBytes: 12, WaitSeconds: 3}); r.Of("a") != want {
		t.Errorf("a: %+v", r.Of("a"))
	}
	if asked != 4 {
		t.Errorf("owners were looked for %d times", asked)
	}
	of[1] = "b" // another thread has the number by now
	now = now.Add(readerTime)
	r.Note(1, 100, 100, 0)
	if got := r.Of("b").ReadBytes; got != 105 {
		t.Errorf("b: %d", got)
	}
	r.end("a")
	r.end("a")
	if (r.Of("a") != v1.ImageReads{}) {
		t.Errorf("a after its end: %+v", r.Of("a"))
	}
	most, sandboxes, others := r.Most(10)
	if len(most) != 1 || most[0].Sandbox != "b" || sandboxes.ReadBytes != 135 || others.ReadBytes != 10 || others.FetchedBytes != 10 {
		t.Errorf("%+v, %+v, %+v", most, sandboxes, others)
	}
	if most, _, _ := r.Most(0); len(most) != 0 {
		t.Errorf("more than were asked for: %+v", most)
	}
	for pid := range 2 * maxReaders {
		r.Note(100+pid, 1, 0, 0)
	}
	if len(r.pids) > maxReaders {
		t.Errorf("%d threads are remembered", len(r.pids))
	}
	var none *Reads
	none.Note(1, 1, 1, 0)
	none.begin("a")
	none.end("a")
	if (none.Of("a") != v1.ImageReads{}) {
		t.Error("no counts count")
	}
}
