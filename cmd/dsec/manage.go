package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
)

func (a *app) nodeCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "node", Short: "Look at the machines", Example: "  dsec node ls\n  dsec node ls --json", Args: cobra.NoArgs, RunE: needVerb}
	var asJSON bool
	ls := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the nodes with their load",
		Long: `Ls lists the nodes with their load. CPU and MEMORY are what running sandboxes may have, of what the node
gives in all; paused ones count for SANDBOXES alone. SWAP is where paused sandboxes' memory goes. PRESSURE is
what the node does as it is short of memory: admission takes no new sandboxes, pause pauses be ones, evict
removes some.`,
		Example: "  dsec node ls\n  dsec node ls --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			nodes, err := c.Nodes(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return a.json(nodes)
			}
			rows := make([][]string, len(nodes))
			for i, n := range nodes {
				var backends []string
				for _, b := range n.Backends {
					backends = append(backends, string(b))
				}
				rows[i] = []string{
					n.ID, n.Hostname, fmt.Sprint(n.Ready), strings.Join(backends, ","), fmt.Sprintf("%d/%d", n.Sandboxes, n.Capacity.Slots), fmt.Sprint(n.Paused),
					fmt.Sprintf("%g/%g", float64(n.Allocated.CPUMillis)/1000, float64(n.Capacity.CPUMillis)/1000),
					size(n.Allocated.MemoryBytes) + "/" + size(n.Capacity.MemoryBytes), largest(n.Largest), size(n.FreeMemory), swapOf(n.Swap), orDash(n.Pressure), size(n.FreeDisk), n.Version, age(n.StartedAt, time.Now()),
				}
			}
			return table(a.stdout, []string{"ID", "HOST", "READY", "BACKENDS", "SANDBOXES", "PAUSED", "CPU", "MEMORY", "LARGEST", "FREE MEM", "SWAP", "PRESSURE", "FREE DISK", "VERSION", "UP"}, rows)
		},
	}
	ls.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.AddCommand(ls)
	return cmd
}

// swapOf is how much of a node's swap is used.
func swapOf(s v1.Swap) string {
	if s.TotalBytes == 0 {
		return "none"
	}
	return size(s.UsedBytes) + "/" + size(s.TotalBytes)
}

// largest is what one sandbox may have.
func largest(r v1.Resources) string {
	if r.CPUMillis == 0 || r.MemoryBytes == 0 {
		return "-"
	}
	return fmt.Sprintf("%g, %s", float64(r.CPUMillis)/1000, size(r.MemoryBytes))
}

func (a *app) tokenCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "token", Short: "Make and revoke tokens", Example: "  dsec token create ci --right sandbox --ttl 24h\n  dsec token ls\n  dsec token rm ci", Args: cobra.NoArgs, RunE: needVerb}
	var asJSON bool
	rm := &cobra.Command{
		Use: "rm ID|NAME...", Aliases: []string{"delete"}, Short: "Revoke tokens, by id or by a name that one token has",
		Example: "  dsec token rm 9b0204e60a2506f0\n  dsec token rm ci", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeTokens(),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.removeNamed(args, "id", asJSON, func(id string) error { return deleteToken(cmd.Context(), c, id) })
		},
	}
	rm.Flags().BoolVar(&asJSON, "json", false, "print each outcome as a line of JSON")
	cmd.AddCommand(a.tokenCreateCmd(), a.tokenLsCmd(), rm)
	return cmd
}

// deleteToken deletes by id, or by the name of one token.
func deleteToken(ctx context.Context, c *client.Client, id string) error {
	err := c.DeleteToken(ctx, id)
	if !errors.Is(err, errs.TokenNotFound) {
		return err
	}
	tokens, lerr := c.Tokens(ctx)
	if lerr != nil {
		return err
	}
	var found []string
	for _, t := range tokens {
		if t.Name == id {
			found = append(found, t.ID)
		}
	}
	switch len(found) {
	case 0:
		return err
	case 1:
		return c.DeleteToken(ctx, found[0])
	}
	return usagef("%d tokens are named %s: name one by its id, of %s", len(found), id, strings.Join(found, ", "))
}

func (a *app) tokenCreateCmd() *cobra.Command {
	var rights []string
	var ttl time.Duration
	var asJSON bool
	create := &cobra.Command{
		Use: "create NAME", Short: "Make a token and print its secret, once",
		Example: "  dsec token create ci --right sandbox --right read --ttl 24h\n  DSEC_TOKEN=$(dsec token create --right read viewer) dsec ls",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := v1.TokenRequest{Name: args[0], TTL: v1.Seconds(ttl.Seconds())}
			for _, r := range rights {
				switch v1.Right(r) {
				case v1.RightRead, v1.RightSandbox, v1.RightImage, v1.RightAdmin:
					req.Rights = append(req.Rights, v1.Right(r))
				default:
					return usagef("--right %q: it is one of read, sandbox, image, admin", r)
				}
			}
			if len(req.Rights) == 0 {
				return usagef("give the token at least one --right: read, sandbox, image, admin")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			t, err := c.CreateToken(cmd.Context(), req)
			if err != nil {
				return err
			}
			if asJSON {
				return a.json(t)
			}
			_, err = fmt.Fprintln(a.stdout, t.Secret)
			return err
		},
	}
	create.Flags().StringSliceVar(&rights, "right", nil, "what it may do: read, sandbox, image, admin (repeatable)")
	create.Flags().Var(newDuration(&ttl), "ttl", "until when it holds, such as 24h (default: until revoked)")
	create.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	create.RegisterFlagCompletionFunc("right", cobra.FixedCompletions([]string{"read", "sandbox", "image", "admin"}, cobra.ShellCompDirectiveNoFileComp))
	return create
}

func (a *app) tokenLsCmd() *cobra.Command {
	var asJSON bool
	ls := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List tokens, without their secrets", Example: "  dsec token ls\n  dsec token ls --json | jq -r .[].name", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			tokens, err := c.Tokens(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return a.json(tokens)
			}
			rows := make([][]string, len(tokens))
			for i, t := range tokens {
				var rights []string
				for _, r := range t.Rights {
					rights = append(rights, string(r))
				}
				expires := "-"
				if t.ExpiresAt != nil {
					expires = t.ExpiresAt.UTC().Format(time.RFC3339)
				}
				rows[i] = []string{t.ID, t.Name, t.Project, strings.Join(rights, ","), age(t.CreatedAt, time.Now()), expires}
			}
			return table(a.stdout, []string{"ID", "NAME", "PROJECT", "RIGHTS", "AGE", "EXPIRES"}, rows)
		},
	}
	ls.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return ls
}

func (a *app) versionCmd() *cobra.Command {
	var asJSON, local bool
	cmd := &cobra.Command{
		Use: "version", Short: "Print the versions of this program and of the server",
		Example: "  dsec version\n  dsec version --client --json", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := struct {
				Client string `json:"client"`
				Go     string `json:"go"`
				Server string `json:"server,omitempty"`
				URL    string `json:"url,omitempty"`
			}{Client: buildVersion(), Go: runtime.Version()}
			if !local {
				c, err := a.client()
				if err != nil {
					return err
				}
				h, err := c.Health(cmd.Context())
				if err != nil {
					return err
				}
				out.Server, out.URL = h.Version, c.URL()
			}
			if asJSON {
				return a.json(out)
			}
			rows := [][]string{{"client", out.Client}, {"go", out.Go}}
			if !local {
				rows = append(rows, []string{"server", out.Server + " at " + out.URL})
			}
			return table(a.stdout, nil, rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&local, "client", false, "only this program's: ask no server")
	return cmd
}

// version is set by the linker (-X main.version=...), for releases.
var version string

// buildVersion is version, or else what the toolchain recorded: the module's version or the commit.
func buildVersion() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	recorded, dirty := info.Main.Version, ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision" && (recorded == "" || recorded == "(devel)"):
			recorded = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "+changes"
		}
	}
	if recorded == "" {
		recorded = "unknown"
	}
	if strings.HasSuffix(recorded, "+dirty") {
		dirty = ""
	}
	return recorded + dirty
}

// needVerb is what a group does when it is called without one.
func needVerb(cmd *cobra.Command, _ []string) error {
	var names []string
	for _, c := range cmd.Commands() {
		names = append(names, c.Name())
	}
	return usagef("say what to do: %s %s", cmd.CommandPath(), strings.Join(names, "|"))
}
