package session

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// The shell's descriptors besides its script (0) and output (1, 2) are 7 for the file
// that bash reads commands from, 8 for /dev/null and 9 for its reports. One digit each:
// not every shell takes more in a redirection.

// script is what a shell evaluates for one command. The command sees none of the
// descriptors above, and /dev/null as its stdin. "command" keeps a shell that treats
// eval as special from ending at a syntax error, and functions of these names away.
func (f *feed) script(text, nonce string) string {
	redirect, status := " <&8 8<&- 9>&-\n", ">&9\n"
	if f.text >= 0 {
		redirect, status = " <&108\n", ">&109\n"
	}
	var b strings.Builder
	b.Grow(len(text) + len(nonce) + 96)
	b.WriteString("command eval ")
	quote(&b, text)
	b.WriteString(redirect)
	b.WriteString("command printf '%s %d\\n' ")
	b.WriteString(nonce)
	b.WriteString(" \"$?\" ")
	b.WriteString(status)
	return b.String()
}

// quote writes s as one word of shell.
func quote(b *strings.Builder, s string) {
	b.WriteByte('\'')
	for {
		i := strings.IndexByte(s, '\'')
		if i < 0 {
			break
		}
		b.WriteString(s[:i])
		b.WriteString(`'\''`)
		s = s[i+1:]
	}
	b.WriteString(s)
	b.WriteByte('\'')
}

// feed gives scripts to a shell.
//
// Every shell takes them from the pipe that is its stdin. Bash reads a pipe one byte at a
// time, at about a microsecond each, so it gets the script in a file that it reads in
// blocks, and by the pipe only a short line that makes it do so. That line is not a loop,
// a function or a sourced file: those would change what break, declare and return mean.
type feed struct {
	pipe *os.File

	mu     sync.Mutex
	text   int // the file, at the same offset as the shell's; -1: none
	closed bool
}

// bashSetup is the first line for bash, bashLine the line for each command.
//
// Closing descriptors for each command and opening them again costs bash nine system
// calls each. It duplicates a descriptor's close-on-exec flag, though, and sets it on
// the copy (the lowest free number from 10 on) that it keeps of one that a redirection
// closes for a while. A duplicate of such a copy needs no closing.
const (
	bashSetup = `eval 'exec 107<&10' 7<&-; exec 7<&-; eval 'exec 108<&10' 8<&-; exec 8<&-; eval 'exec 109>&10' 9>&-; exec 9>&-; ` +
		`__dsec() { IFS= read -r -d '' -u 107 __dsec; }; readonly -f __dsec` + "\n"
	bashLine = "__dsec;eval \"$__dsec\"\n"
)

// newFeed returns the feed and the shell's ends: its stdin and its text file (-1: none).
func newFeed(bash bool) (f *feed, stdin, text int, err error) {
	text = -1
	if bash {
		if text, err = unix.MemfdCreate("script", unix.MFD_CLOEXEC); err != nil {
			text = -1 // the pipe does it too
		}
	}
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		if text >= 0 {
			syscall.Close(text)
		}
		return nil, 0, 0, errs.Wrap(errs.InternalError, phase, "make the shell's script pipe", err)
	}
	syscall.SetNonblock(p[1], true)
	f = &feed{pipe: os.NewFile(uintptr(p[1]), "script"), text: text}
	if text >= 0 {
		f.pipe.WriteString(bashSetup) // an empty pipe takes it
	}
	return f, p[0], text, nil
}

// errStuck says that the shell did not take a script, of which it may have a part.
var errStuck = errors.New("the shell does not read its script")

// give makes the shell run s. A long script does not fit in the pipe: the shell reads it
// while it is written, so that this only waits for a shell that is stuck. A shell that is
// gone is no error here.
func (f *feed) give(ctx context.Context, s string) error {
	stored, err := f.store(s)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "store the script", err)
	}
	if stored {
		s = bashLine
	}
	stop := context.AfterFunc(ctx, func() { f.pipe.SetWriteDeadline(time.Unix(1, 0)) })
	_, err = f.pipe.WriteString(s)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errStuck
	}
	if !stop() {
		f.pipe.SetWriteDeadline(time.Time{}) // all was written: ctx ended a moment later
	}
	return nil
}

// store replaces the file's content, while the shell waits. It reports false if this
// shell takes its scripts from the pipe.
func (f *feed) store(script string) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.text < 0 || f.closed {
		return f.closed, nil
	}
	s := append([]byte(script), 0)
	if err := unix.Ftruncate(f.text, int64(len(s))); err != nil {
		return true, err
	}
	for off := 0; off < len(s); {
		n, err := unix.Pwrite(f.text, s[off:], int64(off))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return true, err
		}
		off += n
	}
	_, err := unix.Seek(f.text, 0, 0)
	return true, err
}

// close ends the shell's input.
func (f *feed) close() {
	f.pipe.Close()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.text >= 0 {
		syscall.Close(f.text)
		f.text, f.closed = -1, true
	}
}
