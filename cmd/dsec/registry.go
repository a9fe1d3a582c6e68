package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/internal/image/registry"
)

// registryFlags say how to get to a registry, and as whom.
type registryFlags struct {
	req           v1.RegistryRequest
	passwordStdin bool
	tokenStdin    bool
	config        string
}

const registryHelp = `

The node talks to the registry, with the credentials of Docker's configuration file
($DOCKER_CONFIG/config.json, or ~/.docker/config.json) unless flags give others. Credential
helpers are not run. Registries on the node's own loopback addresses may be plain HTTP.`

func (r *registryFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&r.req.Username, "username", "", "user name at the registry, with --password-stdin")
	f.BoolVar(&r.passwordStdin, "password-stdin", false, "read the password from stdin")
	f.BoolVar(&r.tokenStdin, "token-stdin", false, "read a bearer token from stdin, instead of user name and password")
	f.StringVar(&r.config, "auth-file", "", "file of credentials as Docker writes it (default Docker's own, if it is there)")
	f.BoolVar(&r.req.PlainHTTP, "plain-http", false, "talk HTTP instead of HTTPS: credentials go in plain text")
	f.BoolVar(&r.req.SkipVerify, "skip-verify", false, "do not check the registry's certificate")
	cmd.MarkFlagFilename("auth-file", "json")
}

// request is complete with what stdin and the file of credentials have.
func (r *registryFlags) request(stdin io.Reader, ref string) (v1.RegistryRequest, error) {
	req := r.req
	req.Ref = ref
	if r.passwordStdin && r.tokenStdin {
		return req, usagef("stdin is either --password-stdin or --token-stdin")
	}
	if r.passwordStdin != (req.Username != "") {
		return req, usagef("--username and --password-stdin go together")
	}
	if r.config != "" && (r.passwordStdin || r.tokenStdin) {
		return req, usagef("--auth-file and credentials on stdin are two ways to say one thing")
	}
	if r.passwordStdin || r.tokenStdin {
		secret, err := io.ReadAll(io.LimitReader(stdin, 64<<10))
		if err != nil {
			return req, fmt.Errorf("read stdin: %w", err)
		}
		text := strings.TrimRight(string(secret), "\r\n")
		if r.tokenStdin {
			req.Token = text
		} else {
			req.Password = text
		}
		return req, nil
	}
	file := r.config
	if file == "" {
		if file = dockerConfig(); file == "" {
			return req, nil
		}
	}
	auth, err := registry.Auth{ConfigFile: file}.For(ref)
	req.Username, req.Password, req.Token, req.Identity = auth.Username, auth.Password, auth.Token, auth.IdentityToken
	return req, err
}

// dockerConfig is Docker's file of credentials, if it is there.
func dockerConfig() string {
	dir := os.Getenv("DOCKER_CONFIG")
	if dir == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return ""
		}
		dir = filepath.Join(home, ".docker")
	}
	file := filepath.Join(dir, "config.json")
	if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return file
}

func (a *app) imagePullCmd() *cobra.Command {
	var r registryFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use: "pull REF [NAME]", Short: "Make an image of one in a registry",
		Long:    "Pulls an image from any OCI registry into the catalogue, as NAME or by default as REF." + registryHelp,
		Example: "  dsec image pull python:3.13\n  dsec image pull --platform linux/arm64 ghcr.io/team/tool:2 tool",
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := r.request(a.stdin, args[0])
			if err != nil {
				return err
			}
			if len(args) > 1 {
				req.Name = args[1]
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			bar := a.progress("pull "+args[0], 0, true)
			defer bar.end()
			img, err := c.Pull(cmd.Context(), req, func(p v1.ImageProgress) { bar.step(p.Phase, p.Done, p.Total) })
			bar.end()
			if err != nil {
				return err
			}
			return a.imported(img, asJSON)
		},
	}
	r.add(cmd)
	cmd.Flags().StringVar(&r.req.Platform, "platform", "", "os/arch or os/arch/variant, where there are several (default the node's)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	return cmd
}

func (a *app) imagePushCmd() *cobra.Command {
	var r registryFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use: "push NAME REF", Short: "Send an image or snapshot to a registry",
		Long:    "Pushes an image as REF. It has one layer there; what the registry has already is not sent again." + registryHelp,
		Example: "  dsec image push debian registry.example/team/debian:12\n  dsec image push snap:with-deps registry.example/team/env:7",
		Args:    cobra.ExactArgs(2), ValidArgsFunction: a.completeImages(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := r.request(a.stdin, args[1])
			if err != nil {
				return err
			}
			req.Name = args[0]
			c, err := a.client()
			if err != nil {
				return err
			}
			bar := a.progress("push "+args[0], 0, true)
			defer bar.end()
			pushed, err := c.Push(cmd.Context(), req, func(p v1.ImageProgress) { bar.step(p.Phase, p.Done, p.Total) })
			bar.end()
			if err != nil {
				return err
			}
			if asJSON {
				return a.json(pushed)
			}
			_, err = fmt.Fprintf(a.stdout, "%s %s (%s, %s sent)\n", pushed.Ref, pushed.Digest, size(pushed.Bytes), size(pushed.SentBytes))
			return err
		},
	}
	r.add(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print what was pushed as JSON")
	return cmd
}

func (a *app) snapshotExportCmd() *cobra.Command {
	return &cobra.Command{
		Use: "export NAME FILE", Short: "Write a snapshot with all its layers, for another cluster",
		Long: `Writes a snapshot and all the layers it needs as one archive, for 'dsec snapshot import' here or
elsewhere. FILE may be - for stdout. For other tools use 'dsec image export snap:NAME'.`,
		Example: "  dsec snapshot export with-deps with-deps.tar\n  dsec snapshot export with-deps - | zstd > with-deps.tar.zst",
		Args:    cobra.ExactArgs(2), ValidArgsFunction: a.completeSnapshots(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.export(cmd.Context(), v1.SnapshotPrefix+strings.TrimPrefix(args[0], v1.SnapshotPrefix), client.ExportSnapshot, args[1])
		},
	}
}

func (a *app) snapshotImportCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "import FILE [NAME]", Short: "Make a snapshot of what 'snapshot export' wrote",
		Long: `Imports a snapshot's archive, verified to the last byte, as NAME or by default under the name that it had.
FILE may be - for stdin. The images it was made on need not be here.`,
		Example: "  dsec snapshot import with-deps.tar\n  ssh other dsec snapshot export with-deps - | dsec snapshot import -",
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			name, in, total := "", a.stdin, int64(0)
			if len(args) > 1 {
				name = args[1]
			}
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return errs.Wrap(errs.LocalFile, "snapshot.import", "read the archive", err)
				}
				defer f.Close()
				if fi, err := f.Stat(); err == nil {
					total = fi.Size()
				}
				in = f
			}
			img, err := a.importImage(orElse(name, args[0]), total, client.ImportOptions{}, func(o client.ImportOptions) (*client.Image, error) {
				return c.ImportSnapshot(cmd.Context(), name, in, o)
			})
			if err != nil {
				return err
			}
			return a.snapshotMade(img, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the snapshot as JSON")
	return cmd
}
