package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

func (a *app) lsCmd() *cobra.Command {
	states := []string{
		string(v1.StateCreating), string(v1.StateRunning), string(v1.StateStopping), string(v1.StateStopped), string(v1.StateFailed), string(v1.StateLost),
	}
	var labels []string
	var state string
	var asJSON, quiet bool
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List sandboxes",
		Example: `  dsec ls
  dsec ls --label job=eval7 --state running -q
  dsec ls --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := keyValues("label", labels)
			if err != nil {
				return err
			}
			if state != "" && !slices.Contains(states, state) {
				return usagef("--state %q: it is one of %s", state, strings.Join(states, ", "))
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			all := []v1.Sandbox{}
			for sb, err := range c.All(cmd.Context(), client.ListOptions{Labels: l, State: v1.State(state)}) {
				if err != nil {
					return err
				}
				all = append(all, sb)
			}
			switch {
			case asJSON:
				return a.json(all)
			case quiet:
				for _, sb := range all {
					if _, err := fmt.Fprintln(a.stdout, sb.ID); err != nil {
						return err
					}
				}
				return nil
			}
			rows := make([][]string, len(all))
			for i, sb := range all {
				rows[i] = []string{
					sb.ID, string(sb.State), orDash(sb.Spec.Image), string(sb.Spec.Backend), sb.Node,
					age(sb.CreatedAt, time.Now()), size(sb.Spec.MemoryBytes), pairs(sb.Spec.Labels),
				}
			}
			return table(a.stdout, []string{"ID", "STATE", "IMAGE", "BACKEND", "NODE", "AGE", "MEMORY", "LABELS"}, rows)
		},
	}
	f := cmd.Flags()
	f.StringArrayVarP(&labels, "label", "l", nil, "only those with this label, KEY=VALUE (repeatable)")
	f.StringVar(&state, "state", "", "only those in this state: "+strings.Join(states, ", "))
	f.BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	cmd.RegisterFlagCompletionFunc("label", a.completeLabels())
	cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(states, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) inspectCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "inspect ID...",
		Short: "Show all about sandboxes: spec, state, times, usage",
		Long: `Inspect shows all that is known of sandboxes. What the spec leaves open is shown as it
is in effect, with --json as it was asked for. One that cannot be shown does not keep the
others from it; the exit code is 1 then. Of one that was removed the error says when and
why: somebody asked, --ttl, its lease, and whether it had failed before.`,
		Example: `  dsec inspect saaaaaabbbbbcccccccccc
  dsec inspect --json $(dsec ls -q)`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeSandboxes(-1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			all := make([]*v1.Sandbox, 0, len(args))
			var failed []error
			refs, err := c.Resolve(cmd.Context(), args...)
			if err != nil {
				return err
			}
			for _, r := range refs {
				var sb *v1.Sandbox
				if err = r.Err; err == nil {
					sb, err = c.Get(cmd.Context(), r.ID)
				}
				if err != nil {
					failed = append(failed, err)
					continue
				}
				all = append(all, sb)
			}
			if err := a.inspected(cmd.Context(), c, all, asJSON, len(args) > 1); err != nil {
				return err
			}
			if len(failed) > 1 {
				return fmt.Errorf("%d of %d cannot be shown; the first: %w", len(failed), len(args), failed[0])
			}
			return errors.Join(failed...)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: an object, or an array for several ids")
	return cmd
}

func (a *app) inspected(ctx context.Context, c *client.Client, all []*v1.Sandbox, asJSON, many bool) error {
	switch {
	case asJSON && many:
		return a.json(all)
	case asJSON && len(all) == 1:
		return a.json(all[0])
	case asJSON:
		return nil
	}
	for i, sb := range all {
		if i > 0 {
			fmt.Fprintln(a.stdout)
		}
		var config v1.ImageConfig
		if sb.ImageDigest != "" {
			if img, err := c.Image(ctx, sb.ImageDigest); err == nil { // it may be gone, and is no part of the sandbox
				config = img.Config
			}
		}
		if err := table(a.stdout, nil, describe(sb, config, time.Now())); err != nil {
			return err
		}
	}
	return nil
}

// steps are those of a create, the longest first.
func steps(ms map[string]float64) string {
	names := slices.SortedFunc(maps.Keys(ms), func(a, b string) int {
		return cmp.Or(cmp.Compare(ms[b], ms[a]), strings.Compare(a, b))
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %.1f", name, ms[name])
	}
	return strings.Join(names, ", ")
}

func describe(sb *v1.Sandbox, img v1.ImageConfig, now time.Time) [][]string {
	s := sb.Spec
	rows := [][]string{
		{"id", sb.ID}, {"state", string(sb.State)}, {"generation", strconv.FormatUint(sb.Generation, 10)}, {"node", sb.Node},
		{"backend", string(s.Backend)}, {"image", orDash(s.Image)}, {"digest", orDash(sb.ImageDigest)},
		{"created", stamp(sb.CreatedAt, now)},
	}
	for _, p := range sb.Parts {
		rows = append(rows, []string{p.Kind, orDash(p.Name) + " " + p.Digest})
	}
	for _, t := range []struct {
		name string
		at   *time.Time
	}{{"started", sb.StartedAt}, {"ended", sb.EndedAt}, {"expires", sb.ExpiresAt}} {
		if t.at != nil {
			rows = append(rows, []string{t.name, stamp(*t.at, now)})
		}
	}
	rows = append(rows, [][]string{
		{"create took", fmt.Sprintf("%.1f ms", sb.CreateMS)}, {"of that, ms", orDash(steps(sb.Steps))},
		{"limits", fmt.Sprintf("cpu %g, memory %s, processes %d", float64(s.CPUMillis)/1000, size(s.MemoryBytes), s.PIDs)},
		{"user, directory", cmp.Or(s.User, img.User, "root") + ", " + cmp.Or(s.WorkDir, img.WorkDir, "the user's home")},
		{"hostname", cmp.Or(s.Hostname, sb.ID)},
		{"labels", pairs(s.Labels)}, {"environment", pairs(s.Env)},
	}...)
	if s.Lease > 0 {
		rows = append(rows, []string{"lease", s.Lease.Duration().String()})
	}
	if u := sb.Usage; u != nil {
		rows = append(rows, [][]string{
			{"cpu used", fmt.Sprintf("%.2f s", u.CPUSeconds)},
			{"memory", fmt.Sprintf("%s, peak %s", size(u.MemoryBytes), size(u.PeakMemoryBytes))},
			{"processes", strconv.FormatInt(u.Processes, 10)}, {"disk written", size(u.DiskBytes)},
			{"oom kills", strconv.FormatInt(u.OOMKills, 10)},
		}...)
	}
	if sb.Error != nil {
		rows = append(rows, []string{"error", sb.Error.Error()})
	}
	return rows
}

func stamp(t, now time.Time) string {
	if d := t.Sub(now); d > 0 {
		return fmt.Sprintf("%s (in %s)", t.UTC().Format(time.RFC3339), d.Round(time.Second))
	}
	return fmt.Sprintf("%s (%s ago)", t.UTC().Format(time.RFC3339), age(t, now))
}
