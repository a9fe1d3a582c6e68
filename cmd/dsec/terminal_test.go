package main

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// terminal gives an app a pseudo-terminal for its stdin.
func terminal(t *testing.T, out io.Writer) (*app, *os.File) {
	t.Helper()
	p, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(); tty.Close() })
	if err := pty.Setsize(p, &pty.Winsize{Rows: 33, Cols: 111}); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, p) // what the terminal echoes
	return &app{stdin: tty, stdout: out, stderr: io.Discard}, p
}

func TestShellUsesRawTerminal(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "busybox")
	var out bytes.Buffer
	a, term := terminal(t, &out)
	tty := a.stdin.(*os.File)
	before, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan int)
	go func() { done <- a.main(t.Context(), c.args("shell", id)) }()
	eventually(t, "the terminal is raw", func() bool {
		now, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
		return err == nil && now.Lflag&unix.ICANON == 0
	})
	io.WriteString(term, "echo in the shell; exit 6\n")
	if code := <-done; code != 6 || !strings.Contains(out.String(), "in the shell") {
		t.Errorf("exit code %d, %q", code, out.String())
	}
	after, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil || *after != *before {
		t.Errorf("the terminal was not restored: %v", err)
	}
}

func TestDetachKeys(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{"abc": "abc", "a\x10b": "a\x10b", "a\x10\x11b": "a", "\x10\x10x": "\x10\x10x"} {
		detached := false
		d := &detachReader{r: strings.NewReader(in), on: func() { detached = true }}
		got, _ := io.ReadAll(d)
		if string(got) != want || detached != strings.Contains(in, "\x10\x11") {
			t.Errorf("%q gives %q, detached %t", in, got, detached)
		}
	}
}

// A terminal gives one byte at a time.
func TestDetachKeysAcrossReads(t *testing.T) {
	t.Parallel()
	detached := false
	d := &detachReader{r: iotestOneByte{strings.NewReader("x\x10\x11")}, on: func() { detached = true }}
	if got, err := io.ReadAll(d); string(got) != "x" || err != errDetached || !detached {
		t.Errorf("%q, %v, %t", got, err, detached)
	}
}

type iotestOneByte struct{ r io.Reader }

func (o iotestOneByte) Read(p []byte) (int, error) { return o.r.Read(p[:1]) }
