package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
)

func (a *app) eventsCmd() *cobra.Command {
	var o client.EventOptions
	var labels []string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Print what happens to sandboxes and nodes",
		Long: `Events prints the changes that the server still knows, and with --follow those to
come, across restarts of the server, which keeps no events from before: a line on
stderr says where some are missing. A list's revision (dsec ls over the API) is a
point to go on from.`,
		Example: `  dsec events --follow
  dsec events --from 1042 --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Labels, err = keyValues("label", labels); err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			show := func(e v1.Event) error {
				if asJSON {
					return a.jsonLine(e)
				}
				_, err := fmt.Fprintln(a.stdout, eventLine(e))
				return err
			}
			for {
				err := follow(cmd.Context(), c, &o, show)
				if !o.Follow || !errors.Is(err, errs.RevisionCompacted) {
					return err
				}
				// The server was restarted, or we were too slow: what it knows now comes again.
				fmt.Fprintln(a.stderr, "dsec: some events are missing here: the server does not keep them any more")
				o.From = 0
			}
		},
	}
	f := cmd.Flags()
	f.Uint64Var(&o.From, "from", 0, "revision to go on from (default: all that is known)")
	f.BoolVarP(&o.Follow, "follow", "f", false, "wait for more")
	f.StringArrayVarP(&labels, "label", "l", nil, "only of sandboxes with this label, KEY=VALUE (repeatable)")
	cmd.RegisterFlagCompletionFunc("label", a.completeLabels())
	f.BoolVar(&asJSON, "json", false, "print each event as a line of JSON")
	return cmd
}

// follow shows events until they end, and notes how far it came.
func follow(ctx context.Context, c *client.Client, o *client.EventOptions, show func(v1.Event) error) error {
	for e, err := range c.Events(ctx, *o) {
		if err != nil {
			return err
		}
		if err := show(e); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func eventLine(e v1.Event) string {
	line := fmt.Sprintf("%-8d %s  %-8s", e.Revision, e.Time.UTC().Format(time.RFC3339), e.Type)
	switch {
	case e.Sandbox != nil:
		line += fmt.Sprintf(" %s  %s", e.Sandbox.ID, e.Sandbox.State)
		if e.Sandbox.Error != nil {
			line += "  " + e.Sandbox.Error.Error()
		}
	case e.Node != nil:
		line += fmt.Sprintf(" node %s  ready=%t  sandboxes=%d", e.Node.ID, e.Node.Ready, e.Node.Sandboxes)
	}
	return line
}
