package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"dsec/api/v1/errs"
	"dsec/client"
)

func (a *app) imageExportCmd() *cobra.Command {
	var file, format string
	formats := []string{client.ExportTar, client.ExportDocker, client.ExportOCI}
	cmd := &cobra.Command{
		Use: "export NAME [FILE]", Short: "Write an image as a tar of its files, or as an archive for other tools",
		Long: `Export writes an image or snapshot, all its layers merged, to FILE, or to stdout without one or with -.
--format tar is its root file system, without what it says about running programs (environment, user,
command: see 'dsec image inspect'). --format docker and oci are archives with that, which 'docker load', podman,
skopeo and 'dsec image import' read. For a snapshot with its layers use 'dsec snapshot export'.`,
		Example: "  dsec image export debian -o debian.tar\n  dsec image export debian | tar t | grep bin/\n  dsec image export --format docker snap:with-deps | docker load",
		Args:    cobra.RangeArgs(1, 2), ValidArgsFunction: a.completeImages(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains(formats, format) {
				return usagef("--format %q: it is one of %s", format, strings.Join(formats, ", "))
			}
			switch {
			case len(args) == 2 && file != "":
				return usagef("FILE and --output are two names for one thing")
			case len(args) == 2:
				file = args[1]
			}
			return a.export(cmd.Context(), args[0], format, file)
		},
	}
	cmd.Flags().StringVarP(&file, "output", "o", "", "file to write (default stdout)")
	cmd.MarkFlagFilename("output", "tar")
	cmd.Flags().StringVar(&format, "format", client.ExportTar, "tar, docker or oci")
	cmd.RegisterFlagCompletionFunc("format", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// export writes an archive to a file, which is there only if it is whole, or to stdout ("" and "-").
func (a *app) export(ctx context.Context, name, format, file string) error {
	stdout := file == "" || file == "-"
	if stdout && isTerminal(a.stdout) {
		return usagef("a tar is nothing for a terminal; name a file, or pipe it")
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	if stdout {
		return c.Export(ctx, name, format, a.stdout)
	}
	return writeWhole(file, func(w io.Writer) error {
		bar := a.progress("export "+name, 0, true)
		defer bar.end()
		return c.Export(ctx, name, format, &counter{w: w, tell: bar.set})
	})
}

type counter struct {
	w    io.Writer
	n    int64
	tell func(int64)
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	c.tell(c.n)
	return n, err
}

// writeWhole writes beside the file and renames, so that half of it is not taken for all.
func writeWhole(file string, write func(io.Writer) error) error {
	bad := func(err error) error {
		return errs.Wrap(errs.LocalFile, "write", "write "+file, err)
	}
	if fi, err := os.Stat(file); err == nil && !fi.Mode().IsRegular() {
		f, err := os.OpenFile(file, os.O_WRONLY, 0) // a device or pipe cannot be replaced
		if err != nil {
			return bad(err)
		}
		return bad(errors.Join(write(f), f.Close()))
	}
	f, err := os.CreateTemp(filepath.Dir(file), ".dsec-*")
	if err != nil {
		return bad(err)
	}
	defer os.Remove(f.Name())
	err = write(f)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return bad(err)
	}
	return bad(os.Rename(f.Name(), file))
}
