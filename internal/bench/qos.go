package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	v1 "dsec/api/v1"
	"dsec/client"
)

// QoSOptions says what QoS measures.
type QoSOptions struct {
	Rounds   int    // each has every phase once
	Steps    int    // of each kind, in each phase
	Cores    int    // of the node: so many hogs
	Line     string // the step: a shell's command line
	Hog      string // command line that keeps one core busy
	Compare  bool   // with hogs of class ls, too
	Progress func(stage string, done, total int64)
}

// hogStart is how long hogs run before steps are measured.
const hogStart = 200 * time.Millisecond

// phase is a state of the node in which steps are measured.
type phase struct {
	name  string
	hogs  []*client.Sandbox // busy then
	kinds []*stepTimes
	busy  float64 // CPU seconds that the hogs had
	took  float64 // seconds that it lasted
}

// stepTimes are those of one kind of step, by round.
type stepTimes struct {
	name   string
	do     func(ctx context.Context) error
	rounds [][]time.Duration
	worker
}

// QoS measures the steps of a sandbox of class ls, as a command and in a session, on the empty node and while
// hogs of class be keep every core busy, and, to compare, hogs of class ls. Phases alternate in
// short rounds, the first another each time, so that what changes on the machine meanwhile meets all of them.
func QoS(ctx context.Context, d DSec, o QoSOptions) (out []Result, err error) {
	if o.Rounds < 1 || o.Steps < 1 || o.Cores < 1 || o.Line == "" || o.Hog == "" {
		return nil, errors.New("qos needs rounds, steps, cores, a step and a hog")
	}
	o.Progress = orSilent(o.Progress)
	step := d
	step.Spec.QoS = v1.QoSLatency
	b, err := fill(ctx, step, 1, 1)
	if err != nil {
		return nil, err
	}
	defer func() { err = removed(ctx, b, d.Name(), 1, err) }()
	sb := b.all[0].(dsecBox).sb
	session, err := sb.OpenSession(ctx, client.SessionOptions{})
	if err != nil {
		return nil, err
	}
	phases := []*phase{{name: "empty node"}}
	classes := []v1.QoS{v1.QoSBest}
	if o.Compare {
		classes = append(classes, v1.QoSLatency)
	}
	for _, q := range classes {
		hog := d
		hog.Spec.QoS, hog.Spec.CPUMillis = q, 1000
		hogs, ferr := fill(ctx, hog, o.Cores, o.Cores)
		if ferr != nil {
			return nil, ferr
		}
		defer func() { err = removed(ctx, hogs, d.Name(), o.Cores, err) }()
		p := &phase{name: string(q) + " hogs"}
		for _, x := range hogs.all {
			p.hogs = append(p.hogs, x.(dsecBox).sb)
		}
		phases = append(phases, p)
	}
	for _, p := range phases {
		p.kinds = []*stepTimes{
			{name: "exec", do: func(ctx context.Context) error { return b.all[0].Exec(ctx, "sh", "-c", o.Line) }},
			{name: "session", do: func(ctx context.Context) error { return sessionOp(ctx, session, o.Line) }},
		}
	}
	start, cpu := time.Now(), cpuSeconds()
	for n := range o.Rounds {
		for i := range phases {
			p := phases[(n+i)%len(phases)]
			o.Progress("rounds", int64(n*len(phases)+i), int64(o.Rounds*len(phases)))
			if err := p.round(ctx, d.Client, o); err != nil {
				return nil, err
			}
		}
	}
	host := ReadHost()
	for _, k := range []int{0, 1} {
		for _, p := range phases {
			r := p.kinds[k].result(p, phases[0].kinds[k], d.Name())
			r.Host = host
			out = append(out, r)
		}
	}
	out[0].ClientCPUSeconds = cpuSeconds() - cpu
	out[0].Notes = append(out[0].Notes, fmt.Sprintf("%d rounds of %d steps of each kind in each phase, in %.0f s; the step: %s", o.Rounds, o.Steps, time.Since(start).Seconds(), o.Line))
	return out, nil
}

// round measures the phase once.
func (p *phase) round(ctx context.Context, c *client.Client, o QoSOptions) (err error) {
	var pids []uint32
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
		defer cancel()
		for i, pid := range pids {
			if kerr := p.hogs[i].Kill(ctx, client.Selector{PID: pid}, int(syscall.SIGKILL)); err == nil {
				err = kerr
			}
		}
	}()
	for _, hog := range p.hogs {
		pid, err := hog.StartDetached(ctx, client.Command("sh", "-c", o.Hog))
		if err != nil {
			return err
		}
		pids = append(pids, pid)
	}
	select {
	case <-time.After(hogStart): // the empty node waits as long: what ended before has gone by then
	case <-ctx.Done():
		return ctx.Err()
	}
	before, err := cpuOf(ctx, c, p.hogs)
	if err != nil {
		return err
	}
	start := time.Now()
	for _, k := range p.kinds {
		if err := k.do(ctx); err != nil { // once before, unmeasured
			return err
		}
		took := make([]time.Duration, 0, o.Steps)
		for range o.Steps {
			d, err := timed(func() error { return k.do(ctx) })
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if k.note(d, err); err == nil {
				took = append(took, d)
			}
		}
		k.rounds = append(k.rounds, took)
	}
	p.took += time.Since(start).Seconds()
	after, err := cpuOf(ctx, c, p.hogs)
	p.busy += after - before
	return err
}

// cpuOf is the CPU time that sandboxes have used.
func cpuOf(ctx context.Context, c *client.Client, boxes []*client.Sandbox) (sum float64, err error) {
	for _, sb := range boxes {
		info, err := c.Get(ctx, sb.ID())
		if err != nil {
			return 0, err
		}
		if info.Usage != nil {
			sum += info.Usage.CPUSeconds
		}
	}
	return sum, nil
}

// result sums up a kind of step in a phase, against that of the empty node.
func (s *stepTimes) result(p *phase, empty *stepTimes, target string) Result {
	r := Result{Name: s.name + ", " + p.name, Target: target, Parallel: 1}
	for _, round := range s.rounds {
		for _, d := range round {
			r.Seconds += d.Seconds()
		}
	}
	if s != empty {
		base := latencies(slices.Clone(empty.ok))
		mine := latencies(slices.Clone(s.ok))
		r.extra("p50_ratio", ratioOfRounds(s.rounds, empty.rounds))
		if base.P99 > 0 {
			r.extra("p99_ratio", mine.P99/base.P99)
		}
		if p.took > 0 {
			r.extra("hogs_cores", p.busy/p.took)
		}
	}
	r.sum([]worker{s.worker})
	return r
}

// ratioOfRounds is the median of the rounds' own ratios of medians, in which a slow change of the machine cancels
// out. 0: there is none.
func ratioOfRounds(with, without [][]time.Duration) float64 {
	var all []float64
	for i := range min(len(with), len(without)) {
		a, b := latencies(slices.Clone(with[i])), latencies(slices.Clone(without[i]))
		if a.P50 > 0 && b.P50 > 0 {
			all = append(all, a.P50/b.P50)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	if n := len(all); n%2 == 0 {
		return (all[n/2-1] + all[n/2]) / 2
	}
	return all[len(all)/2]
}
