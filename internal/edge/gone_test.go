package edge

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// busy is a backend whose guests do every operation until they are told to stop.
type busy struct {
	backend.Backend
	guests *aether.Server
	atWork atomic.Int32
}

func newBusy(t *testing.T, be backend.Backend) *busy {
	b := &busy{Backend: be}
	b.guests = aether.NewServer(aether.ServerConfig{
		Fallback: func(ctx context.Context, s *aether.Stream) (aether.Message, error) {
			if err := s.SendMessage(ctx, &msg.ProcessStarted{Pid: 2}); err != nil && !errors.Is(err, errs.NotSupported) {
				return nil, err
			}
			b.atWork.Add(1)
			<-ctx.Done()
			return nil, ctx.Err()
		},
		KeepAlive: -1,
	})
	t.Cleanup(func() { b.guests.Close() })
	return b
}

func (b *busy) Create(ctx context.Context, spec backend.Spec, r backend.StepReport) (backend.Instance, error) {
	i, err := b.Backend.Create(ctx, spec, r)
	return &busyInstance{i, b}, err
}

type busyInstance struct {
	backend.Instance
	b *busy
}

func (i *busyInstance) DialGuest(context.Context) (net.Conn, error) {
	mine, theirs := net.Pipe()
	go i.b.guests.ServeConn(context.Background(), theirs)
	return mine, nil
}

// Operations that the removal of their sandbox ends say so, and why it was removed.
func TestOperationsOfARemovedSandboxSayGone(t *testing.T) {
	t.Parallel()
	for why, end := range map[v1.EndReason]func(b *bed, e *Edge, c *aether.Conn, id string) error{
		v1.EndRequest: func(b *bed, e *Edge, c *aether.Conn, id string) error {
			return c.Call(b.t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: id}, &msg.Empty{})
		},
		v1.EndTTL: func(b *bed, e *Edge, _ *aether.Conn, id string) error { e.expire(e.get(id), v1.EndTTL); return nil },
	} {
		t.Run(string(why), func(t *testing.T) {
			t.Parallel()
			b := newBed(t)
			var guests *busy
			b.wrap = func(be backend.Backend) backend.Backend { guests = newBusy(t, be); return guests }
			e := b.start()
			control, user := b.control(e), b.control(e)
			sb, err := b.create(control, e, nil)
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 4)
			for _, method := range []string{"process.start", "process.attach", "file.pack"} {
				s, err := user.Open(t.Context(), sb.ID, method, &msg.Empty{})
				if err != nil {
					t.Fatal(err)
				}
				if _, err := s.Recv(t.Context()); err != nil {
					t.Fatal(err)
				}
				go func() { _, err := s.Recv(t.Context()); ended <- err }()
			}
			go func() {
				_, err := user.Batch(t.Context(), &msg.Batch{Ops: []*msg.BatchOp{{Method: "process.exec", Target: sb.ID}}})
				ended <- err
			}()
			for guests.atWork.Load() < 4 {
				time.Sleep(time.Millisecond)
			}
			if err := end(b, e, control, sb.ID); err != nil {
				t.Fatal(err)
			}
			for range 4 {
				x := errs.Of(<-ended)
				if x.Code != errs.SandboxGone || x.Retryable || x.Details["end_reason"] != string(why) || x.Sandbox != sb.ID || x.Node != e.ID() {
					t.Errorf("%+v", x)
				}
			}
		})
	}
}

// A create that meets the removal of what it makes says that, not that it was canceled.
func TestCreateOfARemovedSandboxSaysGone(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.wrap = func(be backend.Backend) backend.Backend { return &slow{Backend: be, gate: make(chan struct{})} }
	e := b.start()
	c := b.control(e)
	id := v1.SandboxID(e.ID(), e.epoch, 7)
	failed := make(chan error)
	go func() {
		_, err := b.create(c, e, func(r *v1.EdgeCreate) { r.ID = id })
		failed <- err
	}()
	for e.get(id) == nil {
		time.Sleep(time.Millisecond)
	}
	if err := c.Call(t.Context(), "", "sandbox.delete", &msg.SandboxRequest{Id: id}, &msg.Empty{}); err != nil {
		t.Error(err)
	}
	if err := <-failed; !errors.Is(err, errs.SandboxGone) || errs.Of(err).Details["end_reason"] != string(v1.EndRequest) {
		t.Errorf("the create says %v", err)
	}
}
