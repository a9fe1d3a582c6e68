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
	var labels []string
	var all, force, asJSON bool
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
		ValidArgsFunction: a.completeSandboxes(-1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := keyValues("label", labels)
			if err != nil {
				return err
			}
			given := 0
			for _, b := range []bool{len(args) > 0, len(l) > 0, all} {
				if b {
					given++
				}
			}
			switch {
			case given == 0:
				return usagef("name sandboxes, or select them with --label or --all")
			case given > 1:
				return usagef("use only one of ids, --label and --all")
			case all && !force && !isTerminal(a.stdin):
				return usagef("--all removes every sandbox, and asks only on a terminal; confirm with --force")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			req := v1.DeleteRequest{Labels: l}
			refs, err := c.Resolve(cmd.Context(), args...)
			if err != nil {
				return err
			}
			var unknown []v1.DeleteResult
			for i, r := range refs {
				if r.Err != nil {
					unknown = append(unknown, v1.DeleteResult{ID: args[i], Error: v1.ProblemOf(r.Err)})
				} else {
					req.IDs = append(req.IDs, r.ID)
				}
			}
			if all {
				for sb, err := range c.All(cmd.Context(), client.ListOptions{}) {
					if err != nil {
						return err
					}
					req.IDs = append(req.IDs, sb.ID)
				}
				if len(req.IDs) == 0 {
					a.note("there are no sandboxes")
					return nil
				}
				if !force && !a.confirm(fmt.Sprintf("remove %s?", count(len(req.IDs), "sandbox"))) {
					return errors.New("nothing was removed")
				}
			}
			return a.remove(cmd, c, req, unknown, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringArrayVarP(&labels, "label", "l", nil, "remove those with this label, KEY=VALUE (repeatable: all must match)")
	f.BoolVar(&all, "all", false, "remove every sandbox")
	f.BoolVarP(&force, "force", "f", false, "do not ask")
	f.BoolVar(&asJSON, "json", false, "print each outcome as a line of JSON")
	cmd.RegisterFlagCompletionFunc("label", a.completeLabels())
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
func (a *app) remove(cmd *cobra.Command, c *client.Client, req v1.DeleteRequest, unknown []v1.DeleteResult, asJSON bool) error {
	bar := a.progress("remove", int64(len(req.IDs)), false)
	defer bar.end()
	var errAll []error
	var unprinted error
	n := 0
	outcomes := func(yield func(string, error) bool) {
		for _, u := range unknown {
			if !yield(u.ID, u.Error.Err()) {
				return
			}
		}
		if len(unknown) == 0 || len(req.IDs) > 0 {
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
