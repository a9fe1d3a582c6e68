package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"dsec/api/v1/errs"
)

func (a *app) imageExportCmd() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use: "export NAME", Short: "Write an image's files as a tar",
		Long: `Export writes the root file system of an image, all its layers merged, as a tar, to
stdout or a file. What the image says about running programs (environment, user, command)
is not in it: see 'dsec image inspect'.`,
		Example: "  dsec image export debian -o debian.tar\n  dsec image export debian | tar t | grep bin/",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeImages(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if file == "" && isTerminal(a.stdout) {
				return usagef("a tar is nothing for a terminal; give -o FILE, or pipe it")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if file == "" || file == "-" {
				return c.Export(cmd.Context(), args[0], a.stdout)
			}
			return writeWhole(file, func(w io.Writer) error {
				bar := a.progress("export "+args[0], 0, true)
				defer bar.end()
				return c.Export(cmd.Context(), args[0], &counter{w: w, tell: bar.set})
			})
		},
	}
	cmd.Flags().StringVarP(&file, "output", "o", "", "file to write (default stdout)")
	cmd.MarkFlagFilename("output", "tar")
	return cmd
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
