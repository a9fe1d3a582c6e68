package serve

import (
	"testing"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// What goes on in the sandbox is told, and what the edge asks is not part of it.
func TestActivity(t *testing.T) {
	t.Parallel()
	g := start(t)
	want := func(what string, a msg.Activity) {
		t.Helper()
		var got *msg.Activity
		for range 1000 { // what has ended is counted out a moment after the client knows
			if got = call[msg.Activity](t, g.Conn, "guest.activity", &msg.Empty{}); *got == a {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
		t.Fatalf("%s: %+v, want %+v", what, got, &a)
	}
	want("nothing", msg.Activity{})
	call[msg.SessionInfo](t, g.Conn, "session.open", &msg.SessionOpenRequest{Id: "s"})
	want("a session that waits", msg.Activity{})
	run, err := g.Open(t.Context(), "", "session.run", &msg.SessionRunRequest{Id: "s", Command: "read x < /dev/zero"})
	if err != nil {
		t.Fatal(err)
	}
	want("a session that works", msg.Activity{BusySessions: 1, Streams: 1})
	run.Cancel()
	want("its command given up", msg.Activity{})
	p := startProcess(t, g.Conn, &msg.StartRequest{Cmd: "sleep", Args: []string{"1000"}})
	want("a process that is followed", msg.Activity{Commands: 1, Streams: 1})
	p.Cancel()
	want("a process by itself", msg.Activity{Commands: 1})
	call[msg.Empty](t, g.Conn, "process.signal", &msg.SignalRequest{Process: &msg.Selector{Pid: p.started.Pid}, Signal: 9})
	want("it has ended", msg.Activity{})
}

// A client's batch is relayed to the guest whole, so the guest itself keeps its edge's
// methods from it.
func TestEdgesMethodsAreNotInABatch(t *testing.T) {
	t.Parallel()
	g := start(t)
	call[msg.Empty](t, g.Conn, "guest.resumed", &msg.ResumedRequest{StoodNs: 1 << 63})
	res, err := g.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{
		{Method: "guest.resumed", Body: (&msg.ResumedRequest{StoodNs: 1 << 50}).AppendWire(nil)},
		{Method: "guest.activity"},
		{Method: "guest.info"},
	}})
	if err != nil || len(res.Items) != 3 {
		t.Fatalf("%+v %v", res, err)
	}
	for i, code := range []errs.Code{errs.MissingRight, errs.MissingRight, ""} {
		if e := res.Items[i].Error; (e == nil) != (code == "") || e != nil && e.Code != string(code) {
			t.Errorf("operation %d: %+v, want %q", i, e, code)
		}
	}
}
