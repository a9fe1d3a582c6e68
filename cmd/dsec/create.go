package main

import (
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

func (a *app) createCmd() *cobra.Command {
	var sf specFlags
	var count int
	var asJSON bool
	var key, base string
	var secrets secretFlags
	cmd := &cobra.Command{
		Use:   "create [flags] IMAGE",
		Short: "Create sandboxes and print their ids",
		Long: `Create makes one sandbox, or --count of them, and prints each id once its guest
answers. With --json each sandbox is one line; one that could not be made is a line
{"error":…}.

A sandbox whose id cannot be printed is removed again, as nobody would know of it; not
with --idempotency-key, which finds it. After Ctrl-C no more are made than those that
are printed.`,
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
			env, err := secrets.values()
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			opts := []client.CreateOption{client.SecretEnv(env)}
			if count > 1 {
				return a.createMany(cmd, c, spec, opts, count, asJSON)
			}
			if key != "" {
				opts = append(opts, client.IdempotencyKey(key))
			}
			ctx, cancel := afterGrace(cmd.Context(), createGrace)
			defer cancel()
			sb, err := c.Create(ctx, spec, opts...)
			if err != nil {
				return err
			}
			if err = context.Cause(cmd.Context()); err == nil {
				err = a.created(sb, asJSON)
			}
			if err != nil && key == "" {
				a.removeUnknown(ctx, sb)
			}
			return err
		},
	}
	sf.add(cmd)
	secrets.add(cmd)
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
		a.note("sandbox %s was not removed: %s", sb.ID(), brief(err))
	}
}

// createGrace is how long an answer that is on its way is waited for after a signal, since
// what it tells of exists.
const createGrace = 5 * time.Second

// createChunk is how many sandboxes createMany asks for at once.
const createChunk = 128

// createMany asks for some at a time: what a request has made when it is broken off may
// have been told by the server and not have come here, so that nobody would know of it. A
// signal ends it after the answer that is on its way.
func (a *app) createMany(cmd *cobra.Command, c *client.Client, spec v1.Spec, opts []client.CreateOption, count int, asJSON bool) error {
	bar := a.progress("create", int64(count), false)
	defer bar.end()
	ctx, cancel := afterGrace(cmd.Context(), createGrace)
	defer cancel()
	m := many{app: a, asJSON: asJSON}
	for asked := 0; asked < count && cmd.Context().Err() == nil && m.unprinted == nil; asked += createChunk {
		n := min(createChunk, count-asked)
		for sb, err := range c.CreateMany(ctx, spec, n, opts...) {
			m.take(ctx, sb, err)
			bar.set(int64(m.made + m.failed))
		}
		if m.made+m.failed < asked+n {
			break // the request itself failed
		}
	}
	bar.end()
	return m.end(cmd.Context(), count)
}

// printMade prints each of count sandboxes as it is made. The error says how many were not.
func (a *app) printMade(ctx context.Context, what string, made iter.Seq2[*client.Sandbox, error], count int, asJSON bool) error {
	bar := a.progress(what, int64(count), false)
	defer bar.end()
	m := many{app: a, asJSON: asJSON}
	for sb, err := range made {
		m.take(ctx, sb, err)
		bar.set(int64(m.made + m.failed))
	}
	bar.end()
	return m.end(ctx, count)
}

// many is what has come of creating many.
type many struct {
	*app
	asJSON           bool
	made, failed     int
	first, unprinted error // the first failure; the first that could not be printed
}

func (m *many) take(ctx context.Context, sb *client.Sandbox, err error) {
	if err != nil {
		m.failed++
		if m.first == nil {
			m.first = err
		}
		if m.asJSON && m.unprinted == nil {
			m.unprinted = m.jsonLine(v1.CreateResult{Error: v1.ProblemOf(err)})
		}
		return
	}
	m.made++
	if m.unprinted == nil {
		m.unprinted = m.created(sb, m.asJSON)
	}
	if m.unprinted != nil {
		m.removeUnknown(ctx, sb)
	}
}

// end is the error of what was to be count sandboxes, of which ctx may have kept some from
// being asked for.
func (m *many) end(ctx context.Context, count int) error {
	switch {
	case m.unprinted != nil:
		return m.unprinted
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case m.failed == 1 && m.made == 0: // of the one sandbox, or of the whole request
		return m.first
	case m.failed > 0:
		return fmt.Errorf("%d of %d sandboxes were not created; the first: %w", count-m.made, count, m.first)
	}
	return nil
}

// afterGrace returns a context that ends some time after ctx does.
func afterGrace(ctx context.Context, grace time.Duration) (context.Context, context.CancelFunc) {
	late, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-timer.C:
			cancel(context.Cause(ctx))
		case <-late.Done():
		}
	})
	return late, func() {
		stop()
		cancel(nil)
	}
}
