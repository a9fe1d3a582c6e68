package bed

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/url"
	"os/exec"
	"strings"
	"testing"
)

// Result of a command line.
type Result struct {
	Stdout, Stderr string
	Code           int // -1: it was killed or could not be run, Stderr says why
}

// Command is dsec with these arguments, in the bed's environment.
func (b *Bed) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, b.Bin, args...)
	cmd.Env = b.env
	return cmd
}

// Run runs dsec to its end.
func (b *Bed) Run(ctx context.Context, stdin io.Reader, args ...string) Result {
	ctx, cancel := context.WithTimeout(ctx, 2*Patience)
	defer cancel()
	cmd := b.Command(ctx, args...)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errOut
	err := cmd.Run()
	r := Result{Stdout: out.String(), Stderr: errOut.String()}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		r.Code = exit.ExitCode()
		if r.Code < 0 {
			r.Stderr += "\n" + err.Error()
		}
	case err != nil:
		r.Code, r.Stderr = -1, err.Error()
	}
	return r
}

// CLI is Run for a test, without input.
func (b *Bed) CLI(t testing.TB, args ...string) Result {
	t.Helper()
	return b.Run(t.Context(), nil, args...)
}

// Must runs dsec, which must succeed, and returns its output without the last line end.
func (b *Bed) Must(t testing.TB, args ...string) string {
	t.Helper()
	return b.MustIn(t, "", args...)
}

// MustIn is Must with input.
func (b *Bed) MustIn(t testing.TB, stdin string, args ...string) string {
	t.Helper()
	r := b.Run(t.Context(), strings.NewReader(stdin), args...)
	if r.Code != 0 {
		t.Fatalf("dsec %s: exit code %d\n%s%s", strings.Join(args, " "), r.Code, r.Stdout, r.Stderr)
	}
	return strings.TrimSuffix(r.Stdout, "\n")
}

// JSON parses the output of a command that must succeed.
func JSON[T any](t testing.TB, b *Bed, args ...string) T {
	t.Helper()
	var v T
	out := b.Must(t, args...)
	if err := json.Unmarshal([]byte(out), &v); err != nil {
		t.Fatalf("dsec %s: %v in %s", strings.Join(args, " "), err, out)
	}
	return v
}

// Lines parses an output of one JSON value on each line.
func Lines[T any](t testing.TB, out string) []T {
	t.Helper()
	var all []T
	for dec := json.NewDecoder(strings.NewReader(out)); ; {
		var v T
		err := dec.Decode(&v)
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatalf("%v in %s", err, out)
		}
		all = append(all, v)
	}
}

// Fails runs dsec, which must end with code and name the error of the table ("" for none).
func (b *Bed) Fails(t testing.TB, code int, errorCode string, args ...string) Result {
	t.Helper()
	r := b.CLI(t, args...)
	if r.Code != code || errorCode != "" && !strings.Contains(r.Stderr, "error: "+errorCode) {
		t.Errorf("dsec %s: exit code %d, want %d and error %q\n%s%s", strings.Join(args, " "), r.Code, code, errorCode, r.Stdout, r.Stderr)
	}
	return r
}

// URL parses a constant address.
func URL(s string) *url.URL {
	u, err := url.Parse(s)
	if err != nil {
		panic(err)
	}
	return u
}
