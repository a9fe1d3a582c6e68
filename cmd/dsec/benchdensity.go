package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"dsec/internal/bench"
	"dsec/internal/doctor"
	"dsec/internal/slack"
)

type densityFlags struct {
	b            benchFlags
	images       []string
	points       int
	execs        int
	execParallel int
	minFree      bytesValue
	seed         uint64
	report, data string
}

func (a *app) benchDensityCmd() *cobra.Command {
	var d densityFlags
	cmd := &cobra.Command{
		Use: "density [flags]", Short: "As many sandboxes as wanted, all alive at once: what they cost and how they answer", Args: cobra.NoArgs,
		Long: `Density makes --count sandboxes of the images in turn and keeps all alive. It reads what memory
they cost, by category and against their number, how long creates take and how fast they go,
runs commands in random ones, removes all by one request, and audits this machine. The
server must run on this machine, and little else: other programs' memory counts as the
sandboxes'. It makes no more when less than --min-free is available. With --report the
result goes to DIR as density.md, density.json and density.svg. Fails if one could
not be made or answered, or something is left.`,
		Example: "  dsec bench density --image busybox --image debian\n  dsec bench density --image busybox --count 3200 --parallel 16 --report docs/density",
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.benchDensity(cmd, &d) },
	}
	f := cmd.Flags()
	d.b.sf.flags = f
	f.StringArrayVar(&d.images, "image", nil, "image of the sandboxes (repeatable: in turn)")
	d.b.sf.memory = 64 << 20
	f.Var(&d.b.sf.memory, "memory", "memory limit of each sandbox")
	f.Var(&d.b.sf.cpu, "cpu", "CPU limit of each sandbox (default 1)")
	f.IntVar(&d.b.count, "count", 3200, "how many sandboxes")
	f.IntVar(&d.b.parallel, "parallel", 16, "creates at once")
	f.IntVar(&d.b.connections, "connections", 1, "Aether connections of this client")
	f.IntVar(&d.points, "points", 20, "how often memory is read on the way")
	f.IntVar(&d.execs, "execs", 3000, "commands in random sandboxes, once all live")
	f.IntVar(&d.execParallel, "exec-parallel", 4, "commands at once")
	d.b.settle = 3 * time.Second
	f.Var(newDuration(&d.b.settle), "settle", "wait before memory is read at rest")
	d.minFree = 2 << 30
	f.Var(&d.minFree, "min-free", "make no more sandboxes when less memory is available")
	f.Uint64Var(&d.seed, "seed", 1, "of the choice of random sandboxes")
	f.StringVar(&d.report, "report", "", "directory to write a report to")
	f.StringVar(&d.data, "data", "", dataUsage)
	f.BoolVar(&d.b.asJSON, "json", false, "print the result as JSON")
	cmd.RegisterFlagCompletionFunc("image", a.completeImages(-1))
	return cmd
}

func (a *app) benchDensity(cmd *cobra.Command, d *densityFlags) error {
	slack.RelaxMonitor() // the load shares the machine with what it measures
	switch {
	case d.b.count < 1 || d.b.parallel < 1 || d.b.connections < 1 || d.points < 1 || d.execs < 0 || d.execParallel < 1:
		return usagef("--count, --parallel, --connections, --points and --exec-parallel must be at least 1, --execs not negative")
	case len(d.images) == 0:
		return usagef("--image is missing; 'dsec image ls' lists what there is")
	}
	spec, err := d.b.sf.spec("")
	if err != nil {
		return err
	}
	spec.Labels = map[string]string{"job": "bench-" + newKey()}
	data, err := a.dataDir(cmd, d.data)
	if err != nil {
		return err
	}
	c, err := a.benchClient(&d.b)
	if err != nil {
		return err
	}
	defer c.Close()
	if !c.Local() {
		return usagef("memory is read from this machine; %s is another one", c.URL())
	}
	ctx := cmd.Context()
	target, release := bench.DSec{Client: c, Spec: spec}.Hold(context.WithoutCancel(ctx), bench.DefaultLease)
	defer release()
	bar := a.progress("density", 0, false)
	defer bar.end()
	res, err := bench.RunDensity(ctx, target, bench.Load{N: d.b.count, Parallel: d.b.parallel}, bench.DensityOptions{
		Images: d.images, Points: d.points, Execs: d.execs, ExecParallel: d.execParallel, Settle: d.b.settle, MinFree: int64(d.minFree), Seed: d.seed,
		Peek: bench.Machine{Proc: "/proc"}, Audit: func(ids []string) error { return leftOf(data, ids) }, Progress: bar.step,
	})
	bar.end()
	if err != nil {
		return err
	}
	if d.report != "" {
		if err := res.Report(d.report); err != nil {
			return err
		}
	}
	if d.b.asJSON {
		err = a.json(res)
	} else {
		err = res.Table(a.stdout)
	}
	if err == nil {
		err = res.Err()
	}
	return err
}

// leftOf is the audit of this machine after a run: nothing may be left of the sandboxes that it made,
// whether a server knows it or not.
func leftOf(data string, ids []string) error {
	left, err := itemsOf(data, ids)
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("%s of removed sandboxes are left, such as %s %s", count(len(left), "object"), left[0].Kind, left[0].Name)
	}
	return err
}

// itemsOf is what this machine has of some sandboxes.
func itemsOf(data string, ids []string) (items []doctor.Item, err error) {
	ours := map[string]bool{}
	for _, id := range ids {
		ours[id] = true
	}
	report, err := doctor.Run(doctor.Node{Data: data})
	if err != nil {
		return nil, err
	}
	for _, i := range report.Items {
		if ours[i.Sandbox] {
			items = append(items, i)
		}
	}
	return items, nil
}
