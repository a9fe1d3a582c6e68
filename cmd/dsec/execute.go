package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"golang.org/x/term"

	"dsec/api/v1/errs"
	"dsec/client"
)

// wiring says how a command is connected to us.
type wiring struct {
	tty, stdin bool
	forward    bool    // our signals go to the command
	result     *result // takes the output; nil: it goes to ours
}

// execute runs cmd connected to our own streams. The error holds its exit code.
func (a *app) execute(ctx context.Context, sb *client.Sandbox, cmd client.Cmd, w wiring) error {
	o := client.IO{Stdout: a.stdout, Stderr: a.stderr}
	if r := w.result; r != nil {
		r.sandbox = sb.ID()
		o.Stdout, o.Stderr = &r.out, &r.errOut
		o.OnGap = func(bool, uint64, uint64) { r.lost = true }
	}
	if w.stdin {
		o.Stdin = a.stdin
	}
	if w.tty {
		size := noTerminal
		if w.stdin {
			ours, restore, err := a.raw()
			if err != nil {
				return err
			}
			defer restore()
			size = ours
		} else {
			o.Stdin = strings.NewReader(ctrlD) // who reads sees an end, rather than wait for ever
		}
		o.TTY = &size
		if t := os.Getenv("TERM"); t != "" && cmd.Env["TERM"] == "" {
			env := map[string]string{"TERM": t}
			for k, v := range cmd.Env {
				env[k] = v
			}
			cmd.Env = env
		}
	}
	p, err := sb.Start(ctx, cmd, o)
	if err != nil {
		return commandError(err)
	}
	if w.result != nil {
		w.result.pid = p.PID()
	}
	if w.tty && w.stdin {
		defer a.followSize(ctx, p)()
	}
	if w.forward && a.signals != nil {
		defer a.signals.to(func(s syscall.Signal) { p.Signal(ctx, int(s)) })()
	}
	return a.follow(p, w.result)
}

// commandError gives a command that could not be run the shell's exit codes.
func commandError(err error) error {
	switch {
	case errors.Is(err, errs.CommandNotFound):
		return &codeError{127, err}
	case errors.Is(err, errs.CommandNotExec):
		return &codeError{126, err}
	}
	return err
}

// follow returns the process's end as our own: its exit code, or why there is none. A
// result is told of it too.
func (a *app) follow(p *client.Process, r *result) error {
	x, err := p.Wait()
	if r != nil {
		r.exit = x
	}
	switch {
	case err != nil:
		return err
	case x.Err != nil && (x.StderrBytes == 0 || r != nil): // else its stderr, which the user sees, says so
		return commandError(x.Err)
	}
	return a.ended(x)
}

// ended says why a command was killed, and returns its exit code as ours.
func (a *app) ended(x client.Exit) error {
	switch {
	case x.TimedOut:
		a.note("the command was killed: it ran longer than --timeout")
	case x.IdleTimedOut:
		a.note("the command was killed: it printed nothing for --idle-timeout")
	case x.OOMKilled:
		a.note("the command was killed: memory limit %s", size(x.MemoryLimit))
	case x.OOMKills > 0:
		a.note("while the command ran, processes of the sandbox were killed: %d, memory limit %s ('dsec inspect' names the last)", x.OOMKills, size(x.MemoryLimit))
	}
	if x.Code != 0 {
		return &codeError{code: x.Code}
	}
	return nil
}

// noTerminal is the size of a command's terminal when we have none.
var noTerminal = client.Size{Cols: 80, Rows: 24}

// ctrlD is the end of input, as typed.
const ctrlD = "\x04"

// raw puts our terminal into raw mode.
func (a *app) raw() (client.Size, func(), error) {
	f, ok := a.stdin.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return client.Size{}, nil, errNoTerminal
	}
	fd := int(f.Fd())
	size, err := terminalSize(fd)
	if err != nil {
		return client.Size{}, nil, err
	}
	old, err := term.MakeRaw(fd)
	if err != nil {
		return client.Size{}, nil, fmt.Errorf("set the terminal to raw mode: %w", err)
	}
	return size, func() { term.Restore(fd, old) }, nil
}

func terminalSize(fd int) (client.Size, error) {
	w, h, err := term.GetSize(fd)
	if err != nil {
		return client.Size{}, fmt.Errorf("read the terminal's size: %w", err)
	}
	return client.Size{Cols: uint32(w), Rows: uint32(h)}, nil
}

// followSize passes changes of our terminal's size on until the returned function is called.
func (a *app) followSize(ctx context.Context, p *client.Process) (stop func()) {
	f, ok := a.stdin.(*os.File)
	if !ok {
		return func() {}
	}
	winch := make(chan os.Signal, 1)
	signal.Notify(winch, syscall.SIGWINCH)
	go func() {
		for range winch {
			if size, err := terminalSize(int(f.Fd())); err == nil {
				p.Resize(ctx, size) // a lost resize is repaired by the next
			}
		}
	}()
	return func() {
		signal.Stop(winch)
		close(winch)
	}
}

func newKey() string { return "cli-" + rand.Text() }

func alreadyGone(err error) bool {
	return errors.Is(err, errs.SandboxGone) || errors.Is(err, errs.SandboxNotFound) || errors.Is(err, errs.SandboxLost)
}

// detachKeys ends an attachment from a raw terminal: Ctrl-P Ctrl-Q.
var errDetached = errors.New("detached")

// detachReader passes a terminal's input on and ends with errDetached at the keys.
type detachReader struct {
	r    io.Reader
	held bool // a Ctrl-P that was not passed on yet
	on   func()
}

const ctrlP, ctrlQ = 0x10, 0x11

func (d *detachReader) Read(p []byte) (int, error) {
	if len(p) < 2 {
		return 0, io.ErrShortBuffer
	}
	in := make([]byte, len(p)/2) // each byte may bring a held one with it
	n, err := d.r.Read(in)
	out := 0
	for _, b := range in[:n] {
		if d.held {
			d.held = false
			if b == ctrlQ {
				d.on()
				return out, errDetached
			}
			p[out] = ctrlP
			out++
		}
		if b == ctrlP {
			d.held = true
			continue
		}
		p[out] = b
		out++
	}
	return out, err
}
