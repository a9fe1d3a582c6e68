package main

import (
	"context"
	"slices"
	"unicode/utf8"

	v1 "dsec/api/v1"
	"dsec/client"
)

// defaultMaxOutput is what --json keeps of each of stdout and stderr.
const defaultMaxOutput = 16 << 20

// resultJSON is what exec --json and run --json print.
type resultJSON struct {
	Sandbox      string      `json:"sandbox,omitempty"`
	PID          uint32      `json:"pid,omitempty"`
	ExitCode     int         `json:"exit_code"` // ours too
	Signal       int         `json:"signal"`    // 0: none
	TimedOut     bool        `json:"timed_out"`
	IdleTimedOut bool        `json:"idle_timed_out"`
	OOMKilled    bool        `json:"oom_killed"`       // by the sandbox's memory limit
	OOMKills     int         `json:"oom_kills"`        // processes that the limit killed meanwhile
	Stdout       *string     `json:"stdout,omitempty"` // if it is UTF-8, else:
	StdoutBase64 []byte      `json:"stdout_base64,omitempty"`
	Stderr       *string     `json:"stderr,omitempty"`
	StderrBase64 []byte      `json:"stderr_base64,omitempty"`
	StdoutBytes  uint64      `json:"stdout_bytes"` // written in all, kept or not
	StderrBytes  uint64      `json:"stderr_bytes"`
	Truncated    bool        `json:"truncated"` // the middle of stdout or stderr is missing
	DurationMS   float64     `json:"duration_ms"`
	Error        *v1.Problem `json:"error,omitempty"` // of the platform, or why there was no command
}

// result collects a command's outcome instead of passing it on as it comes.
type result struct {
	sandbox     string
	pid         uint32
	out, errOut capture
	lost        bool
	exit        client.Exit
}

func newResult(limit bytesValue) *result {
	return &result{out: capture{limit: int(limit)}, errOut: capture{limit: int(limit)}}
}

// printResult prints r, if there is one, as the outcome err, and returns err.
func (a *app) printResult(ctx context.Context, r *result, err error) error {
	if r == nil {
		return err
	}
	if perr := a.jsonLine(r.json(ctx, err)); perr != nil {
		return perr
	}
	return err
}

// json is r as the outcome err.
func (r *result) json(ctx context.Context, err error) resultJSON {
	x := r.exit
	j := resultJSON{
		Sandbox: r.sandbox, PID: r.pid, ExitCode: exitCode(ctx, err), Signal: x.Signal, TimedOut: x.TimedOut, IdleTimedOut: x.IdleTimedOut,
		OOMKilled: x.OOMKilled, OOMKills: x.OOMKills,
		StdoutBytes: max(x.StdoutBytes, r.out.total), StderrBytes: max(x.StderrBytes, r.errOut.total),
		Truncated:  r.lost || r.out.cut() || r.errOut.cut(),
		DurationMS: float64(x.Duration.Microseconds()) / 1000,
	}
	j.Stdout, j.StdoutBase64 = r.out.content()
	j.Stderr, j.StderrBase64 = r.errOut.content()
	if x.Err != nil {
		j.Error = v1.ProblemOf(x.Err)
	} else if cause := causeOf(err); cause != nil {
		j.Error = v1.ProblemOf(cause)
	}
	return j
}

// capture keeps the begin and the end of what is written to it.
type capture struct {
	limit      int
	total      uint64
	head, tail []byte
	next       int // in tail, once it is full: where its oldest byte is
}

func (c *capture) Write(p []byte) (int, error) {
	n := len(p)
	c.total += uint64(n)
	if room := c.limit - c.limit/2 - len(c.head); room > 0 {
		k := min(room, len(p))
		c.head, p = append(c.head, p[:k]...), p[k:]
	}
	if half := c.limit / 2; len(p) > half {
		p = p[len(p)-half:]
	}
	if room := c.limit/2 - len(c.tail); room > 0 {
		k := min(room, len(p))
		c.tail, p = append(c.tail, p[:k]...), p[k:]
	}
	for len(p) > 0 {
		k := copy(c.tail[c.next:], p)
		c.next, p = (c.next+k)%len(c.tail), p[k:]
	}
	return n, nil
}

func (c *capture) cut() bool { return c.total > uint64(c.limit) }

// content is what was kept: as text if it is, else as bytes.
func (c *capture) content() (*string, []byte) {
	tail := slices.Concat(c.tail[c.next:], c.tail[:c.next])
	text := slices.Concat(c.head, tail)
	if c.cut() { // perhaps in the middle of a character
		text = slices.Concat(withoutBrokenEnd(c.head), withoutBrokenBegin(tail))
	}
	if utf8.Valid(text) {
		s := string(text)
		return &s, nil
	}
	return nil, slices.Concat(c.head, tail)
}

func withoutBrokenEnd(b []byte) []byte {
	for i := len(b) - 1; i >= max(0, len(b)-utf8.UTFMax); i-- {
		if utf8.RuneStart(b[i]) {
			if !utf8.FullRune(b[i:]) {
				return b[:i]
			}
			break
		}
	}
	return b
}

func withoutBrokenBegin(b []byte) []byte {
	for i := range min(len(b), utf8.UTFMax) {
		if utf8.RuneStart(b[i]) {
			return b[i:]
		}
	}
	if len(b) < utf8.UTFMax {
		return nil
	}
	return b
}
