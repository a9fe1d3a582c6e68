package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"dsec/client"
	"dsec/internal/image"
	"dsec/internal/image/build"
)

func (a *app) imageBuildCmd() *cobra.Command {
	var file, tmp string
	var asJSON, quiet bool
	cmd := &cobra.Command{
		Use:   "build NAME -f RECIPE",
		Short: "Build an image from a recipe on this machine and import it",
		Long: `Build makes a root file system from a recipe (a YAML file: Debian packages, busybox or
nothing to start from; files to copy; commands to run) and imports it. It runs here,
as root, with the tools that the recipe needs, whichever server it then imports into.`,
		Example: `  dsec image build debian -f images/debian-python/recipe.yaml
  dsec image build tiny -f images/busybox/recipe.yaml --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if file == "" {
				return usagef("name the recipe with -f")
			}
			recipe, err := build.Load(file)
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			// Before minutes of building: is there a server to take it?
			if _, err := c.Images(cmd.Context()); err != nil {
				return err
			}
			img, err := a.buildImage(cmd.Context(), c, args[0], recipe, tmp, quiet)
			if err != nil {
				return err
			}
			return a.imported(img, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&file, "file", "f", "", "the recipe")
	f.StringVar(&tmp, "temp", "", "directory to build in (default the system's)")
	f.BoolVarP(&quiet, "quiet", "q", false, "do not print what the build's tools say")
	f.BoolVar(&asJSON, "json", false, "print the image as JSON")
	return cmd
}

func (a *app) buildImage(ctx context.Context, c *client.Client, name string, recipe *build.Recipe, tmp string, quiet bool) (*client.Image, error) {
	layer, err := os.CreateTemp(tmp, "dsec-layer-")
	if err != nil {
		return nil, fmt.Errorf("build %s: %w", name, err)
	}
	defer layer.Close()
	os.Remove(layer.Name()) // whatever happens, it ends with us
	tell := func(line string) { fmt.Fprintln(a.stderr, line) }
	if quiet {
		tell = nil
	}
	sum := sha256.New()
	if err := build.Build(ctx, recipe, io.MultiWriter(layer, sum), build.Options{TempDir: tmp, Progress: tell}); err != nil {
		return nil, fmt.Errorf("build %s: %w", name, err)
	}
	size, err := layer.Seek(0, io.SeekEnd)
	if err == nil {
		_, err = layer.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, fmt.Errorf("build %s: %w", name, err)
	}
	pr, pw := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		pw.CloseWithError(writeArchive(pw, recipe.Config(), layer, size, sum.Sum(nil)))
	}()
	img, err := a.importImage(name, size, client.ImportOptions{Format: client.FormatDockerArchive}, func(o client.ImportOptions) (*client.Image, error) {
		return c.Import(ctx, name, pr, o)
	})
	pr.CloseWithError(errors.New("import ended"))
	<-done
	return img, err
}

// writeArchive wraps a root file system as a docker-archive: a plain tar could not say
// how to run what it holds.
func writeArchive(w io.Writer, cfg image.Config, layer io.Reader, size int64, sum []byte) error {
	volumes := map[string]struct{}{}
	for _, v := range cfg.Volumes {
		volumes[v] = struct{}{}
	}
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{
			"Env": cfg.Env, "Entrypoint": cfg.Entrypoint, "Cmd": cfg.Cmd, "User": cfg.User, "WorkingDir": cfg.WorkDir,
			"Labels": cfg.Labels, "Volumes": volumes,
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(sum)}},
	})
	if err != nil {
		return err
	}
	digest := sha256.Sum256(config)
	name := hex.EncodeToString(digest[:]) + ".json"
	manifest, err := json.Marshal([]map[string]any{{"Config": name, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	tw := tar.NewWriter(w)
	for _, f := range []struct {
		name string
		size int64
		r    io.Reader
	}{
		{"manifest.json", int64(len(manifest)), bytes.NewReader(manifest)},
		{name, int64(len(config)), bytes.NewReader(config)},
		{"layer.tar", size, layer},
	} {
		if err := tw.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: f.size, Format: tar.FormatPAX}); err != nil {
			return err
		}
		if _, err := io.Copy(tw, f.r); err != nil {
			return err
		}
	}
	return tw.Close()
}
