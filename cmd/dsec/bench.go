package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"dsec/bench/peers"
	"dsec/client"
	"dsec/internal/bench"
	"dsec/internal/slack"
)

// benchFlags are what the benchmarks share.
type benchFlags struct {
	sf                specFlags
	image, peer       string
	peerImage, socket string
	count, parallel   int
	duration          time.Duration
	asJSON            bool
	sandboxes         int
	size              bytesValue
	hold              bool
	line, dir         string
	settle            time.Duration
	sizes             []string
	children          int
	connections       int
	peerable          bool
	ownImage          bool
	busybox           string
	archives          []string
	life              benchLifeFlags
}

func (a *app) benchCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure a server from here, through its real ports", Args: cobra.NoArgs, RunE: needVerb,
		Long: `Bench makes load from this process and counts here. Only successes count in a rate;
errors are shown. What it makes is labelled and removed, also after Ctrl-C; when it
is killed, what it made ends within five minutes. With
--peer docker the same steps then run on Docker's engine.`,
		Example: `  dsec bench create --image debian --count 2000 --parallel 16 --hold
  dsec bench exec --image debian --count 20000 --parallel 16 --peer docker --peer-image debian
  dsec bench stream --image debian --size 1GiB --json`,
	}
	cmd.AddCommand(
		a.benchVerb("create", "Create to first exec answered, and with --hold the removal", 100, a.benchCreate),
		a.benchVerb("exec", "The command true in running sandboxes", 1000, a.benchExec),
		a.benchVerb("session", "Commands in persistent shell sessions", 10000, a.benchSession),
		a.benchVerb("files", "A file up and down again", 1, a.benchFiles),
		a.benchVerb("stream", "A command's stdout to this process", 1, a.benchStream),
		a.benchVerb("snapshot", "Snapshots of sandboxes that changed much, a second after little, and creates from them", 3, a.benchSnapshot),
		a.benchVerb("fork", "A sandbox into many", 3, a.benchFork),
		a.benchVerb("image", "An image of its own: import, first command of a cold one, alone and many at once, reads", 3, a.benchImage),
		a.benchVerb("memory", "What an idle sandbox costs this machine, kernel included (overstated below 500)", 100, a.benchMemory),
		a.benchVerb("pause", "Pauses and resumes of an idle sandbox, and of ones that touched memory", 0, a.benchPause),
		a.benchVerb("job", "A whole job paused by one call, and as many new sandboxes meanwhile", 200, a.benchJob),
		a.benchVerb("qos", "Steps of a sandbox of class ls beside hogs of class be, against an empty node", 0, a.benchQoS),
		a.benchVerb("churn", "Cycles of create, command and removal, and what is left of them", 1000, a.benchChurn),
		a.benchDensityCmd(),
		a.benchRestartCmd(),
	)
	return cmd
}

type benchRun func(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error)

func (a *app) benchVerb(name, short string, count int, run benchRun) *cobra.Command {
	b := &benchFlags{peerable: name == "create" || name == "exec"}
	cmd := &cobra.Command{
		Use: name + " [flags]", Short: short, Args: cobra.NoArgs,
		Example: fmt.Sprintf("  dsec bench %s --image debian --parallel 16\n  dsec bench %s --image debian --json", name, name),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if b.duration > 0 && cmd.Flags().Changed("count") {
				return usagef("give either --count or --duration")
			}
			return a.benchRun(cmd.Context(), b, run)
		},
	}
	f := cmd.Flags()
	b.sf.flags = f
	if name != "image" {
		f.StringVar(&b.image, "image", "", "image of the sandboxes")
	}
	b.ownImage = name == "image"
	f.StringVar(&b.sf.backend, "backend", "", "kind of isolation (default container)")
	f.Var(&b.sf.memory, "memory", "memory limit of each sandbox (default 512MiB)")
	f.Var(&b.sf.cpu, "cpu", "CPU limit of each sandbox (default 1)")
	b.addLife(name, cmd)
	if b.count = count; !b.life.rounds {
		f.IntVar(&b.count, "count", count, "how many operations")
	}
	if b.parallel = 1; !b.life.rounds {
		f.IntVar(&b.parallel, "parallel", 1, "how many at once")
	}
	f.IntVar(&b.connections, "connections", 1, "Aether connections of this client")
	f.BoolVar(&b.asJSON, "json", false, "print an array of results as JSON")
	switch name {
	case "create":
		f.BoolVar(&b.hold, "hold", false, "keep all alive until the end; time their removal apart")
	case "exec", "session":
		f.IntVar(&b.sandboxes, "sandboxes", 1, "how many sandboxes to spread over")
	case "files", "stream":
		b.size = 1 << 30
		f.Var(&b.size, "size", "bytes to transfer each time")
	}
	switch name {
	case "session":
		f.StringVar(&b.line, "command", "true", "command line to run")
	case "files":
		f.StringVar(&b.dir, "dir", "/tmp", "directory inside the sandbox")
	case "stream":
		cmd.Long = "Stream measures the stdout of 'head -c SIZE /dev/zero'; every byte is counted. The image's\n" +
			"head counts too: GNU's writes large pieces, busybox's small ones and is the limit itself."
	case "snapshot":
		f.StringSliceVar(&b.sizes, "sizes", []string{"10MiB", "100MiB", "1000MiB"}, "how much the sandboxes change, each")
	case "fork":
		b.size = 100 << 20
		f.Var(&b.size, "size", "how much the sandbox changes before")
		f.IntVar(&b.children, "children", 16, "how many children of each fork")
	case "image":
		b.life.counted = true
		b.size, b.parallel = 1<<30, 64
		f.Lookup("parallel").DefValue = "64"
		f.Var(&b.size, "size", "bytes of the image")
		f.StringVar(&b.busybox, "busybox", "/bin/busybox", "static busybox of this machine, for the image's programs")
		f.StringArrayVar(&b.archives, "archive", nil, "compressed image whose size in the store is measured; may be repeated")
		cmd.Long = `Image makes an image of files of which half does not compress, starts it --count times where
nothing of it is on the node, and then --parallel at once: a create and a command that
reads 5 % of the files. Then it reads what is there, and as much of a plain file. Start the
server with --store-rate for a store at a distance. With --archive it compares what compressed
images take in the store with their own sizes.`
		cmd.Example = "  dsec up --detach --store-rate 50MB && dsec bench image\n  dsec bench image --archive python.tar.gz --archive node.tar.gz"
	case "memory":
		b.life.counted = true
		b.settle = 3 * time.Second
		f.Var(newDuration(&b.settle), "settle", "wait before memory is read")
	}
	if !b.life.counted {
		f.Var(newDuration(&b.duration), "duration", "go on for this time instead of --count")
	}
	if b.peerable {
		f.StringVar(&b.peer, "peer", "", "measure another engine too: docker")
		f.StringVar(&b.peerImage, "peer-image", "", "its image (default the same name)")
		f.StringVar(&b.socket, "peer-socket", peers.DockerSocket, "its socket")
	}
	if !b.ownImage {
		cmd.RegisterFlagCompletionFunc("image", a.completeImages(-1))
	}
	return cmd
}

func (a *app) benchRun(ctx context.Context, b *benchFlags, run benchRun) error {
	slack.RelaxMonitor() // the load shares the machine with what it measures
	switch {
	case b.parallel < 1 || b.count < 1 && !b.life.rounds || b.duration < 0 || b.connections < 1:
		return usagef("--count, --parallel, --connections must be at least 1, --duration not negative")
	case b.image == "" && b.sf.backend != "hollow" && !b.ownImage:
		return usagef("--image is missing; 'dsec image ls' lists what there is")
	case b.peer != "" && b.peer != "docker":
		return usagef("--peer %q: only docker is known", b.peer)
	case b.peerable && b.peer == "" && b.peerImage != "":
		return usagef("--peer-image is for --peer")
	}
	spec, err := b.sf.spec(b.image)
	if err != nil {
		return err
	}
	spec.Labels = map[string]string{"job": "bench-" + newKey()}
	load := bench.Load{N: b.count, Parallel: b.parallel}
	if b.duration > 0 {
		load.N, load.Duration = 0, b.duration
	}
	c, err := a.benchClient(b)
	if err != nil {
		return err
	}
	defer c.Close()
	// The clean-up after Ctrl-C needs what it removes to be there.
	d, release := bench.DSec{Client: c, Spec: spec}.Hold(context.WithoutCancel(ctx), bench.DefaultLease)
	defer release()
	results, err := run(ctx, b, d, load)
	if err == nil && ctx.Err() == nil && b.peer != "" {
		results, err = a.benchPeer(ctx, b, load, results)
	}
	if len(results) > 0 {
		var perr error
		if b.asJSON {
			perr = a.json(results)
		} else {
			perr = bench.Table(a.stdout, results)
		}
		if err == nil {
			err = perr
		}
	}
	for _, r := range results {
		if err == nil && r.Errors > 0 {
			err = fmt.Errorf("%s: %d of %d operations failed", r.Name, r.Errors, r.N)
		}
	}
	return err
}

// benchClient is a client of its own, with the wanted number of connections.
func (a *app) benchClient(b *benchFlags) (*client.Client, error) {
	o, err := a.clientOptions()
	if err != nil {
		return nil, err
	}
	o.Connections = b.connections
	return client.New(o)
}

func (a *app) benchPeer(ctx context.Context, b *benchFlags, l bench.Load, results []bench.Result) ([]bench.Result, error) {
	d, err := peers.NewDocker(ctx, b.socket, orElse(b.peerImage, b.image))
	if err != nil {
		return results, err
	}
	if b.sandboxes > 0 {
		r, err := bench.Exec(ctx, d, l, b.sandboxes)
		return append(results, r), err
	}
	more, err := bench.Create(ctx, d, l, b.hold)
	return append(results, more...), err
}

func (a *app) benchCreate(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	return bench.Create(ctx, d, l, b.hold)
}

func (a *app) benchExec(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	return one(bench.Exec(ctx, d, l, max(1, b.sandboxes)))
}

func (a *app) benchSession(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	return one(bench.Session(ctx, d, l, max(1, b.sandboxes), b.line))
}

func (a *app) benchFiles(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	return bench.Files(ctx, d, l, int64(b.size), b.dir)
}

func (a *app) benchStream(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	return one(bench.Stream(ctx, d, l, int64(b.size)))
}

func (a *app) benchImage(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	return bench.Image(ctx, d, bench.ImageOptions{Size: int64(b.size), Busybox: b.busybox, Parallel: l.Parallel, Repeat: l.N, Archives: b.archives})
}

func (a *app) benchMemory(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	if !d.Client.Local() {
		return nil, usagef("memory is read from this machine; %s is another one", d.Client.URL())
	}
	return one(bench.Memory(ctx, d, l.N, l.Parallel, b.settle))
}

func (a *app) benchSnapshot(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	var sizes []int64
	for _, s := range b.sizes {
		n, err := parseBytes(s)
		if err != nil {
			return nil, err
		}
		sizes = append(sizes, n)
	}
	return bench.Snapshot(ctx, d, l, sizes)
}

func (a *app) benchFork(ctx context.Context, b *benchFlags, d bench.DSec, l bench.Load) ([]bench.Result, error) {
	if b.children < 1 || b.children > 1000 {
		return nil, usagef("--children %d: it must be 1 to 1000", b.children)
	}
	return one(bench.Fork(ctx, d, l, int64(b.size), b.children))
}

func one(r bench.Result, err error) ([]bench.Result, error) {
	if r.Name == "" {
		return nil, err
	}
	return []bench.Result{r}, err
}
