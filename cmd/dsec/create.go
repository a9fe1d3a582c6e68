package main

import (
	"context"
	"fmt"
	"iter"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

func (a *app) createCmd() *cobra.Command {
	var sf specFlags
	var count int
	var asJSON bool
	var key, base string
	cmd := &cobra.Command{
		Use:   "create [flags] IMAGE",
		Short: "Create sandboxes and print their ids",
		Long: `Create makes one sandbox, or --count of them, and prints each id once its guest
answers. With --json each sandbox is one line; one that could not be made is a line
{"error":…}.

A sandbox whose id cannot be printed is removed again, as nobody would know of it; not
with --idempotency-key, which finds it.`,
		Example: `  dsec create debian
  dsec create --count 100 --label job=eval7 --memory 1g debian
  dsec create --image debian --workspace repo --toolkit lint --toolkit agent
  dsec create --backend hollow`,
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeImages(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			image := base
			if len(args) == 1 && image == "" {
				image = args[0]
			} else if len(args) == 1 {
				return usagef("IMAGE and --image are two names for one thing")
			} else if image == "" && v1.Backend(sf.backend) != v1.BackendHollow {
				return usagef("IMAGE is missing; only --backend hollow needs none")
			}
			if count < 1 || count > 10000 {
				return usagef("--count %d: it must be 1 to 10000", count)
			}
			if key != "" && count > 1 {
				return usagef("--idempotency-key is for one sandbox, not with --count")
			}
			spec, err := sf.spec(image)
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if count > 1 {
				return a.createMany(cmd, c, spec, count, asJSON)
			}
			var opts []client.CreateOption
			if key != "" {
				opts = append(opts, client.IdempotencyKey(key))
			}
			sb, err := c.Create(cmd.Context(), spec, opts...)
			if err != nil {
				return err
			}
			err = a.created(sb, asJSON)
			if err != nil && key == "" {
				a.removeUnknown(cmd.Context(), sb)
			}
			return err
		},
	}
	sf.add(cmd)
	cmd.RegisterFlagCompletionFunc("label", a.completeLabels())
	a.completeSpecImages(cmd)
	cmd.Flags().StringVar(&base, "image", "", "base image: the same as IMAGE")
	cmd.RegisterFlagCompletionFunc("image", a.completeImages(-1))
	cmd.Flags().IntVar(&count, "count", 1, "how many to create")
	cmd.Flags().StringVar(&key, "idempotency-key", "", "same key within five minutes: same sandbox")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each sandbox as a line of JSON")
	return cmd
}

func (a *app) created(sb *client.Sandbox, asJSON bool) error {
	if asJSON {
		return a.jsonLine(sb.Info())
	}
	_, err := fmt.Fprintln(a.stdout, sb.ID())
	return err
}

// removeUnknown removes a sandbox whose id nobody was told.
func (a *app) removeUnknown(ctx context.Context, sb *client.Sandbox) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	if err := sb.Delete(ctx); err != nil && !alreadyGone(err) {
		a.note("sandbox %s was not removed: %v", sb.ID(), err)
	}
}

func (a *app) createMany(cmd *cobra.Command, c *client.Client, spec v1.Spec, count int, asJSON bool) error {
	return a.printMade(cmd.Context(), "create", c.CreateMany(cmd.Context(), spec, count), count, asJSON)
}

// printMade prints each of count sandboxes as it is made. The error says how many were not.
func (a *app) printMade(ctx context.Context, what string, made iter.Seq2[*client.Sandbox, error], count int, asJSON bool) error {
	bar := a.progress(what, int64(count), false)
	defer bar.end()
	var first, unprinted error
	n, good := 0, 0
	for sb, err := range made {
		n++
		bar.set(int64(n))
		if err != nil {
			if first == nil {
				first = err
			}
			if asJSON {
				if perr := a.jsonLine(v1.CreateResult{Error: v1.ProblemOf(err)}); unprinted == nil {
					unprinted = perr
				}
			}
			continue
		}
		good++
		if unprinted == nil {
			unprinted = a.created(sb, asJSON)
		}
		if unprinted != nil {
			a.removeUnknown(ctx, sb)
		}
	}
	bar.end()
	if unprinted != nil {
		return unprinted
	}
	if first == nil || n == 1 { // one result: of the one sandbox, or of the whole request
		return first
	}
	return fmt.Errorf("%d of %d sandboxes were not created; the first: %w", count-good, count, first)
}
