package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"dsec/client"
)

func (a *app) execCmd() *cobra.Command {
	var c client.Cmd
	var p processFlags
	var interactive, tty, detach, asJSON bool
	maxOutput := bytesValue(defaultMaxOutput)
	cmd := &cobra.Command{
		Use:   "exec [flags] ID -- CMD [ARG...]",
		Short: "Run a command in a sandbox",
		Long: `Exec runs a command and returns its exit code. Signals such as Ctrl-C go to the
command; a second one gives it up and kills it, and so does an output that cannot be
written any more, such as a pipe whose reader has ended. With --detach it prints the pid
and leaves the command running; 'dsec attach' reaches it, and writes to its stdin if it
has one (-i; else it reads from /dev/null).

What the command leaves in the background lives on when it has ended; 'dsec kill' reaches
that too. If exec itself is killed (kill -9) or its machine is lost, the command goes on:
find it with 'dsec ps', and give it a --timeout if it must not stay.

With --json the output is not passed on but part of one object that is printed at the
end: exit_code (also ours), signal (0: none), timed_out, idle_timed_out, oom_killed (the
sandbox's memory limit killed it), oom_kills (how many processes of the sandbox the limit
killed meanwhile, its children or others), stdout and stderr (or stdout_base64 and
stderr_base64 if they are not UTF-8), stdout_bytes and stderr_bytes (written in all),
truncated (more than --max-output was written: the middle is missing), duration_ms, and
error if the platform failed or there is no such command.`,
		Example: `  dsec exec $id -- ls -l /work
  dsec exec -i $id -- sh -c 'cat > notes' < notes
  dsec exec -it $id -- python3
  dsec exec -t $id -- ls --color=auto > colours
  dsec exec --json $id -- make test | jq .exit_code
  dsec exec --detach --tag server $id -- python3 -m http.server`,
		Args:              commandArgs(1, "ID"),
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if c.Env, err = environment(p.env, p.envFiles); err != nil {
				return err
			}
			c.User, c.Dir = p.user, p.cwd
			switch {
			case detach && tty:
				return usagef("--detach cannot be used with -t; with -i, 'dsec attach' writes to the command")
			case asJSON && tty:
				return usagef("--json cannot be used with -t")
			case cmd.Flags().Changed("max-output") && (!asJSON || detach):
				return usagef("--max-output is for --json without --detach")
			case maxOutput < 1:
				return usagef("--max-output must be more than 0")
			case tty && interactive && !isTerminal(a.stdin):
				return errNoTerminal
			}
			c.Path, c.Args = args[1], args[2:]
			if detach {
				sb, err := a.sandbox(cmd.Context(), args[0])
				if err != nil {
					return platform(err)
				}
				return platform(a.execDetached(cmd, sb, c, interactive, asJSON))
			}
			w := wiring{tty: tty, stdin: interactive || tty && isTerminal(a.stdin), forward: true}
			if asJSON {
				w.result = newResult(maxOutput)
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err == nil {
				err = a.execute(cmd.Context(), sb, c, w)
			}
			err = platform(err)
			return a.printResult(cmd.Context(), w.result, err)
		},
	}
	p.add(cmd)
	f := cmd.Flags()
	f.BoolVarP(&interactive, "interactive", "i", false, "connect stdin")
	f.BoolVarP(&tty, "tty", "t", false, "run on a terminal: ours with -i, which is implied if we have one, else one of 80x24 without input")
	f.Var(newDuration(&c.Timeout), "timeout", "kill the command after this time, such as 90s")
	f.Var(newDuration(&c.IdleTimeout), "idle-timeout", "kill the command after this time without output")
	f.BoolVarP(&detach, "detach", "d", false, "print the pid and leave the command running; with -i its stdin stays open")
	f.StringVar(&c.Tag, "tag", "", "name to find the process by")
	f.BoolVar(&asJSON, "json", false, "print the outcome as an object: exit_code, stdout, stderr, …; with --detach the pid")
	f.Var(&maxOutput, "max-output", "with --json: keep this much of each of stdout and stderr")
	return cmd
}

func (a *app) execDetached(cmd *cobra.Command, sb *client.Sandbox, c client.Cmd, stdin, asJSON bool) error {
	var pid uint32
	var err error
	if stdin { // open, for those who attach
		var p *client.Process
		p, err = sb.Start(cmd.Context(), c, client.IO{OpenStdin: true, KeepStdin: true})
		switch {
		case err != nil:
		case p.PID() == 0: // it could not be run, and has ended with the reason
			var x client.Exit
			if x, err = p.Wait(); err == nil {
				err = x.Err
			}
		default:
			pid = p.PID()
			p.Detach()
		}
	} else {
		pid, err = sb.StartDetached(cmd.Context(), c)
	}
	if err != nil {
		return commandError(err)
	}
	if asJSON {
		return a.jsonLine(struct {
			PID uint32 `json:"pid"`
			Tag string `json:"tag,omitempty"`
		}{pid, c.Tag})
	}
	_, err = fmt.Fprintln(a.stdout, pid)
	return err
}

func (a *app) shellCmd() *cobra.Command {
	var c client.Cmd
	var p processFlags
	cmd := &cobra.Command{
		Use:   "shell ID",
		Short: "Open a shell in a sandbox: bash, or sh where there is none",
		Example: `  dsec shell $id
  dsec shell --user nobody --cwd /tmp $id`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if c.Env, err = environment(p.env, p.envFiles); err != nil {
				return err
			}
			c.User, c.Dir = p.user, p.cwd
			if !isTerminal(a.stdin) {
				return &usageError{msg: "shell needs a terminal; use 'dsec exec -i ID -- sh' in scripts"}
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return platform(err)
			}
			if c.Path == "" {
				guest, err := sb.Guest(cmd.Context())
				if err != nil {
					return platform(err)
				}
				if c.Path = guest.Shell; c.Path == "" {
					return fmt.Errorf("sandbox %s has no shell; run programs of its image with 'dsec exec'", sb.ID())
				}
			}
			return platform(a.execute(cmd.Context(), sb, c, wiring{tty: true, stdin: true}))
		},
	}
	p.add(cmd)
	f := cmd.Flags()
	f.StringVar(&c.Path, "shell", "", "the shell to run (default bash, or sh)")
	return cmd
}
