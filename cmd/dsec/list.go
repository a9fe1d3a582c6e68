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
	"dsec/api/v1/errs"
	"dsec/client"
)

func (a *app) lsCmd() *cobra.Command {
	var states []string
	for _, s := range []v1.State{
		v1.StateCreating, v1.StateRunning, v1.StatePausing, v1.StatePaused, v1.StateResuming, v1.StateStopping, v1.StateStopped, v1.StateFailed, v1.StateLost,
	} {
		states = append(states, string(s))
	}
	var labels []string
	var state string
	var asJSON, quiet, wide, watch bool
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List sandboxes",
		Long: `Ls lists the sandboxes that there are. --wide has more columns, and labels in full. With
--watch it lists again whenever something has changed, until Ctrl-C.`,
		Example: `  dsec ls
  dsec ls --label job=eval7 --state running -q
  dsec ls --watch --wide
  dsec ls --state paused
  dsec ls --json | jq -r '.[] | select(.spec.image == "debian") | .id'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if quiet && asJSON {
				return usagef("--quiet and --json are two ways to print: choose one")
			}
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
			o := client.ListOptions{Labels: l, State: v1.State(state)}
			show := func(all []v1.Sandbox) error {
				switch {
				case asJSON && watch:
					return a.jsonLine(all)
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
				return a.sandboxTable(all, wide, time.Now())
			}
			if watch {
				return a.watchList(cmd.Context(), c, o, show)
			}
			all, err := listAll(cmd.Context(), c, o)
			if err != nil {
				return err
			}
			return show(all)
		},
	}
	f := cmd.Flags()
	f.StringArrayVarP(&labels, "label", "l", nil, "only those with this label, KEY=VALUE (repeatable)")
	f.StringVar(&state, "state", "", "only those in this state: "+strings.Join(states, ", "))
	f.BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	f.BoolVar(&wide, "wide", false, "more columns: node, backend, CPU, processes, qos, when it expires, how long it is paused; labels in full")
	f.BoolVar(&watch, "watch", false, "list again at each change until Ctrl-C; with --json each list is a line")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	cmd.RegisterFlagCompletionFunc("label", a.completeLabels())
	cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(states, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// narrowLabels is what of labels fits a table that is not --wide.
const narrowLabels = 40

func (a *app) sandboxTable(all []v1.Sandbox, wide bool, now time.Time) error {
	head := []string{"ID", "STATE", "IMAGE", "AGE", "MEMORY", "LABELS"}
	if wide {
		head = []string{"ID", "STATE", "IMAGE", "AGE", "EXPIRES", "PAUSED", "CPU", "MEMORY", "PIDS", "QOS", "NODE", "BACKEND", "LABELS"}
	}
	rows := make([][]string, len(all))
	for i, sb := range all {
		s := sb.Spec
		rows[i] = []string{sb.ID, string(sb.State), orDash(s.Image), age(sb.CreatedAt, now)}
		if wide {
			expires := "-"
			if sb.ExpiresAt != nil {
				expires = "in " + age(now, *sb.ExpiresAt)
			}
			paused := "-"
			if sb.PausedAt != nil {
				paused = age(*sb.PausedAt, now)
			}
			rows[i] = append(rows[i], expires, paused, fmt.Sprintf("%g", float64(s.CPUMillis)/1000), size(s.MemoryBytes), fmt.Sprint(s.PIDs), orDash(string(s.QoS)), sb.Node, string(s.Backend), pairs(s.Labels))
		} else {
			rows[i] = append(rows[i], size(s.MemoryBytes), oneLine(pairs(s.Labels), narrowLabels))
		}
	}
	return table(a.stdout, head, rows)
}

// listAll returns all that o selects.
func listAll(ctx context.Context, c *client.Client, o client.ListOptions) ([]v1.Sandbox, error) {
	all := []v1.Sandbox{}
	for sb, err := range c.All(ctx, o) {
		if err != nil {
			return nil, err
		}
		all = append(all, sb)
	}
	return all, nil
}

// watchPause gathers changes that come together into one list.
const watchPause = 300 * time.Millisecond

// watchList shows a list again and again, at each change, until ctx ends.
func (a *app) watchList(ctx context.Context, c *client.Client, o client.ListOptions, show func([]v1.Sandbox) error) error {
	for n := 0; ; n++ {
		var all []v1.Sandbox
		first, err := c.List(ctx, client.ListOptions{Limit: 1}) // for its revision, which is before what the list tells
		if err == nil {
			all, err = listAll(ctx, c, o)
		}
		if ctx.Err() != nil {
			return nil // Ctrl-C is how it is meant to end
		}
		if err != nil {
			return err
		}
		if n > 0 && isTerminal(a.stdout) {
			fmt.Fprint(a.stdout, clearScreen)
		} else if n > 0 && !a.asJSON {
			fmt.Fprintln(a.stdout)
		}
		if err := show(all); err != nil {
			return err
		}
		for e, err := range c.Events(ctx, client.EventOptions{From: first.Revision, Follow: true, Labels: o.Labels}) {
			if err != nil && !errors.Is(err, errs.RevisionCompacted) {
				return err
			}
			if err != nil || e.Sandbox != nil {
				break
			}
		}
		select {
		case <-time.After(watchPause):
		case <-ctx.Done():
			return nil
		}
	}
}

func (a *app) inspectCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "inspect ID...",
		Short: "Show all about sandboxes: spec, state, times, usage",
		Long: `Inspect shows all that is known of sandboxes. What the spec leaves open is shown as it
is in effect, with --json as it was asked for. One that cannot be shown does not keep the
others from it; the exit code is 1 then. Of one that was removed the error says when and
why: somebody asked, --ttl, its lease, --idle-ttl, the node was short of memory, and whether it had
failed before. It wakes no paused sandbox.`,
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
	if sb.ForkOf != "" {
		rows = append(rows, []string{"forked from", sb.ForkOf})
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
	if sb.State == v1.StatePaused && sb.PausedAt != nil {
		rows = append(rows, []string{"paused", fmt.Sprintf("since %s, %s", stamp(*sb.PausedAt, now), whyPaused(sb.PauseReason))})
	}
	rows = append(rows, [][]string{
		{"create took", fmt.Sprintf("%.1f ms", sb.CreateMS)}, {"of that, ms", orDash(steps(sb.Steps))},
		{"limits", fmt.Sprintf("cpu %g, memory %s, processes %d", float64(s.CPUMillis)/1000, size(s.MemoryBytes), s.PIDs)},
		{"user, directory", cmp.Or(s.User, img.User, "root") + ", " + cmp.Or(s.WorkDir, img.WorkDir, "the user's home")},
		{"hostname", cmp.Or(s.Hostname, sb.ID)},
		{"labels", pairs(s.Labels)}, {"environment", pairs(s.Env)},
	}...)
	rows = append(rows, []string{"qos", fmt.Sprintf("%s, priority %d", cmp.Or(s.QoS, v1.QoSLatency), s.Priority)})
	if s.IdleTTL > 0 {
		rows = append(rows, []string{"idle ttl", fmt.Sprintf("%s, then %s", s.IdleTTL.Duration(), cmp.Or(s.OnIdle, v1.OnIdleStop))})
	}
	if s.Lease > 0 {
		rows = append(rows, []string{"lease", s.Lease.Duration().String()})
	}
	var here, read, fetched, failed int64
	for _, l := range sb.Layers {
		here += l.CachedBytes
		read += l.ReadBytes
		fetched += l.FetchedBytes
		failed += l.FailedReads
	}
	if len(sb.Layers) > 0 {
		what := fmt.Sprintf("%s on the node; by all its sandboxes %s read, %s fetched", size(here), size(read), size(fetched))
		if failed > 0 {
			what += fmt.Sprintf(", %d reads failed", failed)
		}
		rows = append(rows, []string{"image data", what})
	}
	if u := sb.Usage; u != nil {
		rows = append(rows, [][]string{
			{"cpu used", fmt.Sprintf("%.2f s", u.CPUSeconds)},
			{"memory", fmt.Sprintf("%s, peak %s; %s in swap; %.1f GiB·s so far", size(u.MemoryBytes), size(u.PeakMemoryBytes), size(u.SwapBytes), u.MemoryGiBSeconds)},
			{"pauses", fmt.Sprintf("%d, %s in all", sb.Pauses, time.Duration(u.PausedSeconds*float64(time.Second)).Round(100*time.Millisecond))},
			{"processes", strconv.FormatInt(u.Processes, 10)}, {"disk written", size(u.DiskBytes)},
			{"disks", fmt.Sprintf("%s read, %s written", size(u.IOReadBytes), size(u.IOWrittenBytes))},
			{"sent", size(u.SentBytes)},
			{"image read", fmt.Sprintf("%s from the node's cache, %s of it waited for (%.2f s); %s fetched", size(u.ImageReadBytes), size(u.ImageWaitedBytes), u.ImageWaitSeconds, size(u.ImageFetchedBytes))},
			{"oom kills", strconv.FormatInt(u.OOMKills, 10)},
		}...)
	}
	if o := sb.LastOOM; o != nil {
		rows = append(rows, []string{"last oom kill", victim(*o) + ", " + o.Time.UTC().Format(time.RFC3339)})
	}
	if sb.Error != nil {
		rows = append(rows, []string{"error", sb.Error.Error()})
	}
	return rows
}

// whyPaused says why a sandbox is paused.
func whyPaused(r v1.PauseReason) string {
	switch r {
	case v1.PauseRequested:
		return "somebody asked for it"
	case v1.PauseIdle:
		return "nobody used it"
	case v1.PauseHint:
		return "its next call was said to be far"
	case v1.PausePressure:
		return "the node was short of memory"
	}
	return "why is not known"
}

// victim names a process that was killed for want of memory, and what it met.
func victim(o v1.OOMKill) string {
	text := printable(o.Command)
	if o.PID > 0 {
		text += fmt.Sprintf(" (pid %d)", o.PID)
	}
	text += " with " + size(o.MemoryBytes)
	if o.LimitBytes == 0 {
		text += ", since the node ran out of memory"
	}
	return text
}

func stamp(t, now time.Time) string {
	if d := t.Sub(now); d > 0 {
		return fmt.Sprintf("%s (in %s)", t.UTC().Format(time.RFC3339), d.Round(time.Second))
	}
	return fmt.Sprintf("%s (%s ago)", t.UTC().Format(time.RFC3339), age(t, now))
}
