package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
)

// place is one end of a copy.
type place struct {
	sandbox string // empty: local
	path    string // "-": stdin or stdout
}

// parsePlace reads ID:/path, a local path or "-". What comes before a colon is a sandbox's
// if it may be one, as it may be cut short; a local file of such a name is written ./a:b.
func parsePlace(s string) place {
	if id, p, ok := strings.Cut(s, ":"); ok && v1.InSandboxID(id) {
		return place{id, p}
	}
	return place{"", s}
}

func (a *app) cpCmd() *cobra.Command {
	var o client.CopyOptions
	var user string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "cp SRC DST",
		Short: "Copy files and directories into or out of a sandbox",
		Long: `Cp copies between the local disk and a sandbox, written ID:/path. Modes, times, links
and whole directories are kept; owners too with --owner (as root). As with 'docker cp':

  DST is a directory      SRC goes into it, under its own name
  DST does not exist      SRC becomes DST; in a sandbox missing directories are made
  DST ends in /           it must be a directory; in a sandbox it is made if missing
  SRC is a directory and ends in /.   what it holds goes into DST, not itself
  SRC is a directory, DST a file      an error
  SRC is a link           what it points to is copied; links inside a directory stay links

"-" is stdin or stdout. To stdout goes a file's content, or a directory as a tar. From
stdin comes a tar if DST is a directory or ends in /, else DST's content.

A path in the sandbox that does not begin with / begins at the user's home. A local file
with a colon in its name is written with a directory before it: ./a:b.`,
		Example: `  dsec cp ./project $id:/work
  dsec cp ./project/. $id:/work
  dsec cp $id:/work/report.xml .
  echo hello | dsec cp - $id:/tmp/greeting
  dsec cp $id:/work - | tar t`,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completePlaces(),
		RunE: func(cmd *cobra.Command, args []string) error {
			src, dst := parsePlace(args[0]), parsePlace(args[1])
			switch {
			case src.sandbox == "" && dst.sandbox == "":
				return usagef("neither %q nor %q is in a sandbox; write ID:/path", args[0], args[1])
			case src.sandbox != "" && dst.sandbox != "":
				return usagef("both ends are in sandboxes; copy to the local disk, or pipe: dsec cp A:/x - | dsec cp - B:/x")
			case src.path == "" || dst.path == "":
				return usagef("a path is empty")
			case asJSON && dst.path == "-":
				return usagef("--json cannot be used with -: stdout is the copy")
			}
			sb, err := a.sandbox(cmd.Context(), src.sandbox+dst.sandbox)
			if err != nil {
				return err
			}
			files := sb.Files().As(user)
			done := copied{Sandbox: sb.ID(), Source: src.path, Destination: dst.path}
			begin := time.Now()
			if src.sandbox == "" {
				err = a.copyIn(cmd.Context(), files, src.path, dst.path, o, &done.Bytes)
			} else {
				err = a.copyOut(cmd.Context(), files, src.path, dst.path, o, &done.Bytes)
			}
			if err != nil || !asJSON {
				return err
			}
			done.DurationMS = float64(time.Since(begin).Microseconds()) / 1000
			return a.jsonLine(done)
		},
	}
	cmd.Flags().BoolVar(&o.KeepOwner, "owner", false, "keep owners, devices and extended attributes")
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print what was copied as JSON: sandbox, source, destination, bytes, duration_ms")
	cmd.Flags().StringVarP(&user, "user", "u", "", "act as this user inside the sandbox")
	return cmd
}

// copied is what cp --json prints. Bytes are those of a file, or of a directory's tar.
type copied struct {
	Sandbox     string  `json:"sandbox"`
	Source      string  `json:"source"`
	Destination string  `json:"destination"`
	Bytes       int64   `json:"bytes"`
	DurationMS  float64 `json:"duration_ms"`
}

func (a *app) copyIn(ctx context.Context, files client.Files, src, dst string, o client.CopyOptions, n *int64) error {
	unpack := strings.HasSuffix(dst, "/")
	if src == "-" && !unpack {
		e, err := files.Stat(ctx, dst)
		if err != nil && !errors.Is(err, errs.PathNotFound) {
			return err
		}
		unpack = err == nil && client.IsDir(e)
	}
	in := countReader{r: a.stdin, n: n}
	if src == "-" && unpack {
		_, _, err := files.UnpackFrom(ctx, dst, in, client.UnpackOptions{KeepOwner: o.KeepOwner, Parents: true})
		return err
	}
	if src == "-" {
		return files.WriteFrom(ctx, dst, in, client.WriteOptions{Parents: true})
	}
	var total int64
	if fi, err := os.Stat(src); err == nil && !fi.IsDir() {
		total = fi.Size()
	}
	bar := a.progress("copy", total, true)
	defer bar.end()
	o.Progress = func(done int64) { *n = done; bar.set(done) }
	return files.CopyIn(ctx, src, dst, o)
}

// countReader counts what passes.
type countReader struct {
	r io.Reader
	n *int64
}

func (c countReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	*c.n += int64(n)
	return n, err
}

func (a *app) copyOut(ctx context.Context, files client.Files, src, dst string, o client.CopyOptions, n *int64) error {
	e, err := files.Stat(ctx, src)
	if err != nil {
		return err
	}
	switch {
	case dst == "-" && client.IsDir(e):
		// The tar's names start with the directory's, as tar(1) would have them.
		return files.PackTo(ctx, src, strings.HasSuffix(src, "/.") || path.Clean(src) == "/", a.stdout)
	case dst == "-":
		r, err := files.Open(ctx, src, 0, 0)
		if err != nil {
			return err
		}
		defer r.Close()
		_, err = r.WriteTo(a.stdout)
		return err
	}
	total := e.Size
	if client.IsDir(e) {
		total = 0
	}
	bar := a.progress("copy", total, true)
	defer bar.end()
	o.Progress = func(done int64) { *n = done; bar.set(done) }
	return files.CopyOut(ctx, src, dst, o)
}

// completePlaces completes sandbox ids, and else leaves files to the shell.
func (a *app) completePlaces() completeFunc {
	ids := a.completeSandboxes(2)
	return func(cmd *cobra.Command, args []string, prefix string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var out []cobra.Completion
		if strings.HasPrefix(prefix, "s") && !strings.Contains(prefix, ":") {
			found, _ := ids(cmd, nil, prefix)
			for _, id := range found {
				name, _, _ := strings.Cut(id, "\t")
				out = append(out, name+":")
			}
		}
		if len(out) > 0 {
			return out, cobra.ShellCompDirectiveNoSpace
		}
		return nil, cobra.ShellCompDirectiveDefault
	}
}
