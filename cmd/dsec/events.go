package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
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
come, across restarts of the server. A list's revision (dsec ls over the API) is a
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
			for e, err := range c.Events(cmd.Context(), o) {
				if err != nil {
					return err
				}
				if asJSON {
					err = a.jsonLine(e)
				} else {
					_, err = fmt.Fprintln(a.stdout, eventLine(e))
				}
				if err != nil {
					return err
				}
			}
			return cmd.Context().Err()
		},
	}
	f := cmd.Flags()
	f.Uint64Var(&o.From, "from", 0, "revision to go on from (default: all that is known)")
	f.BoolVarP(&o.Follow, "follow", "f", false, "wait for more")
	f.StringArrayVarP(&labels, "label", "l", nil, "only of sandboxes with this label, KEY=VALUE (repeatable)")
	f.BoolVar(&asJSON, "json", false, "print each event as a line of JSON")
	return cmd
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
