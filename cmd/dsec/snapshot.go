package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

func (a *app) snapshotCmd() *cobra.Command {
	var o client.SnapshotOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "snapshot ID [NAME]",
		Short: "Keep what a sandbox changed, to start others from it",
		Long: `Snapshot keeps the files that a sandbox changed as one more layer on its image, and
prints the name, snap:NAME. It is an image: 'dsec create snap:NAME' starts sandboxes from
it, with the source's environment, user, working directory and labels. Without NAME one
is made up.

The sandbox stands still while its changes are read, and runs on. Only files are kept:
processes, and what is in /dev/shm, are not. A second snapshot of a sandbox is made on its
first and reads only what changed since.`,
		Example: `  dsec snapshot $id with-deps
  dsec snapshot --leave-out '*.pem' --leave-out /root/.aws $id
  dsec create snap:with-deps
  dsec snapshot ls`,
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			name := ""
			if len(args) > 1 {
				if name = args[1]; strings.TrimPrefix(name, v1.SnapshotPrefix) == "" {
					return usagef("NAME is empty; leave it out to have one made up")
				}
			}
			bar := a.progress("snapshot "+args[0], 0, true)
			defer bar.end()
			o.Progress = func(p v1.ImageProgress) { bar.step(p.Phase, p.Done, p.Total) }
			img, err := c.Sandbox(args[0]).Snapshot(cmd.Context(), name, o)
			bar.end()
			if err != nil {
				return err
			}
			if s := img.Snapshot; len(o.LeaveOut) > 0 && s != nil && s.Omitted == 0 {
				fmt.Fprintf(a.stderr, "dsec: nothing that the sandbox changed is named by --leave-out %s; what is in its image stays there\n", strings.Join(o.LeaveOut, ", "))
			}
			return a.snapshotMade(img, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&o.LeaveOut, "leave-out", nil, "pattern of paths that the snapshot must not have: /etc/app.key, *.pem, /var/cache/** (repeatable)")
	f.BoolVar(&asJSON, "json", false, "print the snapshot as JSON")
	cmd.AddCommand(a.snapshotLsCmd(), a.snapshotInspectCmd(), a.snapshotRmCmd(), a.snapshotExportCmd(), a.snapshotImportCmd())
	return cmd
}

func (a *app) snapshotMade(img *client.Image, asJSON bool) error {
	if asJSON {
		return a.json(img)
	}
	if s := img.Snapshot; s != nil && s.Omitted > 0 {
		fmt.Fprintf(a.stderr, "dsec: left out %s: %s\n", count(int(s.Omitted), "path"), strings.Join(s.LeftOut, ", "))
	}
	_, err := fmt.Fprintln(a.stdout, img.Name)
	return err
}

func (a *app) snapshotLsCmd() *cobra.Command {
	var asJSON, quiet bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List snapshots as the tree of what was made on what",
		Example: "  dsec snapshot ls\n  dsec snapshot ls -q", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if quiet && asJSON {
				return usagef("--quiet and --json are two ways to print: choose one")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			snaps, err := c.Snapshots(cmd.Context())
			if err != nil {
				return err
			}
			switch {
			case asJSON:
				return a.json(snaps)
			case quiet:
				for _, s := range snaps {
					if _, err := fmt.Fprintln(a.stdout, s.Name); err != nil {
						return err
					}
				}
				return nil
			}
			images, err := c.Images(cmd.Context())
			if err != nil {
				return err
			}
			var rows [][]string
			lineage(images, func(tree string, img *client.Image) {
				if s := img.Snapshot; s != nil {
					rows = append(rows, []string{tree + img.Name, s.Source, parts(s.Parts), fmt.Sprint(s.Entries), size(s.Bytes), fmt.Sprint(len(img.Layers)), age(img.CreatedAt, time.Now())})
				} else {
					rows = append(rows, []string{tree + orElse(img.Name, shortDigest(img.Digest)), "-", "-", "-", "-", fmt.Sprint(len(img.Layers)), age(img.CreatedAt, time.Now())})
				}
			})
			return table(a.stdout, []string{"NAME", "OF", "WITH", "CHANGED", "SIZE", "LAYERS", "AGE"}, rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print names only")
	return cmd
}

// parts names the images but the base that a sandbox was composed of.
func parts(list []v1.ImagePart) string {
	var names []string
	for _, p := range list {
		if p.Kind != v1.KindBase {
			names = append(names, orElse(p.Name, shortDigest(p.Digest)))
		}
	}
	return orDash(strings.Join(names, ","))
}

// lineage shows the snapshots among the images below what they were made on, each with the
// branches that lead to it. A parent that has no name any more is shown by its digest.
func lineage(images []client.Image, show func(tree string, img *client.Image)) {
	byDigest := map[string]*client.Image{}
	for i := range images {
		if byDigest[images[i].Digest] == nil {
			byDigest[images[i].Digest] = &images[i]
		}
	}
	below := map[string][]*client.Image{}
	var roots []string
	for i := range images {
		img := &images[i]
		if img.Snapshot == nil || len(img.Snapshot.Parents) == 0 {
			continue
		}
		parent := img.Snapshot.Parents[0]
		if p := byDigest[parent]; (p == nil || p.Snapshot == nil) && !slices.Contains(roots, parent) {
			roots = append(roots, parent)
		}
		below[parent] = append(below[parent], img)
	}
	var walk func(digest, indent string)
	walk = func(digest, indent string) {
		list := below[digest]
		delete(below, digest) // names of one snapshot share what is below it
		for i, img := range list {
			branch, next := "├─ ", "│  "
			if i == len(list)-1 {
				branch, next = "└─ ", "   "
			}
			show(indent+branch, img)
			walk(img.Digest, indent+next)
		}
	}
	for _, digest := range roots {
		root := byDigest[digest]
		if root == nil {
			root = &client.Image{Digest: digest}
		}
		show("", root)
		walk(digest, "")
	}
}

func (a *app) snapshotInspectCmd() *cobra.Command {
	cmd := a.inspectImage((*client.Client).GetSnapshot)
	cmd.Short, cmd.Example = "Show a snapshot: what it was made on, layers, what was left out", "  dsec snapshot inspect with-deps\n  dsec snapshot inspect with-deps --json"
	cmd.ValidArgsFunction = a.completeSnapshots(1)
	return cmd
}

func (a *app) snapshotRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm NAME...", Aliases: []string{"delete"}, Short: "Remove snapshots that nothing needs", Example: "  dsec snapshot rm with-deps\n  dsec snapshot rm step-2 step-1",
		Long: `Removes snapshots. One that a sandbox uses, or on which another snapshot was made, is
not removed; the message lists what needs it.`,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeSnapshots(-1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.removeNamed(args, "name", asJSON, func(name string) error { return c.DeleteSnapshot(cmd.Context(), name) })
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each outcome as a line of JSON")
	return cmd
}

// completeSnapshots completes up to limit names of snapshots.
func (a *app) completeSnapshots(limit int) completeFunc {
	return a.completeFrom(limit, func(ctx context.Context, c *client.Client, _ []string) []cobra.Completion {
		snaps, err := c.Snapshots(ctx)
		if err != nil {
			return nil
		}
		var out []cobra.Completion
		for _, s := range snaps {
			out = append(out, strings.TrimPrefix(s.Name, v1.SnapshotPrefix))
		}
		return out
	})
}
