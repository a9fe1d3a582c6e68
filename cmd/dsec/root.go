package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"dsec/client"
)

// app is what all verbs share.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	signals        *signals

	url, token, contextFile string // global flags
	conn                    *client.Client
	asJSON                  bool // the verb was given --json: stderr holds a failure's object and nothing else
}

// jsonFlag is the flag of every verb whose output a script would read.
const jsonFlag = "json"

// main runs one command line and returns the exit code.
func (a *app) main(ctx context.Context, args []string) int {
	root := a.root()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if a.conn != nil {
		a.conn.Close()
	}
	return a.report(ctx, cmd, args, err)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "dsec",
		Short: "Sandboxes for agents: create, use, inspect, remove",
		Long: `dsec runs isolated sandboxes and drives them.

'dsec up' starts a server on this machine and writes a context file, from which all
other verbs know it. DSEC_URL and DSEC_TOKEN, or --url and --token, name another one.

Environment:
  DSEC_URL          the server: http://, https:// or unix:///path
  DSEC_TOKEN        the token for it ('dsec token create', or DATA/root.token)
  XDG_CONFIG_HOME   where dsec/context.json is, which 'dsec up' writes (default ~/.config)

Flags go before the environment, and that before the context file, whose token is sent to
no other server than its own.

An ID may be cut short while it means one sandbox: write the beginning of an id, or of
its last ten characters, since the ids of a node begin alike.

Exit codes: 0 success, 1 failure, 2 wrong usage. exec and run return the command's own
code; 125 when the platform failed, 126 when the command cannot be executed, 127 when
there is no such command, 128+n after signal n.

With --json results are JSON on stdout, and a failure is one object on stderr:
{"error":{"code","class","phase","message","hint","cause","retryable","is_infra",…}}, as
the API has it. is_infra says that it is the platform's fault, not the command's.`,
		Example: `  dsec up --detach
  dsec image import debian ./debian.tar
  dsec run debian -- python3 -c 'print(6*7)'
  id=$(dsec create debian) && dsec exec $id -- make test; dsec rm $id`,
		Version:                    buildVersion(), // dsec --version, which asks no server
		SilenceErrors:              true,
		SilenceUsage:               true,
		SuggestionsMinimumDistance: 2,
		Args:                       cobra.NoArgs,
		PersistentPreRun: func(cmd *cobra.Command, _ []string) {
			if f := cmd.Flags().Lookup(jsonFlag); f != nil {
				a.asJSON = f.Value.String() == "true"
			}
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cmd.Help()
		},
	}
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SetFlagErrorFunc(flagError)
	root.SetVersionTemplate("dsec {{.Version}}\n")
	root.Flags().Bool("version", false, "print this program's version; 'dsec version' has the server's too")
	f := root.PersistentFlags()
	f.StringVar(&a.url, "url", "", "server: http://, https:// or unix:///path (default $DSEC_URL, else the context file)")
	f.StringVar(&a.token, "token", "", "token (default $DSEC_TOKEN, else the context file)")
	f.StringVar(&a.contextFile, "context", "", "context file (default $XDG_CONFIG_HOME/dsec/context.json)")
	root.AddGroup(
		&cobra.Group{ID: "sandbox", Title: "Sandboxes:"},
		&cobra.Group{ID: "inside", Title: "Inside a sandbox:"},
		&cobra.Group{ID: "manage", Title: "Images and management:"},
	)
	for id, cmds := range map[string][]*cobra.Command{
		"sandbox": {a.runCmd(), a.createCmd(), a.lsCmd(), a.inspectCmd(), a.rmCmd(), a.pauseCmd(), a.resumeCmd(), a.hintCmd(), a.forkCmd(), a.snapshotCmd(), a.topCmd(), a.statsCmd(), a.eventsCmd()},
		"inside":  {a.execCmd(), a.shellCmd(), a.psCmd(), a.attachCmd(), a.killCmd(), a.logsCmd(), a.waitCmd(), a.cpCmd(), a.sessionCmd(), a.portsCmd(), a.portForwardCmd()},
		"manage":  {a.upCmd(), a.downCmd(), a.doctorCmd(), a.imageCmd(), a.nodeCmd(), a.tokenCmd(), a.benchCmd(), a.versionCmd()},
	} {
		for _, c := range cmds {
			c.GroupID = id
			root.AddCommand(c)
		}
	}
	root.AddCommand(a.keeperCmd())
	strictArgs(root)
	return root
}

// client returns the connection to the server.
func (a *app) client() (*client.Client, error) {
	if a.conn != nil {
		return a.conn, nil
	}
	o, err := a.clientOptions()
	if err != nil {
		return nil, err
	}
	a.conn, err = client.New(o)
	return a.conn, err
}

// clientOptions come from flags, environment and context file, in this order.
func (a *app) clientOptions() (client.Options, error) {
	o, err := client.OptionsFromEnv(a.contextFile)
	if err != nil {
		return o, err
	}
	if a.url != "" {
		if !client.SameURL(a.url, o.URL) && os.Getenv("DSEC_TOKEN") == "" {
			o.Token = "" // the context's token is for the context's server
		}
		o.URL = a.url
	}
	if a.token != "" {
		o.Token = a.token
	}
	o.Agent = "dsec/" + buildVersion()
	return o, nil
}

// json prints one value, indented.
func (a *app) json(v any) error {
	enc := jsonEncoder(a.stdout)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// jsonLine prints one value on a line, for outputs that are streams.
func (a *app) jsonLine(v any) error { return jsonEncoder(a.stdout).Encode(v) }

// jsonEncoder writes & and < as they are: people read the commands and outputs in it.
func jsonEncoder(w io.Writer) *json.Encoder {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc
}

// isTerminal says whether v is a terminal; a test's buffer never is.
func isTerminal(v any) bool {
	f, ok := v.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// note says something on the side, for people.
func (a *app) note(format string, args ...any) {
	if !a.asJSON {
		fmt.Fprintf(a.stderr, "dsec: "+format+"\n", args...)
	}
}

var errNoTerminal = usagef("-it needs a terminal on stdin; -t alone gives the command one of its own, without input")
