package bench

import (
	"context"
	"fmt"
	"time"

	"dsec/client"
)

// snapshots are removed at a benchmark's end, the last first: each may be made on one before it.
type snapshots struct {
	c     *client.Client
	names []string
}

func (s *snapshots) make(ctx context.Context, sb *client.Sandbox) (*client.Image, error) {
	img, err := sb.Snapshot(ctx, "", client.SnapshotOptions{})
	if err == nil {
		s.names = append(s.names, img.Name)
	}
	return img, err
}

func (s *snapshots) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	var first error
	for n := len(s.names) - 1; n >= 0; n-- {
		if err := s.c.DeleteSnapshot(ctx, s.names[n]); err != nil && first == nil {
			first = err
		}
	}
	s.names = nil
	return first
}

const fillFile = 1 << 20 // bytes of each file that a sandbox is filled with

// change has a sandbox write so many bytes of random data, in files of a MiB.
func change(ctx context.Context, sb *client.Sandbox, dir string, size int64) error {
	const script = `mkdir -p "$1"; i=0; while [ $i -lt $2 ]; do head -c 1048576 /dev/urandom >"$1/$i" || exit 1; i=$((i+1)); done`
	r, err := sb.Run(ctx, "sh", "-c", script, "sh", dir, fmt.Sprint(max(1, size/fillFile)))
	if err == nil && r.Code != 0 {
		err = fmt.Errorf("fill the sandbox: exit code %d: %s", r.Code, r.Stderr)
	}
	return err
}

// Snapshot measures, for each size, a snapshot of a sandbox that changed so much, a second one after a
// MiB more, and a create from that, and plain creates to compare with. Creates are until
// the first answered exec of `true`. N is how often.
func Snapshot(ctx context.Context, d DSec, l Load, sizes []int64) (out []Result, err error) {
	if err := l.validate(); err != nil {
		return nil, err
	}
	l.Parallel = 1 // sizes would mix
	plain, err := Create(ctx, d, l, false)
	if len(plain) > 0 {
		plain[0].Notes = nil
		out = append(out, plain...)
	}
	for _, size := range sizes {
		if err != nil {
			break
		}
		var r []Result
		r, err = snapshotOf(ctx, d, l, size)
		out = append(out, r...)
	}
	return out, err
}

func snapshotOf(ctx context.Context, d DSec, l Load, size int64) ([]Result, error) {
	var second, restored []time.Duration
	mib := fmt.Sprintf("%d MiB", size>>20)
	first, err := run(ctx, "snapshot of "+mib, d.Name(), l, func(ctx context.Context, _, _ int) (took time.Duration, err error) {
		kept := &snapshots{c: d.Client}
		b, err := fill(ctx, d, 1, 1)
		if err != nil {
			return 0, err
		}
		defer func() {
			if rerr := removed(ctx, b, d.Name(), 1, nil); err == nil {
				err = rerr
			}
			if rerr := kept.remove(ctx); err == nil {
				err = rerr
			}
		}()
		sb := b.all[0].(dsecBox).sb
		if err := change(ctx, sb, "/bench/first", size); err != nil {
			return 0, err
		}
		var img *client.Image
		if took, err = timed(func() (err error) { img, err = kept.make(ctx, sb); return err }); err != nil {
			return 0, err
		}
		if err := change(ctx, sb, "/bench/second", fillFile); err != nil {
			return 0, err
		}
		again, err := timed(func() (err error) { img, err = kept.make(ctx, sb); return err })
		if err != nil {
			return 0, err
		}
		from := d
		from.Spec.Image = img.Name
		r, err := Create(ctx, from, Load{N: 1, Parallel: 1}, false)
		if err == nil && r[0].OK != 1 {
			err = fmt.Errorf("create from the snapshot: %s", r[0].ErrorSamples[0])
		}
		if err != nil {
			return 0, err
		}
		second, restored = append(second, again), append(restored, time.Duration(r[0].Latency.Max*float64(time.Millisecond)))
		return took, nil
	})
	first.Notes = append(first.Notes, "the rate includes writing, the other measurements and the removal")
	return []Result{first, beside(first, "second, 1 MiB on "+mib, second), beside(first, "create from "+mib, restored)}, err
}

// beside is what was measured in the same operations as r.
func beside(r Result, name string, took []time.Duration) Result {
	out := Result{Name: name, Target: r.Target, N: r.N, OK: len(took), Errors: r.N - len(took), Parallel: r.Parallel, Host: r.Host}
	for _, t := range took {
		out.Seconds += t.Seconds()
	}
	if out.Seconds > 0 {
		out.RatePerS = float64(out.OK) / out.Seconds
	}
	out.Latency = latencies(took)
	return out
}

// Fork measures forks of a sandbox that changed size bytes into so many children, until the last
// has answered an exec of `true`. N is how often.
func Fork(ctx context.Context, d DSec, l Load, size int64, children int) (r Result, err error) {
	if err := l.validate(); err != nil {
		return r, err
	}
	l.Parallel = 1
	b, err := fill(ctx, d, 1, 1)
	if err != nil {
		return r, err
	}
	defer func() { err = removed(ctx, b, d.Name(), 1, err) }()
	sb := b.all[0].(dsecBox).sb
	if err := change(ctx, sb, "/bench", size); err != nil {
		return r, err
	}
	r, err = run(ctx, fmt.Sprintf("fork x%d", children), d.Name(), l, func(ctx context.Context, _, i int) (time.Duration, error) {
		// Something changed since the last fork, as it would have.
		if err := change(ctx, sb, fmt.Sprintf("/bench/%d.new", i), fillFile); err != nil {
			return 0, err
		}
		made := &boxes{}
		took, err := timed(func() error {
			var first error
			for child, err := range sb.Fork(ctx, children, client.ForkOptions{}) {
				if err == nil {
					box := dsecBox{child, nil}
					made.add(box)
					err = box.Exec(ctx, "true")
				}
				if first == nil {
					first = err
				}
			}
			return first
		})
		return took, removed(ctx, made, d.Name(), min(children, 8), err)
	})
	r.Notes = append(r.Notes, "the rate includes the removal of the children")
	r.extra("bytes", float64(size))
	r.extra("children", float64(children))
	return r, err
}
