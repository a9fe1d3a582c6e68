package main

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

// removeTimeout bounds the removal of run's sandbox after the command, or the user's
// patience, has ended.
const removeTimeout = 30 * time.Second

const minLease = v1.MinLease * time.Second

func (a *app) runCmd() *cobra.Command {
	var sf specFlags
	var tty, interactive, noStdin, asJSON bool
	maxOutput := bytesValue(defaultMaxOutput)
	var c client.Cmd
	lease := time.Minute
	var secrets secretFlags
	cmd := &cobra.Command{
		Use:   "run [flags] IMAGE -- CMD [ARG...]",
		Short: "Run one command in a new sandbox, then remove it",
		Long: `Run creates a sandbox, connects the command to stdin, stdout and stderr, removes the
sandbox, also after Ctrl-C or when its output cannot be written any more, and returns the
command's exit code.

If run itself is killed, or is stopped or cut off from the server for longer than
--lease, the server removes the sandbox.`,
		Example: `  dsec run debian -- python3 -c 'print(6*7)'
  tar c . | dsec run --memory 2g debian -- sh -c 'tar x && make test'
  dsec run -t debian -- bash`,
		Args:              commandArgs(1, "IMAGE"),
		ValidArgsFunction: a.completeImages(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := sf.spec(args[0])
			if err != nil {
				return err
			}
			env, err := secrets.values()
			if err != nil {
				return err
			}
			if lease > 0 && lease < minLease {
				return usagef("--lease must be at least %v, or 0 for none", minLease)
			}
			spec.Lease = v1.Seconds(lease.Seconds())
			if asJSON && tty {
				return usagef("--json cannot be used with -t")
			}
			if cmd.Flags().Changed("max-output") && !asJSON {
				return usagef("--max-output is for --json")
			}
			if maxOutput < 1 {
				return usagef("--max-output must be more than 0")
			}
			terminal := isTerminal(a.stdin)
			if tty && !terminal && interactive && cmd.Flags().Changed("interactive") {
				return errNoTerminal
			}
			if noStdin && (tty || cmd.Flags().Changed("interactive")) {
				return usagef("--no-stdin cannot be used with -i or -t")
			}
			c.Path, c.Args = args[1], args[2:]
			w := wiring{tty: tty, stdin: interactive && !noStdin}
			if tty {
				w.stdin = terminal
			}
			if asJSON {
				w.result = newResult(maxOutput)
			}
			err = platform(a.runOnce(cmd.Context(), spec, env, c, w))
			return a.printResult(cmd.Context(), w.result, err)
		},
	}
	sf.add(cmd)
	secrets.add(cmd)
	a.completeSpecImages(cmd)
	f := cmd.Flags()
	f.SetInterspersed(true)
	f.BoolVarP(&tty, "tty", "t", false, "run on a terminal: ours if we have one, else one of 80x24 without input")
	f.BoolVarP(&interactive, "interactive", "i", true, "connect stdin")
	f.BoolVar(&noStdin, "no-stdin", false, "give the command no stdin, as --interactive=false")
	f.BoolVar(&asJSON, "json", false, "print the outcome as an object, as 'dsec exec --json' does")
	f.Var(&maxOutput, "max-output", "with --json: keep this much of each of stdout and stderr")
	f.Var(newDuration(&lease), "lease", "how long the sandbox outlives this program if that is killed or cut off; 0: for ever")
	f.Var(newDuration(&c.Timeout), "timeout", "kill the command after this time, such as 90s")
	f.Var(newDuration(&c.IdleTimeout), "idle-timeout", "kill the command after this time without output")
	return cmd
}

func (a *app) runOnce(ctx context.Context, spec client.Spec, secrets map[string]string, cmd client.Cmd, w wiring) (err error) {
	c, err := a.client()
	if err != nil {
		return err
	}
	// If the answer is lost, or we are stopped before it comes, the key finds the sandbox.
	key := newKey()
	sb, err := c.Create(ctx, spec, client.IdempotencyKey(key), client.SecretEnv(secrets))
	if err != nil {
		if ctx.Err() != nil {
			a.abandon(ctx, c, spec, key)
		}
		return err
	}
	alive, release := context.WithCancel(ctx)
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		sb.KeepAlive(alive) // if it cannot, the sandbox goes, and the command says so
	}()
	defer func() {
		release()
		<-renewed
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
		defer cancel()
		if rerr := sb.Delete(rctx); rerr != nil && !alreadyGone(rerr) {
			a.note("sandbox %s was not removed: %s", sb.ID(), brief(rerr))
		}
	}()
	return a.execute(ctx, sb, cmd, w)
}

// abandon removes the sandbox of a create that we did not wait for: the same key gives
// the same sandbox.
func (a *app) abandon(ctx context.Context, c *client.Client, spec client.Spec, key string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	if sb, err := c.Create(ctx, spec, client.IdempotencyKey(key)); err == nil {
		sb.Delete(ctx)
	}
}

// commandArgs checks "FIRST... -- CMD [ARG...]". The dashes must be there: without them
// the command's flags would be taken as ours.
func commandArgs(before int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		dash := cmd.ArgsLenAtDash()
		switch {
		case len(args) < before || dash >= 0 && dash < before:
			return usagef("%s is missing", what)
		case dash > before:
			return usagef("%q comes before --; put the command after it", args[before])
		case len(args) == before:
			return usagef("the command is missing; write it after --")
		case dash < 0:
			return usagef("write -- before the command: %s -- %s", strings.Join(args[:before], " "), strings.Join(args[before:], " "))
		}
		return nil
	}
}
