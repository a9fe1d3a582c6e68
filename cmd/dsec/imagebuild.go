package main

import (
	"bytes"
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"dsec/client"
	"dsec/internal/image"
	"dsec/internal/image/build"
)

func (a *app) imageBuildCmd() *cobra.Command {
	var recipe string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "build NAME -f RECIPE",
		Short: "Make an image by a recipe",
		Long: `Builds the root file system that a recipe describes on this machine, as root, and
imports it. A recipe is YAML with these fields; others are errors:

  from      debian (with a suite), busybox, scratch (nothing at all), or any image of
            'dsec image ls', by name or digest, whose environment, user, workdir, cmd and
            labels hold unless the recipe says otherwise
  suite     the release of debian, such as bookworm
  packages  of debian, a list: what to install besides the base
  steps     a list of things to do, in this order, each one of
              run: a shell command, run as root inside the new root file system, with
                   this machine's network; it fails with its first command that does
              copy: {src: file or directory beside the recipe, dest: absolute path,
                   mode: "0755" (of files; default the source's), user: uid (default 0)}
  env       environment of every process, and of run steps: {NAME: value}
  user      that processes run as unless told otherwise; workdir is where
  cmd       what the image is for, a list; only recorded ('dsec image inspect')
  labels    of the image: {name: value}

images/ has examples; images/with-steps has steps. A recipe is trusted like a script that
you run as root: its run steps are in no sandbox.`,
		Example: `  dsec image build debian -f images/debian-python/recipe.yaml
  printf 'from: debian\nsteps:\n  - run: apt-get install -y jq\n' > jq.yaml
  dsec image build debian-jq -f jq.yaml`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if recipe == "" {
				return usagef("-f RECIPE is missing")
			}
			r, err := build.Load(recipe)
			if err != nil {
				return err
			}
			return a.buildImage(cmd.Context(), args[0], r, asJSON)
		},
	}
	cmd.Flags().StringVarP(&recipe, "file", "f", "", "recipe")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	cmd.MarkFlagFilename("file", "yaml", "yml")
	return cmd
}

// baseImage is an image of the server's catalogue, for a recipe to build upon.
func baseImage(ctx context.Context, c *client.Client, name string) (image.Config, func(io.Writer) error, error) {
	img, err := c.Image(ctx, name)
	if err != nil {
		return image.Config{}, nil, err
	}
	config := image.Config{
		Env: img.Config.Env, Entrypoint: img.Config.Entrypoint, Cmd: img.Config.Cmd, User: img.Config.User, WorkDir: img.Config.WorkDir, Labels: img.Config.Labels,
	}
	// By digest: the name may mean another one by now.
	return config, func(w io.Writer) error { return c.Export(ctx, img.Digest, w) }, nil
}

// buildImage streams what the build makes into the import.
func (a *app) buildImage(ctx context.Context, name string, r *build.Recipe, asJSON bool) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	if _, err := c.Health(ctx); err != nil { // before minutes of building for nobody
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	pr, pw := io.Pipe()
	built, out := make(chan error, 1), a.aside()
	go func() {
		err := build.Archive(ctx, r, pw, build.Options{
			Image: func(ctx context.Context, name string) (image.Config, func(io.Writer) error, error) {
				return baseImage(ctx, c, name)
			},
			Progress: func(line string) { fmt.Fprintf(out, "build %s: %s\n", name, line) },
		})
		pw.CloseWithError(err)
		built <- err
	}()
	// The import starts with the first bytes, which come when everything is built.
	first := make([]byte, 1)
	if _, err := io.ReadFull(pr, first); err != nil {
		return fmt.Errorf("build image %s: %w", name, <-built)
	}
	img, err := a.importImage(name, 0, client.ImportOptions{Format: client.FormatDockerArchive}, func(o client.ImportOptions) (*client.Image, error) {
		return c.Import(ctx, name, io.MultiReader(bytes.NewReader(first), pr), o)
	})
	if err != nil {
		cancel(err)
		pr.CloseWithError(err)
		<-built
		return err
	}
	if err := <-built; err != nil {
		return fmt.Errorf("build image %s: %w", name, err)
	}
	return a.imported(img, asJSON)
}
