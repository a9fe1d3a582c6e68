package robustness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
	"dsec/test/lifecycle"
)

// nodeDriver puts a server with containers to the test of the lifecycle.
type nodeDriver struct {
	t *testing.T
	b *bed.Bed
	c *client.Client
}

// memory of each of its sandboxes.
const memory = 64 << 20

// cut makes the end of a caller's patience one code, whichever way it came.
func cut(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil && !errors.Is(err, errs.SandboxGone) {
		return errs.New(errs.DeadlineExceeded, "test", "the caller left").Because(err)
	}
	return err
}

func (d *nodeDriver) Create(ctx context.Context) (string, error) {
	sb, err := d.c.Create(ctx, client.Spec{Image: bed.Image, MemoryBytes: memory})
	if err != nil {
		return "", err
	}
	return sb.ID(), nil
}

func (d *nodeDriver) Exec(ctx context.Context, id string) error {
	_, err := d.c.Sandbox(id).Run(ctx, "true")
	return cut(ctx, err)
}

func (d *nodeDriver) Pause(ctx context.Context, id string) (r v1.PauseResult, err error) {
	p, err := d.c.Sandbox(id).Pause(ctx)
	if err == nil {
		r = *p
	}
	return r, cut(ctx, err)
}

func (d *nodeDriver) Resume(ctx context.Context, id string) (r v1.PauseResult, err error) {
	p, err := d.c.Sandbox(id).Resume(ctx)
	if err == nil {
		r = *p
	}
	return r, cut(ctx, err)
}

func (d *nodeDriver) Hint(ctx context.Context, id string) (r v1.HintResult, err error) {
	p, err := d.c.Sandbox(id).Hint(ctx, time.Hour)
	if err == nil {
		r = *p
	}
	return r, cut(ctx, err)
}

func (d *nodeDriver) Idle(context.Context, string) {} // at least a second would have to pass

func (d *nodeDriver) Delete(ctx context.Context, id string) error {
	return cut(ctx, d.c.Delete(ctx, id))
}

func (d *nodeDriver) Get(ctx context.Context, id string) (v v1.Sandbox, err error) {
	p, err := d.c.Get(ctx, id)
	if err == nil {
		v = *p
	}
	return v, err
}

// Restart kills the server.
func (d *nodeDriver) Restart(ctx context.Context) error {
	d.b.Kill(d.t)
	if err := d.b.Up(ctx); err != nil {
		return err
	}
	d.c = d.b.Client(d.t)
	return nil
}

func (d *nodeDriver) AtRest(ctx context.Context, states map[string]v1.State) error {
	paused := 0
	for id, want := range states {
		if want == v1.StatePaused {
			paused++
		}
		sb, err := d.c.Get(ctx, id)
		if err != nil || sb.State != want {
			return fmt.Errorf("%s is not %s: %+v, %v", id, want, sb, err)
		}
	}
	// What the node tells of itself comes a moment later.
	for deadline := time.Now().Add(bed.Patience); ; time.Sleep(10 * time.Millisecond) {
		nodes, err := d.c.Nodes(ctx)
		if err != nil {
			return err
		}
		n := nodes[0]
		if n.Paused == int64(paused) && n.Sandboxes == int64(len(states)) && n.Allocated.MemoryBytes == int64(len(states)-paused)*memory {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the node has %d sandboxes, %d paused, with %+v; want %d, %d", n.Sandboxes, n.Paused, n.Allocated, len(states), paused)
		}
	}
}

type nodeStream struct{ p *client.Process }

// Attach runs cat.
func (d *nodeDriver) Attach(ctx context.Context, id string) (lifecycle.Stream, error) {
	p, err := d.c.Sandbox(id).Start(context.WithoutCancel(ctx), client.Command("cat"), client.IO{OpenStdin: true, Pipes: true})
	if err != nil {
		return nil, err
	}
	return nodeStream{p}, nil
}

func (s nodeStream) Close() { s.p.Detach() }

func (s nodeStream) Ping(ctx context.Context) error {
	if _, err := s.p.Stdin().Write([]byte("x")); err != nil {
		return err
	}
	got := make(chan error, 1)
	go func() {
		_, err := io.ReadFull(s.p.Stdout(), make([]byte, 1))
		got <- err
	}()
	select {
	case err := <-got:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Many clients do what they like with some containers while the server is killed now and then, and a model checks
// what comes of it.
func TestLifecycleAgainstAModel(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	d := &nodeDriver{t: t, b: b, c: b.Client(t)}
	lifecycle.Run(t, bed.Random(t), d, lifecycle.Options{Rounds: 12, Sandboxes: 4, Clients: 8, Ops: 5, Restarts: true, Pause: 5 * time.Millisecond})
}
