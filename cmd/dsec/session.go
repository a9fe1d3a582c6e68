package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"dsec/client"
)

func (a *app) sessionCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "session", Short: "Keep shells whose directory and variables stay between commands", Args: cobra.NoArgs, RunE: needVerb,
		Long: `A session is a shell that stays: what one command sets (directory, variables, functions,
background jobs) the next one finds. It lives until 'dsec session rm', its shell ends, or
the sandbox does, whoever is connected, and takes one command at a time.`,
		Example: `  dsec session create $id work
  dsec session exec $id work -- 'cd /work && . venv/bin/activate'
  dsec session exec $id work -- make test
  dsec session rm $id work`,
	}
	cmd.AddCommand(a.sessionCreateCmd(), a.sessionLsCmd(), a.sessionExecCmd(), a.sessionRmCmd())
	return cmd
}

// sessionJSON is what session create and ls print of a session.
type sessionJSON struct {
	Name     string    `json:"name"`
	PID      uint32    `json:"pid"`
	Shell    string    `json:"shell"`
	User     string    `json:"user"`
	Busy     bool      `json:"busy"`
	Commands uint64    `json:"commands"` // that it was given so far
	OpenedAt time.Time `json:"opened_at"`
}

func sessionOf(s *client.SessionInfo) sessionJSON {
	return sessionJSON{
		Name: s.Id, PID: s.Pid, Shell: s.Shell, User: s.User, Busy: s.Busy, Commands: s.Commands, OpenedAt: time.UnixMilli(int64(s.OpenedUnixMs)).UTC(),
	}
}

func (a *app) sessionCreateCmd() *cobra.Command {
	var p processFlags
	var shell string
	var asJSON bool
	cmd := &cobra.Command{
		Use: "create ID [NAME]", Short: "Open a session and print its name",
		Long: `Create starts a shell, bash or where there is none sh, and prints the session's name:
NAME, or one that the sandbox chooses.`,
		Example: "  dsec session create $id work\n  dsec session create --user nobody --cwd /tmp -e CI=1 $id\n  dsec session create --shell /bin/sh --json $id",
		Args:    cobra.RangeArgs(1, 2), ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			o := client.SessionOptions{Shell: shell, Dir: p.cwd, User: p.user}
			if len(args) == 2 {
				o.ID = args[1]
			}
			var err error
			if o.Env, err = environment(p.env, p.envFiles); err != nil {
				return err
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			s, err := sb.OpenSession(cmd.Context(), o)
			if err != nil {
				return err
			}
			if asJSON {
				info := s.Info()
				return a.json(sessionOf(&info))
			}
			_, err = fmt.Fprintln(a.stdout, s.ID())
			return err
		},
	}
	p.add(cmd)
	cmd.Flags().StringVar(&shell, "shell", "", "the shell to run (default bash, or sh)")
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print the session as JSON")
	return cmd
}

func (a *app) sessionLsCmd() *cobra.Command {
	var asJSON, quiet bool
	cmd := &cobra.Command{
		Use: "ls ID", Aliases: []string{"list"}, Short: "List a sandbox's sessions", Example: "  dsec session ls $id\n  dsec session ls -q $id\n  dsec session ls --json $id",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			sessions, err := sb.Sessions(cmd.Context())
			if err != nil {
				return err
			}
			list, rows := make([]sessionJSON, len(sessions)), make([][]string, len(sessions))
			for i, s := range sessions {
				j := sessionOf(s)
				state := "idle"
				if j.Busy {
					state = "busy"
				}
				list[i], rows[i] = j, []string{j.Name, state, fmt.Sprint(j.PID), orDash(j.User), j.Shell, fmt.Sprint(j.Commands), age(j.OpenedAt, time.Now())}
			}
			switch {
			case asJSON:
				return a.json(list)
			case quiet:
				for _, j := range list {
					if _, err := fmt.Fprintln(a.stdout, j.Name); err != nil {
						return err
					}
				}
				return nil
			}
			return table(a.stdout, []string{"NAME", "STATE", "PID", "USER", "SHELL", "COMMANDS", "AGE"}, rows)
		},
	}
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print names only")
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print JSON")
	return cmd
}

// sessionResultJSON is what session exec --json prints.
type sessionResultJSON struct {
	Session string `json:"session"`
	Ended   bool   `json:"ended"` // the shell itself has ended, and the session with it
	resultJSON
}

func (a *app) sessionExecCmd() *cobra.Command {
	var cmdline client.SessionCommand
	var asJSON bool
	maxOutput := bytesValue(defaultMaxOutput)
	cmd := &cobra.Command{
		Use: "exec [flags] ID NAME -- LINE...", Short: "Run a command line in a session's shell",
		Long: `Exec gives LINE to the session's shell, several words joined by spaces, prints what it
writes as it comes, and returns its exit code; 125 if the platform failed. Quote what
this machine's shell must not touch: -- 'cd "$HOME" && ls *.py'.

Ctrl-C and --timeout kill what LINE runs; the shell stays if it can. With --json one
object is printed at the end, as by 'dsec exec --json', with session and ended (the shell
itself has ended, as by exit).`,
		Example: `  dsec session exec $id work -- 'cd /work && export CI=1'
  dsec session exec --timeout 10m $id work -- make test
  dsec session exec --json $id work -- pwd | jq -r .stdout`,
		Args: commandArgs(2, "ID or NAME"), ValidArgsFunction: a.completeSession(),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case cmd.Flags().Changed("max-output") && !asJSON:
				return usagef("--max-output is for --json")
			case maxOutput < 1:
				return usagef("--max-output must be more than 0")
			}
			cmdline.Line = strings.Join(args[2:], " ")
			var r *result
			if asJSON {
				r = newResult(maxOutput)
			}
			res, err := a.sessionExec(cmd.Context(), args[0], args[1], cmdline, r)
			err = platform(err)
			if r == nil {
				return err
			}
			j := sessionResultJSON{Session: args[1], resultJSON: r.json(cmd.Context(), err)}
			j.Ended = res != nil && res.Ended
			if perr := a.jsonLine(j); perr != nil {
				return perr
			}
			return err
		},
	}
	f := cmd.Flags()
	f.Var(newDuration(&cmdline.Timeout), "timeout", "kill the command after this time, such as 90s")
	f.BoolVar(&asJSON, jsonFlag, false, "print the outcome as an object: exit_code, stdout, stderr, …")
	f.Var(&maxOutput, "max-output", "with --json: keep this much of each of stdout and stderr")
	return cmd
}

// sessionExec runs one line; its outcome is the error, as with execute.
func (a *app) sessionExec(ctx context.Context, ref, name string, cmd client.SessionCommand, r *result) (*client.SessionResult, error) {
	sb, err := a.sandbox(ctx, ref)
	if err != nil {
		return nil, err
	}
	out, errOut := a.stdout, a.stderr
	if r != nil {
		r.sandbox, out, errOut = sb.ID(), &r.out, &r.errOut
	}
	res, err := sb.Session(name).Run(ctx, cmd, out, errOut)
	if err != nil {
		return nil, err
	}
	x := client.Exit{
		Code: res.Code, TimedOut: res.TimedOut, Duration: res.Duration, OOMKilled: res.OOMKilled, OOMKills: res.OOMKills, MemoryLimit: res.MemoryLimit,
	}
	if r != nil {
		r.exit = x
	}
	return res, a.ended(x)
}

func (a *app) sessionRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm ID NAME...", Aliases: []string{"delete"}, Short: "End sessions and what runs in them",
		Example: "  dsec session rm $id work\n  dsec session rm $id $(dsec session ls -q $id)",
		Args:    cobra.MinimumNArgs(2), ValidArgsFunction: a.completeSession(),
		RunE: func(cmd *cobra.Command, args []string) error {
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.removeNamed(args[1:], "name", asJSON, func(name string) error { return sb.Session(name).Close(cmd.Context()) })
		},
	}
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print each outcome as a line of JSON")
	return cmd
}
