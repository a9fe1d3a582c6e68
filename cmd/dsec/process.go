package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"dsec/aether/msg"
	"dsec/client"
)

// processJSON is what ps --json prints of a process.
type processJSON struct {
	PID          uint32     `json:"pid"`
	Tag          string     `json:"tag,omitempty"`
	Running      bool       `json:"running"`
	ExitCode     *int32     `json:"exit_code,omitempty"` // of one that has ended, as all that follows
	Signal       *int32     `json:"signal,omitempty"`
	TimedOut     *bool      `json:"timed_out,omitempty"`
	IdleTimedOut *bool      `json:"idle_timed_out,omitempty"`
	OOMKilled    *bool      `json:"oom_killed,omitempty"`
	EndedAt      *time.Time `json:"ended_at,omitempty"`

	StartedAt   time.Time `json:"started_at"`
	Command     []string  `json:"command"`
	User        string    `json:"user"`
	Cwd         string    `json:"cwd,omitempty"`
	TTY         bool      `json:"tty,omitempty"`
	Session     string    `json:"session,omitempty"`
	StdoutBytes uint64    `json:"stdout_bytes"` // written in all; what is before the next two is no longer kept
	StderrBytes uint64    `json:"stderr_bytes"`
	StdoutFrom  uint64    `json:"stdout_kept_from"`
	StderrFrom  uint64    `json:"stderr_kept_from"`
}

func processOf(p *client.ProcessInfo) processJSON {
	j := processJSON{
		PID: p.Pid, Tag: p.Tag, Running: p.Running, StartedAt: time.UnixMilli(int64(p.StartedUnixMs)).UTC(),
		Session: p.Session, StdoutBytes: p.StdoutBytes, StderrBytes: p.StderrBytes, StdoutFrom: p.StdoutKeptFrom, StderrFrom: p.StderrKeptFrom,
	}
	if s := p.Start; s != nil {
		j.Command, j.User, j.Cwd, j.TTY = append([]string{s.Cmd}, s.Args...), s.User, s.Cwd, s.Pty != nil
	}
	if x := p.Exit; !p.Running && x != nil {
		j.ExitCode, j.Signal, j.TimedOut, j.IdleTimedOut, j.OOMKilled = &x.ExitCode, &x.Signal, &x.TimedOut, &x.IdleTimedOut, &x.OomKilled
		if p.EndedUnixMs > 0 {
			t := time.UnixMilli(int64(p.EndedUnixMs)).UTC()
			j.EndedAt = &t
		}
	}
	return j
}

// stateOf is a process's state for the eye.
func stateOf(p processJSON) string {
	switch {
	case p.ExitCode == nil:
		return "running"
	case *p.OOMKilled:
		return "memory limit"
	case *p.TimedOut:
		return "timeout"
	case *p.IdleTimedOut:
		return "idle timeout"
	case *p.Signal != 0:
		return strings.TrimPrefix(unix.SignalName(unix.Signal(*p.Signal)), "SIG")
	}
	return fmt.Sprintf("exit %d", *p.ExitCode)
}

func commandLine(p *client.ProcessInfo) string {
	if p.Start == nil {
		return ""
	}
	return strings.Join(append([]string{p.Start.Cmd}, p.Start.Args...), " ")
}

func (a *app) psCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ps ID",
		Short: "List what was started in a sandbox",
		Long: `Ps lists what exec, run and sessions started, in the order of starts: what runs, and how
the last 4096 ended. What these started themselves is not listed: 'dsec exec ID -- ps'
shows it. In the STATE of one that a signal ended is the signal's name, or why it was
killed: a timeout or the memory limit.

Of output are kept: of each process the last 1 MiB, and 4 MiB in all of those that have
ended. When that is not enough, processes without a tag whose caller got their output
lose it first, large ones before small ones, and those with a tag or --detach last; how
they ended stays known. With --json stdout_kept_from and stderr_kept_from say from which
offset on output is still there.`,
		Example:           "  dsec ps $id\n  dsec ps --json $id",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			procs, err := sb.Processes(cmd.Context())
			if err != nil {
				return err
			}
			list := make([]processJSON, len(procs))
			for i, p := range procs {
				list[i] = processOf(p)
			}
			if asJSON {
				return a.json(list)
			}
			rows := make([][]string, len(list))
			for i, p := range list {
				rows[i] = []string{
					strconv.FormatUint(uint64(p.PID), 10), orDash(p.Tag), stateOf(p), age(p.StartedAt, time.Now()),
					orDash(p.User), size(int64(p.StdoutBytes + p.StderrBytes)), oneLine(strings.Join(p.Command, " "), 60),
				}
			}
			return table(a.stdout, []string{"PID", "TAG", "STATE", "AGE", "USER", "OUTPUT", "COMMAND"}, rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// oneLine makes text safe and short enough for a table.
func oneLine(s string, width int) string {
	s = printable(s)
	if r := []rune(s); len(r) > width {
		return string(r[:width-1]) + "…"
	}
	return s
}

func (a *app) killCmd() *cobra.Command {
	sig := "TERM"
	var all, asJSON bool
	cmd := &cobra.Command{
		Use:   "kill ID PROCESS",
		Short: "Send a signal to a process and all it started",
		Long: `Kill sends a signal to the process group of PROCESS, a pid or tag of 'dsec ps'; KILL
to its whole session. Children that it left in the background outlive it, and so an exec
or run that has returned: kill reaches them by the same PROCESS when it has ended.

With --all the signal (KILL, unless -s is given) goes to every process of the sandbox but
its PID 1, daemons in sessions of their own too; files stay. This also frees a sandbox at
its --pids, in which exec fails: killing needs no new process.`,
		Example: `  dsec kill $id 42
  dsec kill -s INT $id server
  dsec kill --all $id`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case all && len(args) > 1:
				return usagef("--all means every process: unexpected argument %q", args[1])
			case all:
				return cobra.ExactArgs(1)(cmd, args)
			}
			return cobra.ExactArgs(2)(cmd, args)
		},
		ValidArgsFunction: a.completeProcess(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if all && !cmd.Flags().Changed("signal") {
				sig = "KILL"
			}
			n, err := parseSignal(sig)
			if err != nil {
				return err
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			done := struct {
				Sandbox string `json:"sandbox"`
				Process string `json:"process,omitempty"` // none: all
				Signal  int    `json:"signal"`
			}{Sandbox: sb.ID(), Signal: n}
			if all {
				err = sb.KillAll(cmd.Context(), n)
			} else {
				done.Process = args[1]
				err = sb.Kill(cmd.Context(), selector(args[1]), n)
			}
			if err != nil || !asJSON {
				return err
			}
			return a.jsonLine(done)
		},
	}
	cmd.Flags().StringVarP(&sig, "signal", "s", sig, "signal, by name or number")
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print what was signalled as JSON: sandbox, process, signal")
	cmd.Flags().BoolVar(&all, "all", false, "signal every process of the sandbox but its PID 1")
	cmd.RegisterFlagCompletionFunc("signal", cobra.FixedCompletions(signalNames(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func parseSignal(s string) (int, error) {
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n < 65 {
		return n, nil
	}
	if n := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(s), "SIG")); n != 0 {
		return int(n), nil
	}
	return 0, usagef("%q is not a signal; write it like TERM, SIGINT or 9", s)
}

func (a *app) attachCmd() *cobra.Command {
	var from uint64
	var noStdin, asJSON bool
	maxOutput := bytesValue(defaultMaxOutput)
	cmd := &cobra.Command{
		Use:   "attach ID PROCESS",
		Short: "Connect to a process that was started before",
		Long: `Attach prints a process's output from an offset on (by default all that is kept) and
follows it; its exit code becomes ours. Stdin goes to the process if it was started
with one (exec -i, also with --detach, or -t), and its end ends the process's: --no-stdin
keeps it open. Ctrl-C leaves the process running; on a terminal it goes to the process,
and Ctrl-P Ctrl-Q leaves (only attach has that; exec and shell pass both keys on). So does
an output that cannot be written any more, such as a pipe whose reader has ended: attach
never ends the process.`,
		Example: `  dsec attach $id server
  dsec attach --from 1048576 --no-stdin $id 42 > rest.log
  dsec attach --json --no-stdin $id train | jq .exit_code`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeProcess(),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case cmd.Flags().Changed("max-output") && !asJSON:
				return usagef("--max-output is for --json")
			case maxOutput < 1:
				return usagef("--max-output must be more than 0")
			}
			var r *result
			if asJSON {
				r = newResult(maxOutput)
			}
			var info *msg.ProcessInfo
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err == nil {
				info, err = findProcess(cmd, sb, selector(args[1]))
			}
			if err == nil {
				err = a.attach(cmd, sb, info, from, !noStdin, r)
			}
			return a.printResult(cmd.Context(), r, platform(err))
		},
	}
	cmd.Flags().Uint64Var(&from, "from", 0, "offset of stdout (or the terminal) to start at")
	cmd.Flags().BoolVar(&noStdin, "no-stdin", false, "only look")
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print the outcome as an object when it has ended, as 'dsec exec --json' does")
	cmd.Flags().Var(&maxOutput, "max-output", "with --json: keep this much of each of stdout and stderr")
	return cmd
}

func (a *app) attach(cmd *cobra.Command, sb *client.Sandbox, info *msg.ProcessInfo, from uint64, stdin bool, r *result) error {
	o := client.IO{Stdout: a.stdout, Stderr: a.stderr, OnGap: a.reportGap}
	if r != nil {
		r.sandbox, r.pid = sb.ID(), info.Pid
		o.Stdout, o.Stderr, o.OnGap = &r.out, &r.errOut, func(bool, uint64, uint64) { r.lost = true }
	}
	stdin = stdin && info.Running && info.Start != nil && (info.Start.Stdin || info.Start.Pty != nil)
	tty := r == nil && stdin && info.Start.Pty != nil && isTerminal(a.stdin)
	if from > info.StdoutBytes {
		note := fmt.Sprintf("offset %d is past the end of the output, which has %d bytes", from, info.StdoutBytes)
		if info.Running {
			note += " so far"
		}
		a.note("%s", note)
	}
	var p *client.Process
	started := make(chan struct{})
	detach := func() { <-started; p.Detach() }
	if stdin {
		o.Stdin = a.stdin
	}
	var initial client.Size
	if tty {
		size, restore, err := a.raw()
		if err != nil {
			return err
		}
		defer restore()
		initial = size
		o.Stdin = &detachReader{r: a.stdin, on: func() { go detach() }}
	}
	p, err := sb.Attach(cmd.Context(), client.Selector{PID: info.Pid}, o, client.AttachOptions{StdoutFrom: from})
	if err != nil {
		return err
	}
	close(started)
	if tty {
		p.Resize(cmd.Context(), initial)
		defer a.followSize(cmd.Context(), p)()
	}
	return a.follow(p, r)
}

func (a *app) reportGap(stderr bool, from, to uint64) {
	a.note("%d bytes of %s from offset %d are no longer kept", to-from, streamName(stderr), from)
}

func streamName(stderr bool) string {
	if stderr {
		return "stderr"
	}
	return "stdout"
}

func findProcess(cmd *cobra.Command, sb *client.Sandbox, sel client.Selector) (*msg.ProcessInfo, error) {
	procs, err := sb.Processes(cmd.Context())
	if err != nil {
		return nil, err
	}
	for i := len(procs) - 1; i >= 0; i-- { // the latest of a tag
		if p := procs[i]; sel.Tag != "" && p.Tag == sel.Tag || sel.PID != 0 && p.Pid == sel.PID {
			return p, nil
		}
	}
	// The guest knows whether there may have been one.
	p, err := sb.Attach(cmd.Context(), sel, client.IO{}, client.AttachOptions{NoFollow: true})
	if err == nil {
		_, err = p.Wait()
	}
	if err == nil {
		err = notFound(sb, sel) // it was started this moment
	}
	return nil, err
}
