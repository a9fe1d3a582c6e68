package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
	"dsec/client"
)

func (a *app) portsCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "ports ID", Short: "List the TCP ports on which something listens in a sandbox",
		Example: "  dsec ports $id\n  dsec ports --json $id | jq .[].port",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			ports, err := sb.Ports(cmd.Context())
			if err != nil {
				return err
			}
			type port struct {
				Port    uint32 `json:"port"`
				Address string `json:"address"`
			}
			list, rows := make([]port, len(ports)), make([][]string, len(ports))
			for i, p := range ports {
				list[i], rows[i] = port{p.Port, p.Address}, []string{strconv.FormatUint(uint64(p.Port), 10), p.Address}
			}
			if asJSON {
				return a.json(list)
			}
			return table(a.stdout, []string{"PORT", "ADDRESS"}, rows)
		},
	}
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print JSON")
	return cmd
}

func (a *app) portForwardCmd() *cobra.Command {
	var address string
	var asJSON bool
	cmd := &cobra.Command{
		Use: "port-forward ID [LOCAL:]REMOTE...", Short: "Reach ports of a sandbox from this machine",
		Long: `Port-forward listens on this machine and passes each connection on to a port of the
sandbox's loopback, until Ctrl-C or the sandbox is gone. LOCAL is the port here, by
default the same; 0, or nothing before the colon, takes any that is free. A line says
where it listens; with --json an object: local (address and port) and remote.

It listens on this machine's loopback unless --address names another address. That
nothing listens in the sandbox (yet) is said on stderr, and the connection closed.`,
		Example: `  dsec port-forward $id 8000
  dsec port-forward $id 8080:80 5432
  dsec port-forward --json $id :8000`,
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var pairs []forward
			for _, s := range args[1:] {
				p, err := parseForward(s)
				if err != nil {
					return err
				}
				pairs = append(pairs, p)
			}
			if net.ParseIP(address) == nil {
				return usagef("--address %q: write an IP address of this machine", address)
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if _, err := sb.Guest(cmd.Context()); err != nil { // rather now than with the first connection
				return err
			}
			return a.forwardAll(cmd.Context(), sb, address, pairs, asJSON)
		},
	}
	cmd.Flags().StringVar(&address, "address", "127.0.0.1", "address of this machine to listen on")
	cmd.Flags().BoolVar(&asJSON, jsonFlag, false, "print where it listens as lines of JSON")
	return cmd
}

// forward is a port here and one in the sandbox.
type forward struct{ local, remote int }

func parseForward(s string) (forward, error) {
	local, remote, both := strings.Cut(s, ":")
	if !both {
		remote = local
	}
	if both && local == "" {
		local = "0"
	}
	l, err := strconv.ParseUint(local, 10, 16)
	r, err2 := strconv.ParseUint(remote, 10, 16)
	if err != nil || err2 != nil || r == 0 {
		return forward{}, usagef("%q is not of the form LOCAL:REMOTE; write ports like 8080:80, 80, or :80", s)
	}
	return forward{int(l), int(r)}, nil
}

// forwardAll listens for all pairs, and serves them until one fails or ctx ends.
func (a *app) forwardAll(ctx context.Context, sb *client.Sandbox, address string, pairs []forward, asJSON bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var listeners []net.Listener
	defer func() {
		for _, l := range listeners {
			l.Close()
		}
	}()
	for _, p := range pairs {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(address, strconv.Itoa(p.local)))
		if err != nil {
			code := errs.BadRequest
			if errors.Is(err, unix.EADDRINUSE) {
				code = errs.AddressInUse
			}
			return errs.New(code, "port-forward", fmt.Sprintf("listen on port %d of %s", p.local, address)).Because(err).
				Advise(fmt.Sprintf("choose another port: :%d takes one that is free", p.remote))
		}
		listeners = append(listeners, l)
	}
	var mu sync.Mutex // of stderr
	for i, l := range listeners {
		var err error
		if asJSON {
			err = a.jsonLine(struct {
				Local  string `json:"local"`
				Remote int    `json:"remote"`
			}{l.Addr().String(), pairs[i].remote})
		} else {
			_, err = fmt.Fprintf(a.stdout, "%s -> %d\n", l.Addr(), pairs[i].remote)
		}
		if err != nil {
			return err
		}
	}
	o := client.ForwardOptions{Failed: func(err error) {
		mu.Lock()
		defer mu.Unlock()
		a.note("%s", brief(err))
	}}
	var wg sync.WaitGroup
	for i, l := range listeners {
		wg.Go(func() {
			if err := sb.Forward(ctx, l, pairs[i].remote, o); err != nil {
				cancel(err)
			}
		})
	}
	wg.Wait()
	var sig signalError
	if err := context.Cause(ctx); err != nil && !errors.As(err, &sig) {
		return err
	}
	return nil // Ctrl-C is how it is meant to end
}
