package main

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"dsec/client"
)

func (a *app) waitCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "wait ID [PROCESS]", Short: "Wait until processes have ended",
		Long: `Wait waits for PROCESS, a pid or tag of 'dsec ps', prints its exit code and returns it;
125 if the platform failed. It also tells of one that ended before. Without PROCESS it
waits for all that exec started and that still run, prints PROCESS and exit code of each,
and returns the first code that is not 0, in the order of starts.

With --json each process is a line, as of 'dsec ps --json'.`,
		Example: `  dsec exec -d --tag train $id -- ./train.sh; dsec wait $id train
  code=$(dsec wait $id 42)
  dsec wait --json $id`,
		Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.completeProcess(),
		RunE: func(cmd *cobra.Command, args []string) error { return platform(a.wait(cmd, args, asJSON)) },
	}
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print how each process ended as a line of JSON")
	return cmd
}

func (a *app) wait(cmd *cobra.Command, args []string, asJSON bool) error {
	sb, err := a.sandbox(cmd.Context(), args[0])
	if err != nil {
		return err
	}
	var procs []*client.ProcessInfo
	if len(args) == 2 {
		p, err := findProcess(cmd, sb, selector(args[1]))
		if err != nil {
			return err
		}
		procs = append(procs, p)
	} else {
		all, err := sb.Processes(cmd.Context())
		if err != nil {
			return err
		}
		for _, p := range all {
			if p.Running && p.Session == "" { // a session's shell ends when it is told to
				procs = append(procs, p)
			}
		}
	}
	first := 0
	for _, p := range procs {
		x, err := sb.Wait(cmd.Context(), client.Selector{PID: p.Pid})
		if err != nil {
			return err
		}
		if x.Code != 0 && first == 0 {
			first = x.Code
		}
		switch {
		case asJSON:
			var now *client.ProcessInfo
			if now, err = findProcess(cmd, sb, client.Selector{PID: p.Pid}); err == nil {
				err = a.jsonLine(processOf(now))
			}
		case len(args) == 2:
			_, err = fmt.Fprintln(a.stdout, x.Code)
		default:
			name := p.Tag
			if name == "" {
				name = strconv.FormatUint(uint64(p.Pid), 10)
			}
			_, err = fmt.Fprintln(a.stdout, name, x.Code)
		}
		if err != nil {
			return err
		}
	}
	if first != 0 {
		return &codeError{code: first}
	}
	return nil
}
