package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"

	"github.com/spf13/cobra"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
	"dsec/client"
)

func (a *app) logsCmd() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs ID [PROCESS]",
		Short: "Print the kept output of processes",
		Long: `Logs prints what is kept of a process's stdout and stderr, or of all processes, each
line then begins with the process.`,
		Example:           "  dsec logs $id server\n  dsec logs -f $id",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.completeProcess(),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			sb := c.Sandbox(args[0])
			if len(args) == 2 {
				info, err := findProcess(cmd, sb, selector(args[1]))
				if err != nil {
					return err
				}
				return a.logOne(cmd, sb, info, follow, a.stdout, a.stderr)
			}
			procs, err := sb.Processes(cmd.Context())
			if err != nil {
				return err
			}
			return a.logAll(cmd, sb, procs, follow)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for more until the processes end")
	return cmd
}

func (a *app) logOne(cmd *cobra.Command, sb *client.Sandbox, info *msg.ProcessInfo, follow bool, stdout, stderr io.Writer) error {
	p, err := sb.Attach(cmd.Context(), client.Selector{PID: info.Pid},
		client.IO{Stdout: stdout, Stderr: stderr, OnGap: a.reportGap}, client.AttachOptions{NoFollow: !follow})
	if err != nil {
		return err
	}
	_, err = p.Wait()
	return err
}

// logAll prints the processes one after the other, or side by side when following.
func (a *app) logAll(cmd *cobra.Command, sb *client.Sandbox, procs []*msg.ProcessInfo, follow bool) error {
	var mu sync.Mutex // one line at a time
	var wg sync.WaitGroup
	all := make([]error, len(procs))
	for i, info := range procs {
		name := info.Tag
		if name == "" {
			name = strconv.FormatUint(uint64(info.Pid), 10)
		}
		out := &lineWriter{w: a.stdout, mu: &mu, prefix: name + " | "}
		errOut := &lineWriter{w: a.stderr, mu: &mu, prefix: name + " | "}
		one := func() {
			all[i] = errors.Join(a.logOne(cmd, sb, info, follow, out, errOut), out.flush(), errOut.flush())
		}
		if follow {
			wg.Go(one)
		} else {
			one()
		}
	}
	wg.Wait()
	return errors.Join(all...)
}

// maxLine bounds what a lineWriter holds back.
const maxLine = 64 << 10

// lineWriter writes whole lines, each with a prefix.
type lineWriter struct {
	w      io.Writer
	mu     *sync.Mutex
	prefix string
	buf    []byte
}

func (l *lineWriter) Write(p []byte) (int, error) {
	l.buf = append(l.buf, p...)
	for {
		i := bytes.IndexByte(l.buf, '\n')
		if i < 0 && len(l.buf) < maxLine {
			return len(p), nil
		}
		if i < 0 {
			i = len(l.buf) - 1
		}
		if err := l.line(l.buf[:i+1]); err != nil {
			return 0, err
		}
		l.buf = l.buf[:copy(l.buf, l.buf[i+1:])]
	}
}

func (l *lineWriter) line(b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	end := ""
	if b[len(b)-1] != '\n' {
		end = "\n"
	}
	_, err := fmt.Fprintf(l.w, "%s%s%s", l.prefix, b, end)
	return err
}

func (l *lineWriter) flush() error {
	if len(l.buf) == 0 {
		return nil
	}
	b := l.buf
	l.buf = nil
	return l.line(b)
}

func notFound(sb *client.Sandbox, sel client.Selector) error {
	e := errs.New(errs.ProcessNotFound, "process.find", "sandbox "+sb.ID()+" has no process "+sel.String())
	e.Sandbox = sb.ID()
	return e
}
