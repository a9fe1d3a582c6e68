package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"dsec/api/v1/errs"
	"dsec/internal/bench"
	"dsec/internal/up"
)

type restartFlags struct {
	b     benchFlags
	o     bench.Restarts
	every time.Duration
	seed  uint64
	data  string
}

func (a *app) benchRestartCmd() *cobra.Command {
	var r restartFlags
	cmd := &cobra.Command{
		Use: "restart [flags]", Short: "Kill this machine's server again and again: how soon it serves, and that nothing is lost", Args: cobra.NoArgs,
		Long: `Restart makes --sandboxes sandboxes and then kills the server of this machine --kills times, as
'kill -9' does, and starts it again each time with the arguments and environment that it had. It measures from there
until the server says that it is well, and until a command in a random sandbox is answered. With --load, workers
create, use, pause and remove more sandboxes until the moment of each kill. Fails if a sandbox
that was reported is lost, one that was removed comes back, or anything is left in the end. Everybody's
connections to the server break; do not use it on one that others need. The server goes
on in the background and logs to DATA/server.log.`,
		Example: "  dsec bench restart --image busybox --sandboxes 1000\n  dsec bench restart --image busybox --kills 50 --load 4 --paused 20",
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.benchRestart(cmd, &r) },
	}
	f := cmd.Flags()
	r.b.sf.flags = f
	f.StringVar(&r.b.image, "image", "", "image of the sandboxes")
	f.Var(&r.b.sf.memory, "memory", "memory limit of each sandbox (default 512MiB)")
	f.Var(&r.b.sf.cpu, "cpu", "CPU limit of each sandbox (default 1)")
	f.IntVar(&r.o.Sandboxes, "sandboxes", 100, "how many are there all the time")
	f.IntVar(&r.o.Paused, "paused", 0, "how many of them are paused before each kill")
	f.IntVar(&r.o.Kills, "kills", 5, "how often the server is killed")
	f.IntVar(&r.o.Load, "load", 0, "workers that are busy with more sandboxes")
	f.IntVar(&r.o.Parallel, "parallel", 8, "creates, and looks at sandboxes, at once")
	r.every = 2 * time.Second
	f.Var(newDuration(&r.every), "every", "kill at a random moment within this time after it served")
	f.Uint64Var(&r.seed, "seed", 1, "of what is random")
	f.StringVar(&r.data, "data", "", dataUsage)
	f.BoolVar(&r.b.asJSON, "json", false, "print an array of results as JSON")
	cmd.RegisterFlagCompletionFunc("image", a.completeImages(-1))
	return cmd
}

func (a *app) benchRestart(cmd *cobra.Command, r *restartFlags) error {
	r.b.count, r.b.parallel, r.b.connections = r.o.Kills, r.o.Parallel, 1
	if r.o.Sandboxes < 1 || r.o.Kills < 1 || r.o.Parallel < 1 || r.o.Load < 0 || r.o.Paused < 0 || r.o.Paused > r.o.Sandboxes || r.every < 0 {
		return usagef("--sandboxes, --kills and --parallel must be at least 1, --load, --paused and --every not negative, --paused at most --sandboxes")
	}
	data, err := a.dataDir(cmd, r.data)
	if err != nil {
		return err
	}
	if err := up.NeedRoot(); err != nil {
		return err
	}
	server, err := findServer(data)
	if err != nil {
		return whichData(err)
	}
	r.o.Every, r.o.Random = r.every, rand.New(rand.NewPCG(r.seed, 0))
	bar := a.progress("restart", 0, false)
	defer bar.end()
	r.o.Progress = func(done, total int64) { bar.step("kills", done, total) }
	return a.benchRun(cmd.Context(), &r.b, func(ctx context.Context, _ *benchFlags, d bench.DSec, _ bench.Load) ([]bench.Result, error) {
		defer bar.end()
		return bench.Restart(ctx, d, server, r.o)
	})
}

// localServer is the server of a data directory of this machine, which can be started again as it was.
type localServer struct {
	data, program, dir string
	args, env          []string
}

// findServer looks at how the server of a data directory was started.
func findServer(data string) (*localServer, error) {
	info, err := up.Find(data)
	if err != nil {
		return nil, err
	}
	s := &localServer{data: data}
	proc := fmt.Sprintf("/proc/%d/", info.PID)
	read := func(name string) []string {
		b, rerr := os.ReadFile(proc + name)
		err = errors.Join(err, rerr)
		return strings.Split(string(bytes.TrimSuffix(b, []byte{0})), "\x00")
	}
	link := func(name string) string {
		path, lerr := os.Readlink(proc + name)
		err = errors.Join(err, lerr)
		return path
	}
	s.args, s.env, s.program, s.dir = read("cmdline"), read("environ"), link("exe"), link("cwd")
	if err != nil {
		return nil, fmt.Errorf("see how the server (pid %d) was started: %w", info.PID, err)
	}
	return s, nil
}

// Kill implements bench.Server.
func (s *localServer) Kill(ctx context.Context) error {
	info, err := up.Find(s.data)
	if err != nil {
		return err
	}
	p, err := os.FindProcess(info.PID)
	if err != nil {
		return err
	}
	defer p.Release()
	if err := p.Kill(); err != nil {
		return err
	}
	for {
		if _, err := up.Find(s.data); errors.Is(err, errs.NodeNotFound) {
			return nil
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Start implements bench.Server.
func (s *localServer) Start(context.Context) error {
	log, err := os.OpenFile(filepath.Join(s.data, "server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := &exec.Cmd{Path: s.program, Args: s.args, Env: s.env, Dir: s.dir, Stdout: log, Stderr: log, SysProcAttr: &syscall.SysProcAttr{Setsid: true}}
	if err := cmd.Start(); err != nil {
		return err
	}
	go cmd.Wait() // it may end before us
	return nil
}

// Leaks implements bench.Server.
func (s *localServer) Leaks(_ context.Context, ids []string) (left []string, err error) {
	items, err := itemsOf(s.data, ids)
	for _, i := range items {
		left = append(left, i.Kind+" "+i.Name)
	}
	return left, err
}
