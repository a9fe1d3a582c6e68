package container

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/internal/snapshot/freeze"
)

// still lets a sandbox stand still while f runs, and for at least d, as a pause does: the guest is told before it
// runs again.
func (b *box) still(d time.Duration, f func()) (stood time.Duration) {
	b.t.Helper()
	i := b.Instance.(*instance)
	frozen, err := i.b.cgroups.Freezer(i.id).Freeze(b.t.Context(), freeze.Limits{Freeze: 20 * time.Second, Hold: time.Minute})
	if err != nil {
		b.t.Fatal(err)
	}
	f()
	time.Sleep(time.Until(frozen.Since().Add(d)))
	stood = time.Since(frozen.Since())
	told, err := b.Open(b.t.Context(), "", "guest.resumed", &msg.ResumedRequest{StoodNs: uint64(stood)})
	if terr := frozen.Thaw(); terr != nil {
		b.t.Fatal(terr)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := told.Recv(b.t.Context()); err != io.EOF || told.Result(&msg.Empty{}) != nil {
		b.t.Fatal(err, told.Result(&msg.Empty{}))
	}
	return stood
}

// open opens a stream and reads its first message.
func (b *box) open(method string, req, first aether.Message) *aether.Stream {
	b.t.Helper()
	s, err := b.Open(b.t.Context(), "", method, req)
	if err != nil {
		b.t.Fatal(err)
	}
	f, err := s.Recv(b.t.Context())
	if err != nil || !f.IsMessage || first.ParseWire(f.Payload) != nil {
		b.t.Fatalf("%s: %+v %v", method, f, err)
	}
	return s
}

func (b *box) start(r *msg.StartRequest) *aether.Stream {
	b.t.Helper()
	return b.open("process.start", r, &msg.ProcessStarted{})
}

// Limits of commands do not count what the sandbox stood still, also when they were due meanwhile.
func TestLimitsCountWhatTheSandboxRuns(t *testing.T) {
	t.Parallel()
	b := newBox(t, nil)
	const limit = 2 * time.Second
	var s msg.SessionInfo
	if err := b.Call(t.Context(), "", "session.open", &msg.SessionOpenRequest{}, &s); err != nil {
		t.Fatal(err)
	}
	byTime := b.start(&msg.StartRequest{Cmd: "sleep", Args: []string{"1000"}, TimeoutMs: uint64(limit.Milliseconds())})
	silent := b.start(&msg.StartRequest{Cmd: "sleep", Args: []string{"1000"}, IdleTimeoutMs: uint64(limit.Milliseconds())})
	session, err := b.Open(t.Context(), "", "session.run", &msg.SessionRunRequest{Id: s.Id, Command: "echo; sleep 1000", TimeoutMs: uint64(limit.Milliseconds())})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := session.Recv(t.Context()); err != nil { // it runs
		t.Fatal(err)
	}
	stood := b.still(limit+time.Second, func() {})
	end := func(s *aether.Stream, res aether.Message) {
		t.Helper()
		var err error
		for err == nil {
			_, err = s.Recv(t.Context())
		}
		if err != io.EOF || s.Result(res) != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		what   string
		stream *aether.Stream
	}{{"a time limit", byTime}, {"a limit of silence", silent}} {
		var e msg.Exit
		end(c.stream, &e)
		if d := time.Duration(e.DurationUs+1) * time.Microsecond; d < limit+stood || !e.TimedOut && !e.IdleTimedOut {
			t.Errorf("%s of %v that the sandbox stood still %v of: killed after %v, %+v", c.what, limit, stood, d, &e)
		}
	}
	var e msg.SessionResult
	end(session, &e)
	if d := time.Duration(e.DurationUs+1) * time.Microsecond; d < limit+stood || !e.TimedOut {
		t.Errorf("a session's: killed after %v, %+v", d, &e)
	}
}

// What is attached to a sandbox is as before however often it stood still, and what is sent to it meanwhile arrives.
func TestStreamsOverManyPauses(t *testing.T) {
	t.Parallel()
	const cycles = 100
	b := newBox(t, nil)
	server := b.start(&msg.StartRequest{Cmd: "nc", Args: []string{"-ll", "-p", "700", "-e", "cat"}})
	defer server.Cancel()
	var ports msg.PortList
	for len(ports.Ports) == 0 {
		if err := b.Call(t.Context(), "", "port.list", &msg.Empty{}, &ports); err != nil {
			t.Fatal(err)
		}
	}
	port := b.open("port.dial", &msg.DialRequest{Port: 700}, &msg.Empty{})
	// It answers each line with many, so that it is at work when it stops.
	p := b.start(&msg.StartRequest{Cmd: "sh", Args: []string{"-c", `n=0; while read x; do seq $n $((n+2999)); n=$((n+3000)); done; echo $n >&2; exit 7`}, Stdin: true})
	type outcome struct {
		out, errOut []byte
		exit        msg.Exit
		err         error
	}
	done := make(chan outcome, 1)
	go func() {
		var o outcome
		for {
			f, err := p.Recv(t.Context())
			if err != nil {
				if o.err = err; err == io.EOF {
					o.err = p.Result(&o.exit)
				}
				done <- o
				return
			}
			switch {
			case f.IsMessage:
				o.errOut = append(o.errOut, "a gap\n"...)
			case f.Kind == aether.KindStderr:
				o.errOut = append(o.errOut, f.Payload...)
			default:
				o.out = append(o.out, f.Payload...)
			}
		}
	}()
	for i := range cycles {
		b.still(2*time.Millisecond, func() {
			if err := p.Send(t.Context(), aether.KindInput, []byte("x\n")); err != nil {
				t.Error(err)
			}
			if err := port.Send(t.Context(), aether.KindInput, fmt.Appendf(nil, "%04d", i)); err != nil {
				t.Error(err)
			}
		})
	}
	var echo []byte
	for len(echo) < 4*cycles {
		f, err := port.Recv(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		echo = append(echo, f.Payload...)
	}
	var want strings.Builder
	for i := range cycles {
		fmt.Fprintf(&want, "%04d", i)
	}
	if string(echo) != want.String() {
		t.Errorf("the port echoed %q", echo)
	}
	if err := p.CloseSend(); err != nil {
		t.Fatal(err)
	}
	o := <-done
	if o.err != nil || o.exit.ExitCode != 7 || string(o.errOut) != fmt.Sprintln(cycles*3000) {
		t.Errorf("%v, %+v, %q", o.err, &o.exit, o.errOut)
	}
	want.Reset()
	for i := range cycles * 3000 {
		fmt.Fprintln(&want, i)
	}
	if !bytes.Equal(o.out, []byte(want.String())) {
		t.Errorf("%d bytes of output, want %d, or not in order", len(o.out), want.Len())
	}
}
