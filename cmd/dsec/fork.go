package main

import (
	"github.com/spf13/cobra"

	"dsec/client"
)

func (a *app) forkCmd() *cobra.Command {
	var o client.ForkOptions
	var count int
	var asJSON bool
	var secrets secretFlags
	cmd := &cobra.Command{
		Use:   "fork ID",
		Short: "Make sandboxes that begin with another one's files",
		Long: `Fork makes --count children of a sandbox on its node and prints their ids, each once its
guest answers. They begin with the sandbox's files, limits, environment and labels, but have a host
name, id and machine-id of their own; all that is unchanged is shared. The sandbox itself stands
still for a moment and runs on. Its processes are not copied, nor is what
its create was given as --secret, unless it is given again.

With --json each child is one line; one that could not be made is a line {"error":…}.`,
		Example:           "  dsec fork $id --count 16\n  dsec fork --leave-out /root/.ssh $id",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if count < 1 || count > 1000 {
				return usagef("--count %d: it must be 1 to 1000", count)
			}
			var err error
			if o.SecretEnv, err = secrets.values(); err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.printMade(cmd.Context(), "fork", c.Sandbox(args[0]).Fork(cmd.Context(), count, o), count, asJSON)
		},
	}
	secrets.add(cmd)
	f := cmd.Flags()
	f.IntVar(&count, "count", 1, "how many children")
	f.StringArrayVar(&o.LeaveOut, "leave-out", nil, "pattern of paths that the children must not have, as of snapshot (repeatable)")
	f.BoolVar(&asJSON, "json", false, "print each child as a line of JSON")
	return cmd
}
