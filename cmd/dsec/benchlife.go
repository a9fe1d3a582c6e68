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
	data                  string
	samples               int
}

// qosStep is a small step of an agent: a few programs, and some work of the shell's own.
const qosStep = "for i in 1 2 3; do ls / >/dev/null; done; i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done"

const qosHog = "while :; do :; done"

// add adds a benchmark's own flags.
func (l *benchLifeFlags) add(name string, cmd *cobra.Command) {
	l.cmd = cmd
	f := cmd.Flags()
	switch name {
	case "qos":
		l.counted, l.rounds = true, true
		f.IntVar(&l.nRounds, "rounds", 20, "how often to measure each state of the node, in turn")
		f.IntVar(&l.steps, "steps", 50, "steps of each kind that are measured each time")
		f.IntVar(&l.cores, "cores", runtime.NumCPU(), "cores of the node: as many hogs")
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
	if b.life.nRounds < 1 || b.life.steps < 1 || b.life.cores < 1 {
		return nil, usagef("--rounds, --steps and --cores must be at least 1")
	}
	bar := a.progress("qos", 0, false)
	defer bar.end()
	return bench.QoS(ctx, d, bench.QoSOptions{
		Rounds: b.life.nRounds, Steps: b.life.steps, Cores: b.life.cores, Line: qosStep, Hog: qosHog, Compare: b.life.lsHogs, Progress: bar.step,
	})
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
