package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
)

func (a *app) eventsCmd() *cobra.Command {
	var o client.EventOptions
	var labels []string
	var since sinceValue
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Print what happens to sandboxes and nodes",
		Long: `Events prints the changes that the server still knows, and with --follow those to
come, across restarts of the server, which keeps no events from before: a line on
stderr (with --json an object that has only "error") says where some are missing. A
list's revision (GET /v1/sandboxes) is a point to go on from.

TYPE is state (a sandbox was created or changed), oom (its memory limit killed processes;
it goes on), removed, or node. CAUSE says why a sandbox failed or is removed: request,
ttl (--ttl) or lease (--lease); in --json it is the sandbox's error, end_reason and
oom_kills (in all).`,
		Example: `  dsec events --follow
  dsec events --since 10m --label job=eval7
  dsec events --from 1042 --json | jq 'select(.type == "removed")'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Labels, err = keyValues("label", labels); err != nil {
				return err
			}
			o.Since = since.before(time.Now())
			c, err := a.client()
			if err != nil {
				return err
			}
			show := func(e v1.Event) error {
				if asJSON {
					return a.jsonLine(e)
				}
				_, err := io.WriteString(a.stdout, eventLine(e))
				return err
			}
			if !asJSON {
				if _, err := fmt.Fprintf(a.stdout, eventFormat, "REVISION", "TIME", "TYPE", "ID", "STATE", "CAUSE"); err != nil {
					return err
				}
			}
			for {
				err := follow(cmd.Context(), c, &o, show)
				var sig signalError
				if o.Follow && errors.As(context.Cause(cmd.Context()), &sig) {
					return nil // Ctrl-C is how it is meant to end
				}
				if !o.Follow || !errors.Is(err, errs.RevisionCompacted) {
					return err
				}
				// The server was restarted, or we were too slow: what it knows now comes again.
				if asJSON {
					if err := a.jsonLine(v1.Event{Time: time.Now().UTC(), Error: v1.ProblemOf(err)}); err != nil {
						return err
					}
				}
				a.note("some events are missing here: the server does not keep them any more")
				o.From = 0
			}
		},
	}
	f := cmd.Flags()
	f.Uint64Var(&o.From, "from", 0, "revision to go on from (default: all that is known)")
	f.Var(&since, "since", "only what happened since then: a time before now such as 10m, or a date 2026-01-02T15:04:05Z")
	f.BoolVarP(&o.Follow, "follow", "f", false, "wait for more, until Ctrl-C; also --watch")
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "watch" {
			name = "follow"
		}
		return pflag.NormalizedName(name)
	})
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

// eventFormat is a line of REVISION TIME TYPE ID STATE CAUSE. It does not wait for others
// to align with: events are printed as they come.
const eventFormat = "%-16v  %-20s  %-7s  %-22s  %-9s  %s\n"

func eventLine(e v1.Event) string {
	id, state, cause := "-", "-", "-"
	switch {
	case e.Sandbox != nil:
		id, state, cause = e.Sandbox.ID, string(e.Sandbox.State), eventCause(e)
	case e.Node != nil:
		id, state = e.Node.ID, "ready"
		if !e.Node.Ready {
			state = "not ready"
		}
		cause = fmt.Sprintf("sandboxes=%d", e.Node.Sandboxes)
	}
	return fmt.Sprintf(eventFormat, e.Revision, e.Time.UTC().Format(time.RFC3339), e.Type, id, state, printable(cause))
}

func eventCause(e v1.Event) string {
	sb := e.Sandbox
	switch {
	case e.Type == v1.EventOOM:
		text := fmt.Sprintf("memory limit %s: %s killed so far", size(sb.Spec.MemoryBytes), count(int(sb.OOMKills), "process"))
		if sb.LastOOM != nil {
			text += ", last " + victim(*sb.LastOOM)
		}
		return text
	case sb.EndReason != "":
		return string(sb.EndReason)
	case sb.Error != nil:
		return sb.Error.Error()
	case e.Type == v1.EventRemoved && sb.State == v1.StateCreating:
		return "its create did not finish"
	}
	return "-"
}
