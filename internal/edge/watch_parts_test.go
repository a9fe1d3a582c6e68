package edge

import (
	"encoding/json"
	"strings"
	"testing"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
)

// A node with many sandboxes, or with large ones, still tells all it has: in parts that
// fit a frame, the last of which says that it is the last.
func TestWatchOfManyLargeSandboxes(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.capacity.Slots = 1000
	e := b.start()
	c := b.control(e)
	want := map[string]bool{}
	for i := range 200 {
		s, err := b.create(c, e, func(r *v1.EdgeCreate) {
			if i%10 == 0 {
				r.Spec.Env = map[string]string{"LARGE": strings.Repeat("x", 200<<10)}
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		want[s.ID] = true
	}
	st, err := c.Open(t.Context(), "", "edge.watch", &msg.EdgeWatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Cancel()
	for part := 0; ; part++ {
		f, err := st.Recv(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var d msg.Document
		var ev v1.EdgeEvent
		if err := d.ParseWire(f.Payload); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(d.Json, &ev); err != nil {
			t.Fatal(err)
		}
		if ev.Reset != (part == 0) {
			t.Fatalf("part %d has reset=%v", part, ev.Reset)
		}
		for _, s := range ev.Sandboxes {
			delete(want, s.ID)
		}
		if !ev.More {
			break
		}
	}
	if len(want) > 0 {
		t.Errorf("%d sandboxes were not told", len(want))
	}
}
