package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

func (a *app) pauseCmd() *cobra.Command {
	return a.turnCmd(turn{
		verb: "pause", done: "paused", from: v1.StateRunning,
		many: func(ctx context.Context, c *client.Client, req v1.PauseRequest) iter.Seq2[v1.PauseResult, error] {
			return c.PauseMany(ctx, req)
		},
	}, &cobra.Command{
		Use: "pause [ID...]", Short: "Let sandboxes stand still and free their memory",
		Long: `Pause lets the processes of sandboxes stand still and moves their memory to the node's swap.
Whatever is asked of a paused sandbox afterwards, such as exec, cp or a connection to a port, resumes it
first; so does 'dsec resume'. Paused sandboxes keep their slot on the node, and leave CPU and memory to
others. Those with all given labels are paused by one request, however many they are.

Each id is printed once its memory is free, and in the end how much that was, on stderr. One that is
paused already counts as done. Some that cannot be paused do not keep others from it; the exit code is 1
then. With --json each outcome is a line: id, state, changed, freed_bytes, took_ms, error. Ctrl-C ends
it: what has begun by then is paused all the same.`,
		Example: `  dsec pause $id
  dsec pause --label job=train7
  dsec pause --all --json | jq -s 'map(.freed_bytes) | add'`,
	})
}

// turn is what pause and resume have in common.
type turn struct {
	verb, done string
	from       v1.State // of those that --all is for
	many       func(ctx context.Context, c *client.Client, req v1.PauseRequest) iter.Seq2[v1.PauseResult, error]
}

func (a *app) turnCmd(t turn, cmd *cobra.Command) *cobra.Command {
	var sel selection
	var asJSON bool
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := sel.check(args); err != nil {
			return err
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		ids, failed, err := sel.ids(cmd.Context(), c, args, t.from)
		if err != nil {
			return err
		}
		if sel.all && len(ids) == 0 {
			a.note("no sandbox is %s", t.from)
			return nil
		}
		return a.turn(cmd.Context(), c, t, v1.PauseRequest{IDs: ids, Labels: sel.labels}, failed, asJSON)
	}
	sel.add(a, cmd, t.verb+" those with this label, KEY=VALUE (repeatable: all must match)", t.verb+" every sandbox that is "+string(t.from))
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print each outcome as a line of JSON")
	return cmd
}

// turn prints each outcome, those of arguments that name nothing first, and what came of all. A failure
// is the verb's, after all were tried.
func (a *app) turn(ctx context.Context, c *client.Client, t turn, req v1.PauseRequest, failed []failedRef, asJSON bool) error {
	began := time.Now()
	bar := a.progress(t.verb, int64(len(req.IDs)), false)
	defer bar.end()
	var errAll []error
	var unprinted error
	var n, changed int
	var freed int64
	take := func(r v1.PauseResult) {
		n++
		bar.set(int64(n))
		err := r.Error.Err()
		if err != nil {
			errAll = append(errAll, err)
		} else {
			freed += r.FreedBytes
			if r.Changed {
				changed++
			}
		}
		var perr error
		if asJSON {
			perr = a.jsonLine(r)
		} else if err == nil {
			_, perr = fmt.Fprintln(a.stdout, r.ID)
		}
		if unprinted == nil { // the rest is done all the same
			unprinted = perr
		}
	}
	for _, f := range failed {
		take(v1.PauseResult{ID: f.ref, Error: v1.ProblemOf(f.err)})
	}
	var broken error // the request itself
	if len(req.IDs) > 0 || len(req.Labels) > 0 {
		for r, err := range t.many(ctx, c, req) {
			if broken = err; err == nil {
				take(r)
			}
		}
	}
	bar.end()
	if n == 0 && broken == nil {
		a.note("no sandbox has these labels")
		return nil
	}
	a.note("%s", t.summary(changed, n-changed-len(errAll), freed, time.Since(began)))
	switch {
	case broken != nil:
		return broken
	case len(errAll) == 1:
		return errors.Join(errAll[0], unprinted)
	case len(errAll) > 1:
		return fmt.Errorf("%d of %s were not %s; the first: %w", len(errAll), count(n, "sandbox"), t.done, errAll[0])
	}
	return unprinted
}

// summary says what came of all that could be done.
func (t turn) summary(changed, before int, freed int64, took time.Duration) string {
	s := fmt.Sprintf("%s %s", t.done, count(changed, "sandbox"))
	if before > 0 {
		s += fmt.Sprintf(", %d more were so before", before)
	}
	if freed > 0 {
		s += fmt.Sprintf(", freed %s", size(freed))
	}
	return s + fmt.Sprintf(", in %s", brieflyTook(took))
}

// brieflyTook is a duration with as many digits as people read.
func brieflyTook(d time.Duration) string {
	if d < time.Second {
		return d.Round(time.Millisecond).String()
	}
	return d.Round(100 * time.Millisecond).String()
}
