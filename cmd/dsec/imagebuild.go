package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"dsec/client"
	"dsec/internal/image"
	"dsec/internal/image/build"
)

func (a *app) imageBuildCmd() *cobra.Command {
	var recipe, steps string
	var asJSON, noCache bool
	var sf specFlags
	places := []string{stepsSandbox, stepsHost}
	cmd := &cobra.Command{
		Use:   "build NAME -f RECIPE",
		Short: "Make an image by a recipe",
		Long: `Makes an image as a recipe says. What it starts from is made on this machine, as root, by
Debian's own tools, or is an image of the catalogue; its steps then run in a sandbox of that, and what they
changed is a layer on top. A recipe is YAML with these fields; others are errors:

  from      debian (with a suite), busybox, scratch (nothing at all), or any image of
            'dsec image ls', by name or digest, whose environment, user, workdir, cmd and
            labels hold unless the recipe says otherwise
  suite     the release of debian, such as bookworm
  packages  of debian, a list: what to install besides the base
  steps     a list of things to do, in this order, each one of
              run: a shell command, run as root in the sandbox; it fails with its first
                   command that does
              copy: {src: file or directory beside the recipe, dest: absolute path,
                   mode: "0755" (of files; default the source's), user: uid (default 0)}
  env       environment of every process, and of run steps: {NAME: value}
  user      that processes run as unless told otherwise; workdir is where
  cmd       what the image is for, a list; only recorded ('dsec image inspect')
  labels    of the image: {name: value}

Sandboxes have no network yet. Steps that need one are for --steps host: they run on this machine as
root, in no sandbox, with its network; trust such a recipe like a script that you run as root.

Each step's result is kept as the image build-step:KEY, and what a recipe starts from as
build-base:KEY. A later build whose recipe is the same up to a step, with the same files, goes on
from there. 'dsec image ls --all' shows them and 'dsec image rm' removes them; --no-cache does without.

images/ has examples; images/with-steps has steps.`,
		Example: `  dsec image build debian -f images/debian-python/recipe.yaml
  printf 'from: debian\nsteps:\n  - run: apt-get install -y jq\n' > jq.yaml
  dsec image build debian-jq -f jq.yaml`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if recipe == "" {
				return usagef("-f RECIPE is missing")
			}
			if err := madeName(args[0]); err != nil {
				return err
			}
			r, err := build.Load(recipe)
			if err != nil {
				return err
			}
			if !slices.Contains(places, steps) {
				return usagef("--steps %q: it is one of %s", steps, strings.Join(places, ", "))
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if _, err := c.Health(cmd.Context()); err != nil { // before minutes of building for nobody
				return err
			}
			var img *client.Image
			if steps == stepsHost || len(r.Steps) == 0 && r.Image() == "" {
				img, err = a.buildOnHost(cmd.Context(), args[0], r)
			} else {
				b := &stepsBuild{a: a, c: c, name: args[0], recipe: r, sf: &sf, cache: !noCache}
				img, err = b.run(cmd.Context())
			}
			if err != nil {
				return fmt.Errorf("build image %s: %w", args[0], err)
			}
			return a.imported(img, asJSON)
		},
	}
	cmd.Flags().StringVarP(&recipe, "file", "f", "", "recipe")
	cmd.Flags().StringVar(&steps, "steps", stepsSandbox, "where steps run: sandbox, or host for those that need the network")
	cmd.RegisterFlagCompletionFunc("steps", cobra.FixedCompletions(places, cobra.ShellCompDirectiveNoFileComp))
	cmd.Flags().BoolVar(&noCache, "no-cache", false, "use nothing of earlier builds and keep nothing for later ones")
	sf.flags, sf.memory, sf.pids = cmd.Flags(), 2<<30, 4096
	cmd.Flags().Var(&sf.memory, "memory", "memory limit of the steps' sandbox")
	cmd.Flags().Var(&sf.cpu, "cpu", "CPU limit of the steps' sandbox (default 1)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	cmd.MarkFlagFilename("file", "yaml", "yml")
	return cmd
}

// Where steps run.
const (
	stepsSandbox = "sandbox"
	stepsHost    = "host"
)

// recipeBase is an image of the server's catalogue, for a recipe to build upon.
func recipeBase(ctx context.Context, c *client.Client, name string) (image.Config, func(io.Writer) error, error) {
	img, err := c.Image(ctx, name)
	if err != nil {
		return image.Config{}, nil, err
	}
	config := image.Config{
		Env: img.Config.Env, Entrypoint: img.Config.Entrypoint, Cmd: img.Config.Cmd, User: img.Config.User, WorkDir: img.Config.WorkDir, Labels: img.Config.Labels,
	}
	// By digest: the name may mean another one by now.
	return config, func(w io.Writer) error { return c.Export(ctx, img.Digest, client.ExportTar, w) }, nil
}

// buildOnHost streams what the build makes into the import.
func (a *app) buildOnHost(ctx context.Context, name string, r *build.Recipe) (*client.Image, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	pr, pw := io.Pipe()
	built, out := make(chan error, 1), a.aside()
	go func() {
		err := build.Archive(ctx, r, pw, build.Options{
			Image: func(ctx context.Context, name string) (image.Config, func(io.Writer) error, error) {
				return recipeBase(ctx, c, name)
			},
			Progress: func(line string) { fmt.Fprintf(out, "build %s: %s\n", name, line) },
		})
		pw.CloseWithError(err)
		built <- err
	}()
	// The import starts with the first bytes, which come when everything is built.
	first := make([]byte, 1)
	if _, err := io.ReadFull(pr, first); err != nil {
		return nil, <-built
	}
	img, err := a.importImage(name, 0, client.ImportOptions{Format: client.FormatDockerArchive}, func(o client.ImportOptions) (*client.Image, error) {
		return c.Import(ctx, name, io.MultiReader(bytes.NewReader(first), pr), o)
	})
	if err != nil {
		cancel(err)
		pr.CloseWithError(err)
		<-built
		return nil, err
	}
	return img, <-built
}
