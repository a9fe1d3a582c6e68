package edge

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// limited is a backend whose instances count how often their CPU limit was asked for.
type limited struct {
	backend.Backend
	asked atomic.Int64
	fail  atomic.Bool
}

type limitedInstance struct {
	backend.Instance
	b *limited
}

func (b *limited) Create(ctx context.Context, s backend.Spec, report backend.StepReport) (backend.Instance, error) {
	i, err := b.Backend.Create(ctx, s, report)
	if err != nil {
		return nil, err
	}
	return &limitedInstance{i, b}, nil
}

func (i *limitedInstance) LimitCPU() error {
	i.b.asked.Add(1)
	if i.b.fail.Load() {
		return errs.New(errs.InternalError, "test", "it cannot be set")
	}
	return nil
}

// A create sets no limit of CPU time, which costs more with each sandbox that there is; nothing is asked of a guest
// without one.
func TestCPUIsLimitedBeforeTheFirstOperation(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	l := &limited{}
	b.wrap = func(inner backend.Backend) backend.Backend { l.Backend = inner; return l }
	e := b.start()
	v, err := b.create(b.control(e), e, nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := l.asked.Load(); n != 0 {
		t.Errorf("a create asked for the limit %d times", n)
	}
	c := b.dial(e, v.ID, v1.RightSandbox)
	exec := func() error { // which a hollow guest does not know: it is asked, or not
		return c.Call(t.Context(), v.ID, "process.exec", &msg.ExecRequest{Start: &msg.StartRequest{Cmd: "true"}}, &msg.ExecResult{})
	}
	if err := exec(); !errors.Is(err, errs.NotSupported) || l.asked.Load() != 1 {
		t.Errorf("%v; the limit was asked for %d times", err, l.asked.Load())
	}
	l.fail.Store(true)
	err = exec()
	if x := errs.Of(err); err == nil || x.Code != errs.InternalError || x.Sandbox != v.ID {
		t.Errorf("without a limit: %v", err)
	}
}
