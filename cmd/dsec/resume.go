package main

import (
	"context"
	"iter"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

func (a *app) resumeCmd() *cobra.Command {
	return a.turnCmd(turn{
		verb: "resume", done: "resumed", from: v1.StatePaused,
		many: func(ctx context.Context, c *client.Client, req v1.PauseRequest) iter.Seq2[v1.PauseResult, error] {
			return c.ResumeMany(ctx, req)
		},
	}, &cobra.Command{
		Use: "resume [ID...]", Short: "Let paused sandboxes run again",
		Long: `Resume lets paused sandboxes run again. Nothing needs it, as whatever is asked of a sandbox resumes
it; but it brings back what it had in memory ahead of that, and processes in the background go on.

Each id is printed once it runs. One that runs already counts as done. What the node has no room for stays
paused, with node_full, which says what is short; others are resumed all the same, and the exit code is 1.
With --json each outcome is a line: id, state, changed, took_ms, error.`,
		Example: `  dsec resume $id
  dsec resume --label job=train7
  dsec resume --all`,
	})
}
