package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

func (a *app) imageDuCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "du", Short: "Show what images take",
		Long: `Du shows for each image its size, what it takes in the object store of its own (OWN) and
together with other images (SHARED), both compressed, and what all nodes have of it
(CACHED). Removing an image frees what is its own, at the next collection.`,
		Example: "  dsec image du\n  dsec image du --json", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			u, err := c.ImageUsage(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return a.json(u)
			}
			rows := make([][]string, len(u.Items))
			for i, img := range u.Items {
				var cached int64
				for _, n := range img.Cached {
					cached += n
				}
				rows[i] = []string{orDash(img.Name), shortDigest(img.Digest), size(img.Bytes), size(img.OwnStored), size(img.SharedStored), size(cached)}
			}
			if err := table(a.stdout, []string{"NAME", "DIGEST", "SIZE", "OWN", "SHARED", "CACHED"}, rows); err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.stdout, "object store: %s\n", size(u.StoredBytes))
			if b := u.Builds; b.Images > 0 && err == nil {
				limit, until := "no limit", "for ever"
				if b.LimitBytes > 0 {
					limit = "at most " + size(b.LimitBytes)
				}
				if b.AgeSeconds > 0 {
					until = "for " + (time.Duration(b.AgeSeconds) * time.Second).String()
				}
				_, err = fmt.Fprintf(a.stdout, "kept by builds: %s, %s (%s; %s without use)\n", count(b.Images, "image"), size(b.Bytes), limit, until)
			}
			for _, n := range u.Nodes {
				limit := "no limit"
				if n.LimitBytes > 0 {
					limit = "at most " + size(n.LimitBytes)
				}
				if err == nil {
					_, err = fmt.Fprintf(a.stdout, "node %s: %s of data (%s), loaded by %s\n", n.Node, size(n.UsedBytes), limit, n.Mode)
				}
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) imageGCCmd() *cobra.Command {
	var asJSON bool
	var grace time.Duration
	cmd := &cobra.Command{
		Use: "gc", Short: "Remove what no image needs from the object store",
		Long: `Gc removes from the object store, and then from the nodes, what no image of the catalogue
and no sandbox needs, as the server does by itself every hour. What is found unneeded is
marked in one pass, and deleted two passes later: at once where the store's listings are
never behind (a local disk, S3), else in the passes of the next hours.

First of all it removes images that builds keep for later ones (build-base:…, build-step:…), where
nothing needs them: those that no build used for long ('dsec up --build-cache-age'), and the longest unused
while they are too large together ('--build-cache').`,
		Example: "  dsec image gc\n  dsec image gc --grace 0", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			var deleted, rewritten, builds int
			last, err := c.CollectImages(cmd.Context(), grace, func(r v1.CollectReport) {
				deleted += r.Deleted
				builds += r.Builds
				rewritten += r.Rewritten
				if asJSON {
					_ = a.jsonLine(r) // a broken stdout shows at the last line's error, too
					return
				}
				fmt.Fprintf(a.stderr, "pass %d: %d layers need %s; %s condemned, %d deleted\n", r.Pass, r.Layers, size(r.NeededBytes), count(r.Condemned, "object"), r.Deleted)
			})
			if err != nil || asJSON {
				return err
			}
			for _, d := range last.Damaged {
				fmt.Fprintf(a.stderr, "dsec: %s cannot be read, and images need it: import them again\n", d)
			}
			if builds > 0 {
				fmt.Fprintf(a.stderr, "%s of earlier builds removed\n", count(builds, "image"))
			}
			_, err = fmt.Fprintf(a.stdout, "%s deleted, %d rewritten, %s waiting\n", count(deleted, "object"), rewritten, count(last.Waiting, "condemnation"))
			return err
		},
	}
	grace = time.Hour
	cmd.Flags().Var(newDuration(&grace), "grace", "leave what is younger")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each pass as a line of JSON")
	return cmd
}

func (a *app) imageWarmCmd() *cobra.Command {
	var o client.WarmOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use: "warm NAME", Short: "Fetch an image to the nodes in advance",
		Long: `Warm has all nodes, or one, fetch what the first start of the image read in its first
seconds, in that order; with --all everything. Without it the data comes when it is read.`,
		Example: "  dsec image warm debian\n  dsec image warm debian --all --node k6i3en",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeImages(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			bar := a.progress("warm "+args[0], 0, true)
			defer bar.end()
			now := map[string]v1.WarmProgress{}
			o.Progress = func(p v1.WarmProgress) {
				now[p.Node] = p
				var done, total int64
				for _, n := range now {
					done += n.Done
					total += n.Total
				}
				bar.step("fetch", done, total)
			}
			nodes, err := c.WarmImage(cmd.Context(), args[0], o)
			bar.end()
			if asJSON {
				for _, n := range nodes {
					if jerr := a.jsonLine(n); err == nil {
						err = jerr
					}
				}
				return err
			}
			for _, n := range nodes {
				what := fmt.Sprintf("%s of %s", size(n.Done), size(n.Total))
				switch {
				case n.Error != nil:
					what = n.Error.Err().Error()
				case !o.All && !n.Trace:
					what += "; no start of the image was recorded yet: --all fetches everything"
				}
				if _, perr := fmt.Fprintf(a.stdout, "%s: %s\n", n.Node, what); err == nil {
					err = perr
				}
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&o.All, "all", false, "fetch everything")
	cmd.Flags().StringVar(&o.Node, "node", "", "only this node")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each node's outcome as a line of JSON")
	return cmd
}

func (a *app) imageCollapseCmd() *cobra.Command {
	var o client.CollapseOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use: "collapse NAME", Short: "Merge small neighbouring layers of an image",
		Long: `Collapse merges layers that snapshots made, where neighbours are both smaller than --below
(metadata and data, before compression), on a node that has the image. Its name, digest and
contents stay, and so does what was made on it. Sandboxes that run keep the layers that they
have; 'dsec image gc' removes those that nothing needs an hour later. The server does this by
itself for images that lose eight layers or more ('dsec up --collapse-below').`,
		Example: "  dsec image collapse snap:step-40\n  dsec image collapse --below 64MiB snap:step-40",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeImages(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.Below < 1 {
				return usagef("--below must be 1 byte or more")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			bar := a.progress("collapse "+args[0], 0, true)
			defer bar.end()
			o.Progress = func(p v1.ImageProgress) { bar.step(p.Phase, p.Done, p.Total) }
			img, err := c.CollapseImage(cmd.Context(), args[0], o)
			bar.end()
			if err != nil {
				return err
			}
			if asJSON {
				return a.json(img)
			}
			_, err = fmt.Fprintf(a.stdout, "%s: %s, made of %d\n", img.Name, count(len(img.Layers), "layer"), max(len(img.Made), len(img.Layers)))
			return err
		},
	}
	o.Below = v1.DefaultCollapse
	cmd.Flags().Var((*bytesValue)(&o.Below), "below", "merge neighbours that are both smaller")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	return cmd
}

func (a *app) imageEvictCmd() *cobra.Command {
	var node string
	var asJSON bool
	cmd := &cobra.Command{
		Use: "evict NAME", Short: "Drop what the nodes have of an image",
		Long: `Evict has all nodes, or one, drop their copies of an image's data and metadata. The image
stays in the object store and is fetched again when it is used. Layers that sandboxes use
stay.`,
		Example: "  dsec image evict debian\n  dsec image evict debian --node k6i3en",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeImages(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			nodes, err := c.EvictImage(cmd.Context(), args[0], node)
			if asJSON {
				for _, n := range nodes {
					if jerr := a.jsonLine(n); err == nil {
						err = jerr
					}
				}
				return err
			}
			for _, n := range nodes {
				what := []string{"freed " + size(n.FreedBytes)}
				if n.InUse > 0 {
					what = append(what, count(n.InUse, "layer")+" in use")
				}
				if n.Error != nil {
					what = []string{n.Error.Err().Error()}
				}
				if _, perr := fmt.Fprintf(a.stdout, "%s: %s\n", n.Node, strings.Join(what, ", ")); err == nil {
					err = perr
				}
			}
			return err
		},
	}
	cmd.Flags().StringVar(&node, "node", "", "only this node")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each node's outcome as a line of JSON")
	return cmd
}
