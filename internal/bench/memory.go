package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"dsec/client"
)

// fewForMemory is below how many sandboxes the memory of one is overstated.
const fewForMemory = 500

// sampleEvery is how often the server's memory is read during a transfer.
const sampleEvery = 100 * time.Millisecond

// withServerMemory adds the growth of the server's memory during f, from its metrics.
func withServerMemory(ctx context.Context, c *client.Client, f func() (Result, error)) (Result, error) {
	before, berr := residentMemory(ctx, c)
	sctx, stop := context.WithCancel(ctx)
	peak := make(chan float64)
	go func() {
		most := before
		for {
			if now, err := residentMemory(sctx, c); err == nil {
				most = max(most, now)
			}
			select {
			case <-time.After(sampleEvery):
			case <-sctx.Done():
				peak <- most
				return
			}
		}
	}()
	r, err := f()
	stop()
	most := <-peak
	if berr != nil {
		r.Notes = append(r.Notes, "no server memory: "+berr.Error())
		return r, err
	}
	r.extra("server_memory_growth_MiB", (most-before)/(1<<20))
	return r, err
}

func residentMemory(ctx context.Context, c *client.Client) (float64, error) {
	b, err := c.Metrics(ctx)
	if err != nil {
		return 0, err
	}
	return parseMetric(b, "process_resident_memory_bytes")
}

// parseMetric finds a metric without labels in Prometheus' text format.
func parseMetric(b []byte, name string) (float64, error) {
	for line := range bytes.Lines(b) {
		f := bytes.Fields(line)
		if len(f) >= 2 && string(f[0]) == name {
			return strconv.ParseFloat(string(f[1]), 64)
		}
	}
	return 0, fmt.Errorf("the server has no metric %s", name)
}

// Memory measures what n idle sandboxes cost the machine, kernel included: how much
// MemAvailable shrinks. It is of use only where the server runs on this machine and
// little else does. One sandbox more is made first, so that what all share is there
// before.
func Memory(ctx context.Context, t Target, n, parallel int, settle time.Duration) (r Result, err error) {
	if n < 1 {
		return Result{}, errors.New("memory needs at least one sandbox")
	}
	first, err := fill(ctx, t, 1, 1)
	if err != nil {
		return Result{}, err
	}
	// It stays until the end: what it brings alone is not the cost of one more.
	defer func() { err = removed(ctx, first, t.Name(), parallel, err) }()
	before, err := settled(ctx, settle)
	if err != nil {
		return Result{}, err
	}
	var b boxes
	r, err = run(ctx, "memory", t.Name(), Load{N: n, Parallel: parallel}, func(ctx context.Context, _, _ int) (time.Duration, error) {
		return timed(func() error {
			x, err := t.Create(ctx)
			if err == nil {
				b.add(x)
			}
			return err
		})
	})
	defer func() { err = removed(ctx, &b, t.Name(), parallel, err) }()
	if err != nil {
		return r, err
	}
	if r.OK == 0 {
		return r, nil
	}
	after, err := settled(ctx, settle)
	if err != nil {
		return r, err
	}
	r.extra("KiB_per_sandbox", float64(before-after)/1024/float64(r.OK))
	if r.OK < fewForMemory {
		r.Notes = append(r.Notes, fmt.Sprintf("%d sandboxes are few: what they share, and the machine's own ups and downs, count as theirs; take %d or more", r.OK, fewForMemory))
	}
	r.Notes = append(r.Notes, fmt.Sprintf("MemAvailable before %.1f MiB, with %d sandboxes %.1f MiB", float64(before)/(1<<20), r.OK, float64(after)/(1<<20)))
	return r, nil
}

// settled waits and returns the median of several readings of MemAvailable.
func settled(ctx context.Context, wait time.Duration) (int64, error) {
	const readings = 9
	var all []int64
	for i := range readings {
		d := wait
		if i > 0 {
			d = sampleEvery
		}
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
		now, err := Available()
		if err != nil {
			return 0, err
		}
		all = append(all, now)
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

// Available is the MemAvailable of this machine, in bytes.
func Available() (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read available memory: %w", err)
	}
	kib, err := parseMetric(b, "MemAvailable:")
	if err != nil {
		return 0, fmt.Errorf("read available memory: %w", err)
	}
	return int64(kib) * 1024, nil
}
