package main

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"dsec/client"
)

// completeTimeout bounds what a press of Tab may cost.
const completeTimeout = 2 * time.Second

type completeFunc = func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective)

// completeFrom asks the server; a server that does not answer completes nothing.
func (a *app) completeFrom(limit int, list func(ctx context.Context, c *client.Client, args []string) []cobra.Completion) completeFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if limit >= 0 && len(args) >= limit {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		c, err := a.client()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completeTimeout)
		defer cancel()
		var out []cobra.Completion
		for _, s := range list(ctx, c, args) {
			if strings.HasPrefix(s, prefix) {
				out = append(out, s)
			}
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeSandboxes completes up to limit sandbox ids (-1: any number).
func (a *app) completeSandboxes(limit int) completeFunc {
	return a.completeFrom(limit, sandboxIDs)
}

func sandboxIDs(ctx context.Context, c *client.Client, args []string) []cobra.Completion {
	l, err := c.List(ctx, client.ListOptions{})
	if err != nil {
		return nil
	}
	used := map[string]bool{}
	for _, id := range args {
		used[id] = true
	}
	var out []cobra.Completion
	for _, sb := range l.Items {
		if !used[sb.ID] {
			out = append(out, cobra.CompletionWithDesc(sb.ID, string(sb.State)+" "+sb.Spec.Image))
		}
	}
	return out
}

// completeSpecImages completes the flags of a spec that name images.
func (a *app) completeSpecImages(cmd *cobra.Command) {
	for _, f := range []string{"workspace", "toolkit"} {
		cmd.RegisterFlagCompletionFunc(f, a.completeImages(-1))
	}
}

// completeImages completes up to limit image names.
func (a *app) completeImages(limit int) completeFunc {
	return a.completeFrom(limit, func(ctx context.Context, c *client.Client, _ []string) []cobra.Completion {
		images, err := c.Images(ctx)
		if err != nil {
			return nil
		}
		var out []cobra.Completion
		for _, img := range images {
			if img.Name != "" {
				out = append(out, img.Name)
			}
		}
		return out
	})
}

// completeProcess completes a sandbox id and then one of its processes.
func (a *app) completeProcess() completeFunc {
	return a.completeFrom(2, func(ctx context.Context, c *client.Client, args []string) []cobra.Completion {
		if len(args) == 0 {
			return sandboxIDs(ctx, c, nil)
		}
		refs, err := c.Resolve(ctx, args[0])
		if err != nil || refs[0].Err != nil {
			return nil
		}
		procs, err := c.Sandbox(refs[0].ID).Processes(ctx)
		if err != nil {
			return nil
		}
		var out []cobra.Completion
		for _, p := range procs {
			name := p.Tag
			if name == "" {
				name = strconv.FormatUint(uint64(p.Pid), 10)
			}
			out = append(out, cobra.CompletionWithDesc(name, commandLine(p)))
		}
		return out
	})
}

// completeSession completes a sandbox id and then its sessions.
func (a *app) completeSession() completeFunc {
	return a.completeFrom(-1, func(ctx context.Context, c *client.Client, args []string) []cobra.Completion {
		if len(args) == 0 {
			return sandboxIDs(ctx, c, nil)
		}
		refs, err := c.Resolve(ctx, args[0])
		if err != nil || refs[0].Err != nil {
			return nil
		}
		sessions, err := c.Sandbox(refs[0].ID).Sessions(ctx)
		if err != nil {
			return nil
		}
		var out []cobra.Completion
		for _, s := range sessions {
			if !slices.Contains(args[1:], s.Id) {
				out = append(out, s.Id)
			}
		}
		return out
	})
}

// completeLabels completes KEY=VALUE from those that sandboxes have.
func (a *app) completeLabels() completeFunc {
	return a.completeFrom(-1, func(ctx context.Context, c *client.Client, _ []string) []cobra.Completion {
		l, err := c.List(ctx, client.ListOptions{})
		if err != nil {
			return nil
		}
		seen := map[string]bool{}
		for _, sb := range l.Items {
			for k, v := range sb.Spec.Labels {
				seen[k+"="+v] = true
			}
		}
		return slices.Sorted(maps.Keys(seen))
	})
}

// completeTokens completes ids of tokens.
func (a *app) completeTokens() completeFunc {
	return a.completeFrom(-1, func(ctx context.Context, c *client.Client, _ []string) []cobra.Completion {
		tokens, err := c.Tokens(ctx)
		if err != nil {
			return nil
		}
		var out []cobra.Completion
		for _, t := range tokens {
			out = append(out, cobra.CompletionWithDesc(t.ID, t.Name))
		}
		return out
	})
}

// signalNames are those that 'kill -s' takes, the ones of use first.
func signalNames() []cobra.Completion {
	names := []string{"TERM", "INT", "HUP", "KILL", "QUIT", "USR1", "USR2", "STOP", "CONT"}
	for n := syscall.Signal(1); n < 32; n++ {
		if name := strings.TrimPrefix(unix.SignalName(n), "SIG"); name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}
