package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// PauseOptions says what Pause measures.
type PauseOptions struct {
	Idle    int   // pauses of an idle sandbox
	Rounds  int   // pauses of sandboxes that touched memory, each of a new one
	Touched int64 // bytes that they touched
	// Rest is how long a sandbox runs between a resume and the next pause.
	Rest     time.Duration
	Progress func(stage string, done, total int64)
}

// pauseTimes are what was measured of pauses of one kind.
type pauseTimes struct {
	pause, resume, first, wake worker // of first: from the call of resume to a command's answer
	freed                      []float64
	bytes                      []float64
}

// Pause measures pauses of an idle sandbox and of one that touched memory: the pause itself, a resume until
// the first command is answered, and, in turn, a command that finds the sandbox paused. Memory that was touched is
// compared afterwards.
func Pause(ctx context.Context, d DSec, o PauseOptions) ([]Result, error) {
	if o.Idle < 0 || o.Rounds < 0 || o.Idle+o.Rounds == 0 || o.Rounds > 0 && o.Touched < 1 {
		return nil, errors.New("pause needs rounds, and bytes to touch in those that do")
	}
	o.Progress = orSilent(o.Progress)
	var out []Result
	if o.Idle > 0 {
		var t pauseTimes
		err := t.idle(ctx, d, o)
		out = append(out, t.results("idle", d.Name())...)
		if err != nil {
			return out, err
		}
	}
	var t pauseTimes
	for n := range o.Rounds {
		o.Progress("sandboxes with touched memory", int64(n), int64(o.Rounds))
		if err := t.touched(ctx, d, o, n); err != nil {
			return out, err
		}
	}
	if o.Rounds > 0 {
		out = append(out, t.results(fmt.Sprintf("%d MiB touched", o.Touched>>20), d.Name())...)
	}
	return out, nil
}

func (t *pauseTimes) idle(ctx context.Context, d DSec, o PauseOptions) (err error) {
	b, err := fill(ctx, d, 1, 1)
	if err != nil {
		return err
	}
	defer func() { err = removed(ctx, b, d.Name(), 1, err) }()
	if err := b.all[0].Exec(ctx, "true"); err != nil {
		return err
	}
	for n := range o.Idle {
		o.Progress("pauses of an idle one", int64(n), int64(o.Idle))
		if err := t.once(ctx, d, b.all[0].(dsecBox), n%2 == 1); err != nil {
			return err
		}
		select {
		case <-time.After(o.Rest):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (t *pauseTimes) touched(ctx context.Context, d DSec, o PauseOptions, n int) (err error) {
	d.Spec.MemoryBytes = room(d.Spec.MemoryBytes, o.Touched)
	b, err := fill(ctx, d, 1, 1)
	if err != nil {
		return err
	}
	defer func() { err = removed(ctx, b, d.Name(), 1, err) }()
	box := b.all[0].(dsecBox)
	if err := touch(ctx, box.sb, o.Touched); err != nil {
		return err
	}
	if err := t.once(ctx, d, box, n%2 == 1); err != nil {
		return err
	}
	return intact(ctx, box.sb)
}

// once pauses and resumes a sandbox, by a resume or by the command itself. An error that the
// operations gave is counted; one is returned if nothing further makes sense.
func (t *pauseTimes) once(ctx context.Context, d DSec, box dsecBox, wake bool) error {
	before, err := memoryOf(ctx, d.Client, []Box{box})
	if err != nil {
		return err
	}
	took, err := timed(func() error { _, err := box.sb.Pause(ctx); return err })
	t.pause.note(took, err)
	if err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	after, err := memoryOf(ctx, d.Client, []Box{box})
	if err != nil {
		return err
	}
	t.freed, t.bytes = append(t.freed, percent(before, after)), append(t.bytes, float64(before-after))
	start := time.Now()
	if !wake {
		took, err := timed(func() error { _, err := box.sb.Resume(ctx); return err })
		t.resume.note(took, err)
		if err != nil {
			return fmt.Errorf("resume: %w", err)
		}
	}
	err = box.Exec(ctx, "true")
	if wake {
		t.wake.note(time.Since(start), err)
	} else {
		t.first.note(time.Since(start), err)
	}
	return err
}

func (t *pauseTimes) results(what, target string) (out []Result) {
	host := ReadHost()
	for _, m := range []struct {
		name string
		w    *worker
	}{{"pause", &t.pause}, {"resume", &t.resume}, {"resume to first exec", &t.first}, {"exec that wakes", &t.wake}} {
		if len(m.w.ok)+m.w.errors == 0 {
			continue
		}
		r := Result{Name: m.name + ", " + what, Target: target, Parallel: 1, Host: host, Seconds: sum(m.w.ok)}
		if m.w == &t.pause && len(t.freed) > 0 {
			slices.Sort(t.freed)
			slices.Sort(t.bytes)
			r.extra("freed_percent_least", t.freed[0])
			r.extra("freed_percent_median", t.freed[len(t.freed)/2])
			r.extra("freed_MiB_median", t.bytes[len(t.bytes)/2]/(1<<20))
		}
		r.sum([]worker{*m.w})
		out = append(out, r)
	}
	return out
}
