package main

import (
	"context"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
	"dsec/internal/backend/container/cgroup"
	"dsec/internal/bench"
	"dsec/internal/doctor"
)

// benchLifeFlags are those of the benchmarks of how sandboxes live beside each other.
type benchLifeFlags struct {
	counted bool // --count alone says how much
	rounds  bool // neither --count nor --duration does

	cmd                   *cobra.Command
	nRounds, steps, cores int
	lsHogs                bool
	data, hog             string
	samples, idle         int
	check                 bool
	rest                  time.Duration
}

// qosStep is a small step of an agent: a few programs, and some work of the shell's own.
const qosStep = "for i in 1 2 3; do ls / >/dev/null; done; i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done"

const qosHog = "while :; do :; done"

// settleForJob is how long the machine rests before its memory is read.
const settleForJob = 2 * time.Second

// addLife adds a benchmark's own flags.
func (b *benchFlags) addLife(name string, cmd *cobra.Command) {
	l := &b.life
	l.cmd = cmd
	f := cmd.Flags()
	switch name {
	case "pause":
		l.counted, l.rounds = true, true
		f.IntVar(&l.idle, "idle", 40, "pauses of an idle sandbox")
		f.IntVar(&l.nRounds, "rounds", 4, "pauses of sandboxes that touched memory, each of a new one")
		b.size = 256 << 20
		f.Var(&b.size, "size", "memory that each of those touches")
		l.rest = 50 * time.Millisecond
		f.Var(newDuration(&l.rest), "rest", "time that the idle one runs between two pauses")
		cmd.Long = `Pause measures pauses of an idle sandbox and of ones whose process has written to --size of memory, with data
that does not compress: the pause, and, one time by a resume and the other by the command itself,
until the first command after it is answered. freed_percent is what of the sandbox's
memory was gone during the pause. The memory that was touched is compared afterwards; it fails if it
is not the same.`
		cmd.Example = "  dsec bench pause --image debian\n  dsec bench pause --image debian --idle 200 --rounds 10 --size 1GiB --json"
	case "job":
		l.counted = true
		b.size = 64 << 20
		f.Var(&b.size, "size", "memory that each sandbox touches")
		f.BoolVar(&l.check, "check", true, "resume the first ones at the end, and compare their memory")
		cmd.Long = `Job makes --count sandboxes of which each writes to --size of memory, with data that does not compress,
and pauses them all by one call. It reads how much of their memory is back, in the sandboxes and,
with the server on this machine, in the whole machine; then has as many new ones touch as much while
the first are paused, and removes those. The latency of the pause is each sandbox's own, its
seconds are the call's. What it needs: swap for all, and memory for all once.`
		cmd.Example = "  dsec bench job --image debian --parallel 4\n  dsec bench job --image debian --count 50 --size 128MiB --check=false --json"
	case "qos":
		l.counted, l.rounds = true, true
		f.IntVar(&l.nRounds, "rounds", 20, "how often to measure each state of the node, in turn")
		f.IntVar(&l.steps, "steps", 50, "steps of each kind that are measured each time")
		f.IntVar(&l.cores, "cores", runtime.NumCPU(), "cores of the node: as many hogs")
		f.StringVar(&b.line, "command", qosStep, "the step: a shell's command line")
		f.StringVar(&l.hog, "hog", qosHog, "command line that keeps one core busy")
		f.BoolVar(&l.lsHogs, "ls-hogs", true, "measure beside hogs of class ls, too")
		cmd.Long = `Qos measures a step of one sandbox of class ls, as a command and in a session, on the empty node;
then with a hog of class be on every core, and to compare with hogs of class ls. The states
alternate round by round, so that what else the machine does meets all of them. p50_ratio is the median
of the rounds' ratios to the empty node, p99_ratio that of all; hogs_cores how much the hogs
worked meanwhile.`
		cmd.Example = "  dsec bench qos --image debian\n  dsec bench qos --image debian --rounds 40 --ls-hogs=false --json"
	case "churn":
		l.counted = true
		f.StringVar(&l.data, "data", "", dataUsage)
		f.IntVar(&l.samples, "samples", 50, "readings of the server's memory, threads and descriptors on the way")
		cmd.Long = `Churn makes sandboxes one after another, runs a command in each and removes it. It says what the
server's process held before and after, how that slopes over the second half for each
1,000 cycles, and, with the server on this machine, what an audit has afterwards that it did not
have before. Fails if a cycle failed or something is left.`
		cmd.Example = "  dsec bench churn --image debian --parallel 4\n  dsec bench churn --image debian --count 50000 --parallel 8 --json"
	}
}

func (a *app) benchQoS(ctx context.Context, b *benchFlags, d bench.DSec, _ bench.Load) ([]bench.Result, error) {
	if b.life.nRounds < 1 || b.life.steps < 1 || b.life.cores < 1 || b.line == "" || b.life.hog == "" {
		return nil, usagef("--rounds, --steps and --cores must be at least 1, --command and --hog not empty")
	}
	bar := a.progress("qos", 0, false)
	defer bar.end()
	return bench.QoS(ctx, d, bench.QoSOptions{
		Rounds: b.life.nRounds, Steps: b.life.steps, Cores: b.life.cores, Line: b.line, Hog: b.life.hog, Compare: b.life.lsHogs, Progress: bar.step,
	})
}

func (a *app) benchPause(ctx context.Context, b *benchFlags, d bench.DSec, _ bench.Load) ([]bench.Result, error) {
	l := &b.life
	if l.idle < 0 || l.nRounds < 0 || l.idle+l.nRounds == 0 || b.size < 1<<20 || l.rest < 0 {
		return nil, usagef("--idle, --rounds and --rest must not be negative, nor the first two both 0; --size is at least 1MiB")
	}
	bar := a.progress("pause", 0, false)
	defer bar.end()
	return bench.Pause(ctx, d, bench.PauseOptions{Idle: l.idle, Rounds: l.nRounds, Touched: int64(b.size), Rest: l.rest, Progress: bar.step})
}

func (a *app) benchJob(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	if b.size < 1<<20 {
		return nil, usagef("--size is at least 1MiB")
	}
	bar := a.progress("job", 0, false)
	defer bar.end()
	o := bench.JobOptions{Touched: int64(b.size), Settle: settleForJob, Check: b.life.check, Progress: bar.step}
	if d.Client.Local() {
		o.Available = bench.Available
	}
	return bench.Job(ctx, d, l, o)
}

// churnSettle is how long what is left of the last cycles may take to go.
const churnSettle = 15 * time.Second

func (a *app) benchChurn(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	if b.life.samples < 2 {
		return nil, usagef("--samples must be at least 2")
	}
	o := bench.ChurnOptions{Samples: b.life.samples, Settle: churnSettle}
	if d.Client.Local() {
		data, err := a.dataDir(b.life.cmd, b.life.data)
		if err != nil {
			return nil, err
		}
		nodes, err := d.Client.Nodes(ctx)
		if err != nil {
			return nil, err
		}
		o.Audit = func() (map[string]int, error) { return heldOf(data, nodes) }
	}
	bar := a.progress("churn", 0, false)
	defer bar.end()
	o.Progress = bar.step
	return one(bench.Churn(ctx, d, l, o))
}

// heldOf counts what this machine holds in the place of the node of a data directory, and of
// sandboxes of these nodes wherever it is.
func heldOf(data string, nodes []client.Node) (map[string]int, error) {
	report, err := doctor.Run(doctor.Node{Data: data})
	if err != nil {
		return nil, err
	}
	held := map[string]int{}
	for _, i := range report.Items {
		node, _, err := v1.ParseSandboxID(i.Sandbox)
		ours := err == nil && slices.ContainsFunc(nodes, func(n client.Node) bool { return n.ID == node })
		if ours || i.Node != "" && i.Node == cgroup.Resolve(data) {
			held[i.Kind]++
		}
	}
	return held, nil
}
