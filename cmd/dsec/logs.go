package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
	"dsec/client"
)

func (a *app) logsCmd() *cobra.Command {
	var follow, asJSON bool
	tail := -1
	cmd := &cobra.Command{
		Use:   "logs ID [PROCESS]",
		Short: "Print the kept output of processes",
		Long: `Logs prints what is kept of a process's stdout and stderr, or of all processes, each
line then begins with the process. With --json every line of output is an object with
pid, tag, stream and text (text_base64 if it is not UTF-8).

See 'dsec ps --help' for how much is kept; what is not is told on stderr, or as a "gap".

Logs only looks: whatever becomes of it or of who reads it, the processes go on. Stdout
and stderr are kept apart, so the order within each is right, but not which line of one
came before which of the other; a command run with 2>&1 has one order.`,
		Example: `  dsec logs $id server
  dsec logs --follow --tail 20 $id server
  dsec logs -f $id
  dsec logs --json $id`,
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.completeProcess(),
		RunE: func(cmd *cobra.Command, args []string) error {
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if tail < -1 {
				return usagef("--tail must not be negative")
			}
			l := &logs{app: a, sb: sb, follow: follow, json: asJSON, tail: tail}
			if len(args) == 2 {
				info, err := findProcess(cmd, sb, selector(args[1]))
				if err != nil {
					return err
				}
				return l.one(cmd.Context(), info, "")
			}
			procs, err := sb.Processes(cmd.Context())
			if err != nil {
				return err
			}
			return l.all(cmd.Context(), procs)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for more until the processes end")
	cmd.Flags().IntVarP(&tail, "tail", "n", -1, "only the last lines of each of stdout and stderr, this many, and what follows (default all)")
	cmd.Flags().Lookup("tail").DefValue = "0" // of which nothing is said
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each line of output as a line of JSON: pid, tag, stream, text")
	return cmd
}

// logs prints kept output.
type logs struct {
	*app
	sb           *client.Sandbox
	follow, json bool
	tail         int        // lines of each stream; -1: all
	mu           sync.Mutex // one line at a time
}

// logJSON is a line of output, with its line end, or of what is no longer kept of it.
type logJSON struct {
	PID    uint32   `json:"pid"`
	Tag    string   `json:"tag,omitempty"`
	Stream string   `json:"stream"`
	Text   *string  `json:"text,omitempty"` // if it is UTF-8, else:
	Base64 []byte   `json:"text_base64,omitempty"`
	Gap    *logsGap `json:"gap,omitempty"`
}

type logsGap struct {
	From uint64 `json:"from"`
	To   uint64 `json:"to"`
}

// one prints a process's output, each line after prefix.
func (l *logs) one(ctx context.Context, info *msg.ProcessInfo, prefix string) error {
	o := client.IO{Stdout: l.stdout, Stderr: l.stderr, OnGap: l.reportGap}
	flush := func() error { return nil }
	if l.json || prefix != "" {
		out, errOut := l.lines(info, prefix, "stdout", l.stdout), l.lines(info, prefix, "stderr", l.stderr)
		o.Stdout, o.Stderr = out, errOut
		flush = func() error { return errors.Join(out.flush(), errOut.flush()) }
	}
	if l.json {
		o.OnGap = func(stderr bool, from, to uint64) {
			flush() // what came before the gap; a failure of it or of this line is the next line's, too
			l.mu.Lock()
			defer l.mu.Unlock()
			l.jsonLine(logJSON{PID: info.Pid, Tag: info.Tag, Stream: streamName(stderr), Gap: &logsGap{from, to}})
		}
	}
	at := client.AttachOptions{NoFollow: !l.follow}
	if l.tail >= 0 {
		var err error
		if at.StdoutFrom, at.StderrFrom, err = l.last(ctx, info.Pid, o); err != nil || !l.follow {
			return errors.Join(err, flush())
		}
	}
	p, err := l.sb.Attach(ctx, client.Selector{PID: info.Pid}, o, at)
	if err != nil {
		return err
	}
	_, err = p.Wait()
	return errors.Join(err, flush())
}

// last prints the last lines that are kept, and returns where they end.
func (l *logs) last(ctx context.Context, pid uint32, to client.IO) (stdout, stderr uint64, err error) {
	out, errOut := &tailBuffer{lines: l.tail}, &tailBuffer{lines: l.tail}
	p, err := l.sb.Attach(ctx, client.Selector{PID: pid}, client.IO{Stdout: out, Stderr: errOut}, client.AttachOptions{NoFollow: true})
	if err != nil {
		return 0, 0, err
	}
	if _, err = p.Wait(); err == nil {
		_, err = to.Stdout.Write(out.content())
	}
	if err == nil {
		_, err = to.Stderr.Write(errOut.content())
	}
	stdout, stderr = p.Offsets()
	return stdout, stderr, err
}

// tailBuffer keeps the last lines of what is written to it; one without its end counts.
type tailBuffer struct {
	lines int
	buf   []byte
	kept  int // what was left when it was last cut
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.buf = append(t.buf, p...)
	if len(t.buf) > 2*t.kept+maxLine {
		t.content()
		t.kept = len(t.buf)
	}
	return len(p), nil
}

// content cuts what is kept to the last lines and returns it.
func (t *tailBuffer) content() []byte {
	end := len(t.buf)
	if end > 0 && t.buf[end-1] == '\n' {
		end--
	}
	for n := 0; n < t.lines; n++ {
		if end = bytes.LastIndexByte(t.buf[:max(end, 0)], '\n'); end < 0 {
			return t.buf
		}
	}
	cut := end + 1
	if t.lines == 0 {
		cut = len(t.buf)
	}
	t.buf = t.buf[:copy(t.buf, t.buf[cut:])]
	return t.buf
}

// lines writes one stream's lines, as text or JSON.
func (l *logs) lines(info *msg.ProcessInfo, prefix, stream string, w io.Writer) *lineWriter {
	emit := func(b []byte) error {
		end := ""
		if b[len(b)-1] != '\n' {
			end = "\n"
		}
		_, err := fmt.Fprintf(w, "%s%s%s", prefix, b, end)
		return err
	}
	if l.json {
		emit = func(b []byte) error {
			j := logJSON{PID: info.Pid, Tag: info.Tag, Stream: stream}
			if utf8.Valid(b) {
				s := string(b)
				j.Text = &s
			} else {
				j.Base64 = b
			}
			return l.jsonLine(j)
		}
	}
	return &lineWriter{mu: &l.mu, emit: emit}
}

// all prints the processes one after the other, or side by side when following.
func (l *logs) all(ctx context.Context, procs []*msg.ProcessInfo) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var unwritable error // our output, which is all processes'
	var wg sync.WaitGroup
	all := make([]error, len(procs))
	gone := 0
	for i, info := range procs {
		ended := !info.Running && !l.json
		if ended && info.StdoutBytes+info.StderrBytes == 0 {
			continue
		}
		if ended && info.StdoutKeptFrom == info.StdoutBytes && info.StderrKeptFrom == info.StderrBytes {
			gone++
			continue
		}
		name := info.Tag
		if name == "" {
			name = strconv.FormatUint(uint64(info.Pid), 10)
		}
		one := func() {
			all[i] = l.one(ctx, info, name+" | ")
			if errors.Is(all[i], client.ErrWriter) {
				l.mu.Lock()
				defer l.mu.Unlock()
				if unwritable == nil {
					unwritable = all[i]
				}
				cancel() // the others would learn of it with their next line only
			}
		}
		if l.follow && info.Running {
			wg.Go(one)
		} else {
			one()
		}
	}
	wg.Wait()
	if gone > 0 {
		l.note("the output of %d more processes is no longer kept; 'dsec ps' tells how they ended", gone)
	}
	if unwritable != nil {
		return unwritable
	}
	return errors.Join(all...)
}

// maxLine bounds what a lineWriter holds back.
const maxLine = 64 << 10

// lineWriter passes on whole lines.
type lineWriter struct {
	mu   *sync.Mutex // held during emit
	emit func(line []byte) error
	buf  []byte
}

func (l *lineWriter) Write(p []byte) (int, error) {
	l.buf = append(l.buf, p...)
	for {
		i := bytes.IndexByte(l.buf, '\n')
		if i < 0 && len(l.buf) < maxLine {
			return len(p), nil
		}
		if i < 0 {
			i = max(len(withoutBrokenEnd(l.buf)), 1) - 1
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
	return l.emit(b)
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
