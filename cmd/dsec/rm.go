package main

import (
	"bufio"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

func (a *app) rmCmd() *cobra.Command {
	var sel selection
	var force, asJSON bool
	cmd := &cobra.Command{
		Use:     "rm [ID...]",
		Aliases: []string{"delete"},
		Short:   "Remove sandboxes",
		Long: `Rm removes the named sandboxes, those with all given labels, or (--all) every one, in
whatever state, and prints each id once nothing of it is left. --all asks before, on a
terminal; elsewhere it needs --force. All are removed, also when an id cannot be printed.
That no sandbox has the labels is no failure, but said on stderr.`,
		Example: `  dsec rm saaaaaabbbbbcccccccccc
  dsec rm --label job=eval7
  dsec rm --all
  dsec rm --all --force --json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := sel.check(args); err != nil {
				return err
			}
			if sel.all && !force && !isTerminal(a.stdin) {
				return usagef("--all removes every sandbox, and asks only on a terminal; confirm with --force")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			ids, failed, err := sel.ids(cmd.Context(), c, args, "")
			if err != nil {
				return err
			}
			if sel.all && len(ids) == 0 {
				a.note("there are no sandboxes")
				return nil
			}
			if sel.all && !force && !a.confirm(fmt.Sprintf("remove %s?", count(len(ids), "sandbox"))) {
				return errors.New("nothing was removed")
			}
			return a.remove(cmd, c, v1.DeleteRequest{IDs: ids, Labels: sel.labels}, failed, asJSON)
		},
	}
	sel.add(a, cmd, "remove those with this label, KEY=VALUE (repeatable: all must match)", "remove every sandbox")
	f := cmd.Flags()
	f.BoolVarP(&force, "force", "f", false, "do not ask")
	f.BoolVar(&asJSON, "json", false, "print each outcome as a line of JSON")
	return cmd
}

// confirm asks a question on the terminal; all but a yes means no.
func (a *app) confirm(question string) bool {
	fmt.Fprintf(a.stderr, "%s [y/N] ", question)
	line, _ := bufio.NewReader(a.stdin).ReadString('\n') // a broken one is no yes
	answer := strings.ToLower(strings.TrimSpace(line))
	return answer == "y" || answer == "yes"
}

// removeNamed removes images or tokens one by one: each outcome is printed, and the first
// failure is the verb's, after all were tried.
func (a *app) removeNamed(names []string, what string, asJSON bool, remove func(name string) error) error {
	var failed []error
	var unprinted error
	for _, name := range names {
		err := remove(name)
		if err != nil {
			failed = append(failed, err)
		}
		var perr error
		if asJSON {
			out := map[string]any{what: name}
			if err != nil {
				out["error"] = v1.ProblemOf(err)
			}
			perr = a.jsonLine(out)
		} else if err == nil {
			_, perr = fmt.Fprintln(a.stdout, name)
		}
		if unprinted == nil {
			unprinted = perr
		}
	}
	if unprinted != nil {
		return unprinted
	}
	if len(failed) > 1 {
		return fmt.Errorf("%d of %d were not removed; the first: %w", len(failed), len(names), failed[0])
	}
	return errors.Join(failed...)
}

// remove prints each outcome, those of unknown ids first; the first failure is the verb's,
// after all were tried.
func (a *app) remove(cmd *cobra.Command, c *client.Client, req v1.DeleteRequest, failed []failedRef, asJSON bool) error {
	bar := a.progress("remove", int64(len(req.IDs)), false)
	defer bar.end()
	var errAll []error
	var unprinted error
	n := 0
	outcomes := func(yield func(string, error) bool) {
		for _, f := range failed {
			if !yield(f.ref, f.err) {
				return
			}
		}
		if len(failed) == 0 || len(req.IDs) > 0 {
			c.DeleteMany(cmd.Context(), req)(yield)
		}
	}
	for id, err := range outcomes {
		if err != nil && id == "" {
			return err
		}
		n++
		bar.set(int64(n))
		if err != nil {
			errAll = append(errAll, err)
		}
		var perr error
		if asJSON {
			perr = a.jsonLine(v1.DeleteResult{ID: id, Error: v1.ProblemOf(err)})
		} else if err == nil {
			_, perr = fmt.Fprintln(a.stdout, id)
		}
		if unprinted == nil { // the rest is removed all the same
			unprinted = perr
		}
	}
	bar.end()
	if n == 0 {
		a.note("no sandbox has these labels")
	}
	switch len(errAll) {
	case 0:
		return unprinted
	case 1:
		return errors.Join(errAll[0], unprinted)
	}
	return fmt.Errorf("%s were not removed; the first: %w", count(len(errAll), "sandbox"), errAll[0])
}
