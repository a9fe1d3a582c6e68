package main

import (
	"context"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

// selection is how a verb is told which sandboxes it is for: by ids, by labels, or all.
type selection struct {
	flags []string // of labels
	all   bool

	labels map[string]string // after check
}

func (s *selection) add(a *app, cmd *cobra.Command, label, all string) {
	f := cmd.Flags()
	f.StringArrayVarP(&s.flags, "label", "l", nil, label)
	f.BoolVar(&s.all, "all", false, all)
	cmd.RegisterFlagCompletionFunc("label", a.completeLabels())
	cmd.ValidArgsFunction = a.completeSandboxes(-1)
}

// check says whether exactly one way is used.
func (s *selection) check(args []string) (err error) {
	if s.labels, err = keyValues("label", s.flags); err != nil {
		return err
	}
	given := 0
	for _, b := range []bool{len(args) > 0, len(s.labels) > 0, s.all} {
		if b {
			given++
		}
	}
	switch {
	case given == 0:
		return usagef("name sandboxes, or select them with --label or --all")
	case given > 1:
		return usagef("use only one of ids, --label and --all")
	}
	return nil
}

// failedRef is an argument that names no sandbox.
type failedRef struct {
	ref string
	err error
}

// ids returns those that are named, or with --all those in a state (empty: any). With labels
// there are none: the server selects.
func (s *selection) ids(ctx context.Context, c *client.Client, args []string, state v1.State) (ids []string, failed []failedRef, err error) {
	refs, err := c.Resolve(ctx, args...)
	if err != nil {
		return nil, nil, err
	}
	for i, r := range refs {
		if r.Err != nil {
			failed = append(failed, failedRef{args[i], r.Err})
		} else {
			ids = append(ids, r.ID)
		}
	}
	if s.all {
		for sb, err := range c.All(ctx, client.ListOptions{State: state}) {
			if err != nil {
				return nil, nil, err
			}
			ids = append(ids, sb.ID)
		}
	}
	return ids, failed, nil
}
