package bench

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"dsec/client"
)

// Stream measures the stdout of `head -c size /dev/zero` to this process; every byte is
// counted. N is the number of streams; each worker has a sandbox.
func Stream(ctx context.Context, d DSec, l Load, size int64) (r Result, err error) {
	if err := l.validate(); err != nil {
		return Result{}, err
	}
	b, err := fill(ctx, d, l.Parallel, l.Parallel)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = removed(ctx, b, d.Name(), l.Parallel, err) }()
	r, err = withServerMemory(ctx, d.Client, func() (Result, error) {
		return run(ctx, "stream", d.Name(), l, func(ctx context.Context, worker, _ int) (time.Duration, error) {
			return timed(func() error { return streamOnce(ctx, b.all[worker].(dsecBox).sb, size) })
		})
	})
	r.throughput(size)
	return r, err
}

type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

func streamOnce(ctx context.Context, sb *client.Sandbox, size int64) error {
	var n counter
	p, err := sb.Start(ctx, client.Command("head", "-c", strconv.FormatInt(size, 10), "/dev/zero"), client.IO{Stdout: &n})
	if err != nil {
		return err
	}
	x, err := p.Wait()
	switch {
	case err != nil:
		return err
	case x.Code != 0:
		return fmt.Errorf("head: exit code %d", x.Code)
	case int64(n) != size:
		return fmt.Errorf("%d bytes came of %d", n, size)
	}
	return nil
}
