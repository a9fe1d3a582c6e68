package bench

import (
	"context"
	"fmt"
	"sync"
	"time"

	"dsec/client"
)

// Target makes isolated environments: our server, or another engine to compare with.
type Target interface {
	Name() string
	// Create returns when the box can run commands.
	Create(ctx context.Context) (Box, error)
}

// Box is one environment.
type Box interface {
	// Exec runs a command to its end. A non-zero exit code is an error.
	Exec(ctx context.Context, path string, args ...string) error
	// Remove returns when nothing is left.
	Remove(ctx context.Context) error
}

// DSec is the Target of a server.
type DSec struct {
	Client *client.Client
	Spec   client.Spec

	leases *leases // nil: without
}

// Name implements Target.
func (DSec) Name() string { return "dsec" }

// Create implements Target.
func (d DSec) Create(ctx context.Context) (Box, error) {
	sb, err := d.Client.Create(ctx, d.Spec)
	if err != nil {
		return nil, err
	}
	d.leases.add(sb)
	return dsecBox{sb, d.leases}, nil
}

type dsecBox struct {
	sb     *client.Sandbox
	leases *leases
}

func (b dsecBox) Exec(ctx context.Context, path string, args ...string) error {
	r, err := b.sb.Run(ctx, path, args...)
	if err == nil && r.Code != 0 {
		err = fmt.Errorf("%s: exit code %d", path, r.Code)
	}
	return err
}

func (b dsecBox) Remove(ctx context.Context) error {
	err := b.sb.Delete(ctx)
	b.leases.drop(b.sb) // what could not be removed ends by itself
	return err
}

// removeTimeout bounds the clean-up after a benchmark, which also an interrupt must not skip.
const removeTimeout = 2 * time.Minute

// boxes are made by a benchmark and removed at its end.
type boxes struct {
	mu  sync.Mutex
	all []Box
}

func (b *boxes) add(x Box) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all = append(b.all, x)
}

// remove removes all and measures it as a result of its own.
func (b *boxes) remove(ctx context.Context, target string, parallel int) (Result, error) {
	if len(b.all) == 0 {
		return Result{Name: "rm", Target: target, Parallel: parallel, Host: ReadHost()}, nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	return run(ctx, "rm", target, Load{N: len(b.all), Parallel: parallel}, func(ctx context.Context, _, i int) (time.Duration, error) {
		return timed(func() error { return b.all[i].Remove(ctx) })
	})
}

// fill makes n boxes for a benchmark that needs them to be there; any error ends it.
func fill(ctx context.Context, t Target, n, parallel int) (*boxes, error) {
	b := new(boxes)
	r, err := run(ctx, "fill", t.Name(), Load{N: n, Parallel: min(parallel, n)}, func(ctx context.Context, _, _ int) (time.Duration, error) {
		return timed(func() error {
			x, err := t.Create(ctx)
			if err == nil {
				b.add(x)
			}
			return err
		})
	})
	if err == nil && r.Errors > 0 {
		err = fmt.Errorf("%d of %d sandboxes were not created; the first: %w", r.Errors, n, r.first)
	}
	if err != nil {
		b.remove(ctx, t.Name(), parallel)
		return nil, err
	}
	return b, nil
}
