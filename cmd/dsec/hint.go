package main

import (
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
)

func (a *app) hintCmd() *cobra.Command {
	var next time.Duration
	var asJSON bool
	cmd := &cobra.Command{
		Use: "hint ID", Short: "Tell when a sandbox is used next, so that it may be paused until then",
		Long: `Hint tells the platform that the next call of a sandbox is known to be some time away, as while a
model thinks. The platform pauses the sandbox if holding its memory until then costs more than moving it
out and back, and prints what it did and why. Anything that is asked of the sandbox resumes it, also
before that time. What is in use is not paused: a running command, an attached stream, a connection to
a port. The hint ends with the next call, or with the next hint.

With --json the answer is an object: action (keep or pause), hold_gib_seconds, move_gib_seconds,
memory_bytes, why, sandbox.`,
		Example: `  dsec hint $id --next-call 90s
  dsec hint $id --next-call 10m --json | jq -r .action`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case !cmd.Flags().Changed("next-call"):
				return usagef("--next-call is missing: how long until the sandbox is used again")
			case next.Seconds() > v1.MaxTime:
				return usagef("--next-call %v is more than 10 years", next)
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			r, err := sb.Hint(cmd.Context(), next)
			if err != nil {
				return err
			}
			if asJSON {
				return a.json(r)
			}
			return table(a.stdout, nil, [][]string{{r.Action, r.Why}})
		},
	}
	cmd.Flags().Var(newDuration(&next), "next-call", "time until the next call, such as 90s")
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print JSON")
	return cmd
}
