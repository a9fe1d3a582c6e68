package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Exit codes of our own.
const (
	exitFailure  = 1
	exitUsage    = 2
	exitPlatform = 125
	exitPipe     = 128 + int(syscall.SIGPIPE)
)

// codeError ends the program with a code; a nil err prints nothing.
type codeError struct {
	code int
	err  error
}

func (e *codeError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *codeError) Unwrap() error { return e.err }

// platform marks a failure of exec or run that is not the command's.
func platform(err error) error {
	var ce *codeError
	if err == nil || errors.As(err, &ce) {
		return err
	}
	return &codeError{exitPlatform, err}
}

// nextError says what to do about a failure that is in no table.
type nextError struct {
	err  error
	next string
}

func (e *nextError) Error() string { return e.err.Error() }

func (e *nextError) Unwrap() error { return e.err }

// usageError is a mistake in the command line.
type usageError struct {
	msg, suggestion string
}

func (e *usageError) Error() string { return e.msg }

func usagef(format string, args ...any) error { return &usageError{msg: fmt.Sprintf(format, args...)} }

// report prints err (what, why, what to do next) and returns the exit code. For a verb
// with --json it is one object.
func (a *app) report(ctx context.Context, cmd *cobra.Command, args []string, err error) int {
	code := exitCode(ctx, err)
	var sig signalError
	var ue *usageError
	switch {
	case causeOf(err) == nil || code == exitPipe: // the command's own end; or whoever read us has left
	case a.asJSON || wantsJSON(cmd, args):
		a.reportJSON(ctx, cmd, err)
	case errors.As(context.Cause(ctx), &sig):
		fmt.Fprintf(a.stderr, "dsec: %v\n", sig)
	case isUsage(err):
		errors.As(err, &ue)
		a.reportUsage(cmd, err, ue)
	default:
		a.reportError(err)
	}
	return code
}

// exitCode is what the program returns for err.
func exitCode(ctx context.Context, err error) int {
	if err == nil {
		return 0
	}
	var ce *codeError
	hasCode := errors.As(err, &ce)
	var sig signalError
	switch {
	case hasCode && ce.err == nil:
		return ce.code
	case errors.Is(err, syscall.EPIPE) || errors.Is(err, io.ErrClosedPipe):
		return exitPipe
	case errors.As(context.Cause(ctx), &sig):
		return 128 + int(sig.sig)
	case isUsage(err):
		return exitUsage
	case hasCode:
		return ce.code
	}
	return exitFailure
}

// causeOf is what there is to say of err; nil if it is only a command's exit code.
func causeOf(err error) error {
	var ce *codeError
	if errors.As(err, &ce) && ce.err == nil {
		return nil
	}
	return err
}

func isUsage(err error) bool {
	var ue *usageError
	return errors.As(err, &ue) || strings.HasPrefix(err.Error(), "unknown command")
}

// wantsJSON says whether a command line that could not be parsed asks for JSON.
func wantsJSON(cmd *cobra.Command, args []string) bool {
	if cmd.Flags().Lookup(jsonFlag) == nil {
		return false
	}
	if i := slices.Index(args, "--"); i >= 0 {
		args = args[:i]
	}
	return slices.Contains(args, "--"+jsonFlag) || slices.Contains(args, "--"+jsonFlag+"=true")
}

// failureJSON is what a verb with --json prints on stderr when it fails.
type failureJSON struct {
	Error *v1.Problem `json:"error"`
}

// reportJSON prints err as one object, with the fields that the API's errors have.
func (a *app) reportJSON(ctx context.Context, cmd *cobra.Command, err error) {
	p := problemOf(cmd, err)
	var sig signalError
	if errors.As(context.Cause(ctx), &sig) {
		p = v1.ProblemOf(errs.New(errs.RequestCanceled, "dsec", sig.Error()))
	}
	jsonEncoder(a.stderr).Encode(failureJSON{p}) // nobody is left to tell of a failure
}

// problemOf renders any error of ours as the API would.
func problemOf(cmd *cobra.Command, err error) *v1.Problem {
	var e *errs.Error
	var ue *usageError
	var ne *nextError
	var xe *exec.Error
	switch {
	case errors.As(err, &e):
		p := v1.ProblemOf(e)
		p.Message, p.RequestID = whatFailed(err, e), e.Details["request_id"]
		return p
	case isUsage(err):
		next := "see '" + cmd.CommandPath() + " --help'"
		if errors.As(err, &ue) && ue.suggestion != "" {
			next = "did you mean " + ue.suggestion + "? " + next
		}
		return v1.ProblemOf(errs.New(errs.BadRequest, "dsec.usage", err.Error()).Advise(next))
	case errors.As(err, &ne):
		return v1.ProblemOf(errs.New(errs.InternalError, "dsec", err.Error()).Advise(ne.next))
	case errors.As(err, &xe):
		return v1.ProblemOf(errs.New(errs.LocalFile, "dsec", err.Error()).Advise("install " + xe.Name))
	}
	return v1.ProblemOf(errs.New(errs.InternalError, "dsec", err.Error()))
}

// whatFailed is the message of e with what err says was tried before it.
func whatFailed(err error, e *errs.Error) string {
	if prefix, ok := strings.CutSuffix(err.Error(), e.Error()); ok {
		return prefix + e.Message
	}
	return e.Message
}

// brief is err on one line, for a note: what failed and why.
func brief(err error) string {
	var e *errs.Error
	if !errors.As(err, &e) {
		return err.Error()
	}
	if e.Cause == nil {
		return whatFailed(err, e)
	}
	return whatFailed(err, e) + ": " + e.Cause.Error()
}

func (a *app) reportUsage(cmd *cobra.Command, err error, ue *usageError) {
	fmt.Fprintf(a.stderr, "dsec: %v\n", err)
	if ue != nil && ue.suggestion != "" {
		fmt.Fprintf(a.stderr, "  did you mean %s?\n", ue.suggestion)
	}
	fmt.Fprintf(a.stderr, "  usage: %s\n  see '%s --help'\n", cmd.UseLine(), cmd.CommandPath())
}

func (a *app) reportError(err error) {
	var e *errs.Error
	if !errors.As(err, &e) {
		fmt.Fprintf(a.stderr, "dsec: %v\n", err)
		var xe *exec.Error
		if errors.As(err, &xe) {
			fmt.Fprintf(a.stderr, "  next: install %s\n", xe.Name)
		}
		var ne *nextError
		if errors.As(err, &ne) {
			fmt.Fprintf(a.stderr, "  next:  %s\n", ne.next)
		}
		return
	}
	fmt.Fprintf(a.stderr, "dsec: %s\n", printableLines(whatFailed(err, e)))
	if e.Cause != nil {
		fmt.Fprintf(a.stderr, "  why:   %s\n", printableLines(e.Cause.Error()))
	}
	var where []string
	for _, kv := range [][2]string{{"step", e.Phase}, {"node", e.Node}, {"sandbox", e.Sandbox}, {"request", e.Details["request_id"]}} {
		if kv[1] != "" {
			where = append(where, kv[0]+" "+kv[1])
		}
	}
	fmt.Fprintf(a.stderr, "  error: %s", e.Code)
	if len(where) > 0 {
		fmt.Fprintf(a.stderr, " (%s)", strings.Join(where, ", "))
	}
	fmt.Fprintln(a.stderr)
	if hint := e.Hint(); hint != "" {
		fmt.Fprintf(a.stderr, "  next:  %s\n", hint)
	}
	if e.RetryAfter > 0 {
		fmt.Fprintf(a.stderr, "  retry after %s\n", e.RetryAfter)
	}
}

// printableLines is printable for text of several lines.
func printableLines(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		lines[i] = printable(l)
	}
	return strings.Join(lines, "\n")
}

// parsing is what strconv says of its own work.
var parsing = regexp.MustCompile(`strconv\.\w+: parsing "[^"]*": `)

// flagError adds the flag that was probably meant.
func flagError(cmd *cobra.Command, err error) error {
	ue := &usageError{msg: parsing.ReplaceAllString(err.Error(), "")}
	// A sandbox or image and a command came before it: it was meant for the command.
	if args := cmd.Flags().Args(); len(args) > 1 && (cmd.Name() == "exec" || cmd.Name() == "run") {
		ue.msg = fmt.Sprintf("write -- before the command, so that its flags are its own: %s -- %s …", args[0], strings.Join(args[1:], " "))
		return ue
	}
	if _, name, ok := strings.Cut(err.Error(), "unknown flag: --"); ok {
		best := 3
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			d := distance(name, f.Name)
			if strings.HasPrefix(name, f.Name+"-") || strings.HasPrefix(f.Name, name+"-") {
				d = min(d, 2) // a name of the same thing: --data-dir
			}
			if d < best && !f.Hidden {
				best, ue.suggestion = d, "--"+f.Name
			}
		})
	}
	return ue
}

// strictArgs turns the argument errors of all verbs into usage errors.
func strictArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(c *cobra.Command, args []string) error {
			err := check(c, args)
			if err == nil {
				return nil
			}
			var ue *usageError
			if errors.As(err, &ue) {
				return err
			}
			ue = &usageError{msg: wrongArgs(c, args, err)}
			if len(args) > 0 && c.HasSubCommands() {
				if s := c.SuggestionsFor(args[0]); len(s) > 0 {
					ue.suggestion = strings.Join(s, " or ")
				}
			}
			return ue
		}
	}
	for _, c := range cmd.Commands() {
		strictArgs(c)
	}
}

// wrongArgs says which argument of c's usage line is missing, or is one too many; err is
// what there is to say of what is neither.
func wrongArgs(c *cobra.Command, args []string, err error) string {
	if c.HasSubCommands() {
		return err.Error() // an unknown verb
	}
	most := 0
	for _, word := range strings.Fields(c.Use)[1:] {
		optional := strings.HasPrefix(word, "[") && strings.HasSuffix(word, "]")
		name := strings.ReplaceAll(strings.TrimSuffix(word, "..."), "|", " or ")
		switch {
		case word == "[flags]":
			continue
		case strings.HasPrefix(word, "-"):
			return tooMany(args, most, err)
		case !optional && most >= len(args):
			return name + " is missing"
		}
		most++
	}
	return tooMany(args, most, err)
}

func tooMany(args []string, most int, err error) string {
	if len(args) > most {
		return fmt.Sprintf("unexpected argument %q", args[most])
	}
	return err.Error()
}

// distance is the number of edits between two words.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diag
			if a[i] != b[j] {
				cost++
			}
			diag, row[j+1] = row[j+1], min(cost, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
