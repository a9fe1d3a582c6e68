package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

func (a *app) imageCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "Import, pull, build and look at images", Args: cobra.NoArgs, RunE: needVerb,
		Example: "  dsec image import debian ./debian.tar\n  dsec image build debian -f images/debian-python/recipe.yaml\n  dsec image ls",
	}
	cmd.AddCommand(a.imageImportCmd(), a.imagePullCmd(), a.imagePushCmd(), a.imageExportCmd(), a.imageBuildCmd(), a.imageLsCmd(), a.imageInspectCmd(), a.imageRmCmd(),
		a.imageDuCmd(), a.imageWarmCmd(), a.imageEvictCmd(), a.imageCollapseCmd(), a.imageGCCmd())
	return cmd
}

func (a *app) imageImportCmd() *cobra.Command {
	importFormats := []string{client.FormatAuto, client.FormatDir, client.FormatTar, client.FormatDockerArchive, client.FormatOCILayout}
	var o client.ImportOptions
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "import NAME SRC",
		Short: "Make an image of a directory, tar, docker-archive or OCI layout",
		Long: `Import sends SRC to the server, which makes an image of it. SRC is a directory tree,
an OCI layout directory, an archive (tar, 'docker save', OCI layout), or - for an
archive on stdin.`,
		Example: `  dsec image import debian ./rootfs
  docker save python:3.13 | dsec image import python -`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains(importFormats, o.Format) {
				return usagef("--format %q: it is one of %s", o.Format, strings.Join(importFormats, ", "))
			}
			if err := madeName(args[0]); err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			total := int64(0)
			if fi, err := os.Stat(args[1]); err == nil && fi.Mode().IsRegular() {
				total = fi.Size()
			}
			img, err := a.importImage(args[0], total, o, func(o client.ImportOptions) (*client.Image, error) {
				if args[1] == "-" {
					return c.Import(cmd.Context(), args[0], a.stdin, o)
				}
				return c.ImportPath(cmd.Context(), args[0], args[1], o)
			})
			if err != nil {
				return err
			}
			return a.imported(img, asJSON)
		},
	}
	cmd.Flags().StringVar(&o.Format, "format", client.FormatAuto, "auto, dir, tar, docker-archive or oci-layout")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	cmd.RegisterFlagCompletionFunc("format", cobra.FixedCompletions(importFormats, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// madeName refuses names that an image which a user makes cannot have, before the work.
func madeName(name string) error {
	switch {
	case v1.KeptByBuild(name):
		return usagef("%s: such names are for what builds keep, which goes when nothing uses it; choose another", name)
	case strings.HasPrefix(name, v1.SnapshotPrefix):
		return usagef("%s: such names are for snapshots: 'dsec snapshot ID NAME' makes one; choose another", name)
	}
	return nil
}

// importImage shows the progress of an import: what is sent, then the server's phases.
func (a *app) importImage(name string, total int64, o client.ImportOptions, do func(client.ImportOptions) (*client.Image, error)) (*client.Image, error) {
	bar := a.progress("import "+name, total, true)
	defer bar.end()
	o.Sent = bar.sent
	o.Progress = func(p v1.ImageProgress) {
		if p.Phase != "" && p.Phase != "receive" {
			bar.step(p.Phase, p.Done, p.Total)
		}
	}
	return do(o)
}

func (a *app) imported(img *client.Image, asJSON bool) error {
	if asJSON {
		return a.json(img)
	}
	_, err := fmt.Fprintf(a.stdout, "%s %s (%d files, %s)\n", img.Name, img.Digest, img.Files, size(img.Bytes))
	return err
}

func (a *app) imageLsCmd() *cobra.Command {
	var asJSON, quiet, wide, all bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List images", Example: "  dsec image ls\n  dsec image ls --wide\n  dsec image rm $(dsec image ls -q)", Args: cobra.NoArgs,
		Long: "List images. Snapshots are images too: 'dsec snapshot ls' shows them, or --all, which\nalso shows what builds keep (build-base:…, build-step:…).",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if quiet && asJSON {
				return usagef("--quiet and --json are two ways to print: choose one")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			images, err := c.Images(cmd.Context())
			if err != nil {
				return err
			}
			if !all {
				images = slices.DeleteFunc(images, func(img client.Image) bool {
					return strings.HasPrefix(img.Name, v1.SnapshotPrefix) || v1.KeptByBuild(img.Name)
				})
			}
			switch {
			case asJSON:
				return a.json(images)
			case quiet:
				for _, img := range images {
					if _, err := fmt.Fprintln(a.stdout, orElse(img.Name, img.Digest)); err != nil {
						return err
					}
				}
				return nil
			}
			head := []string{"NAME", "DIGEST", "SIZE", "AGE"}
			if wide {
				head = append(head, "FILES", "ON DISK", "LAYERS", "USER", "COMMAND")
			}
			rows := make([][]string, len(images))
			for i, img := range images {
				rows[i] = []string{orDash(img.Name), shortDigest(img.Digest), size(img.Bytes), age(img.CreatedAt, time.Now())}
				if wide {
					var stored int64
					for _, l := range img.Layers {
						stored += l.MetaBytes + l.DataBytes
					}
					command := strings.Join(slices.Concat(img.Config.Entrypoint, img.Config.Cmd), " ")
					rows[i] = append(rows[i], fmt.Sprint(img.Files), size(stored), fmt.Sprint(len(img.Layers)), orElse(img.Config.User, "root"), orDash(command))
				}
			}
			return table(a.stdout, head, rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&wide, "wide", false, "more columns: files, what is stored, layers, user, command")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print names only")
	cmd.Flags().BoolVar(&all, "all", false, "snapshots and what builds keep, too")
	return cmd
}

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

func shortDigest(d string) string {
	h := strings.TrimPrefix(d, "sha256:")
	return h[:min(len(h), 12)]
}

func (a *app) imageInspectCmd() *cobra.Command {
	cmd := a.inspectImage((*client.Client).Image)
	cmd.Short, cmd.Example = "Show an image: layers, sizes, configuration", "  dsec image inspect debian\n  dsec image inspect --json debian | jq .config.env"
	cmd.ValidArgsFunction = a.completeImages(1)
	return cmd
}

// inspectImage is the verb that shows what get finds by its name.
func (a *app) inspectImage(get func(*client.Client, context.Context, string) (*client.Image, error)) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "inspect NAME", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			img, err := get(c, cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return a.json(img)
			}
			return a.printImage(img)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// printImage shows an image as a table.
func (a *app) printImage(img *client.Image) error {
	rows := [][]string{
		{"name", orDash(img.Name)}, {"digest", img.Digest}, {"created", stamp(img.CreatedAt, time.Now())},
		{"files", fmt.Sprint(img.Files)}, {"size", size(img.Bytes)},
		{"command", orDash(strings.Join(append(img.Config.Entrypoint, img.Config.Cmd...), " "))},
		{"user, directory", orDash(img.Config.User) + ", " + orDash(img.Config.WorkDir)},
		{"environment", orDash(strings.Join(img.Config.Env, " "))}, {"labels", pairs(img.Config.Labels)},
	}
	if s := img.Snapshot; s != nil {
		rows = append(rows,
			[]string{"snapshot of", s.Source}, []string{"made on", strings.Join(s.Parents, " ")})
		for _, p := range s.Parts {
			rows = append(rows, []string{"composed of", p.Kind + " " + orDash(p.Name) + " " + p.Digest})
		}
		rows = append(rows,
			[]string{"changed", fmt.Sprintf("%d names, %s", s.Entries, size(s.Bytes))}, []string{"sandbox's labels", pairs(s.Labels)})
		if s.Omitted > 0 {
			rows = append(rows, []string{"left out", fmt.Sprintf("%d: %s", s.Omitted, strings.Join(s.LeftOut, " "))})
		}
		for _, n := range s.Notes {
			rows = append(rows, []string{"note", n})
		}
	}
	if p := img.Pack; p != nil && img.Snapshot != nil {
		rows = append(rows, []string{"stood still", fmt.Sprintf("%.0f ms, after %.0f ms of reading ahead", p.FrozenMS, p.ReadAheadMS)})
	}
	for i, l := range img.Layers {
		rows = append(rows, []string{fmt.Sprintf("layer %d", i), fmt.Sprintf("%s, metadata %s %s, data %s %s",
			l.Kind, shortDigest(l.MetaDigest), size(l.MetaBytes), orDash(shortDigest(l.DataDigest)), size(l.DataBytes))})
	}
	return table(a.stdout, nil, rows)
}

func (a *app) imageRmCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "rm NAME...", Aliases: []string{"delete"}, Short: "Remove images", Example: "  dsec image rm debian\n  dsec image rm --json $(dsec image ls -q)",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeImages(-1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.removeNamed(args, "name", asJSON, func(name string) error { return c.DeleteImage(cmd.Context(), name) })
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each outcome as a line of JSON")
	return cmd
}
