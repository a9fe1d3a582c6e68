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

// The shell's descriptors besides its script (0) and output (1, 2) are 7 for what tells
// bash to go on, 8 for /dev/null and 9 for its reports. One digit each: not every shell
// takes more in a redirection.

// script is what a shell evaluates for one command. The command sees none of the
// descriptors above, and /dev/null as its stdin. "command" keeps a shell that treats
// eval as special from ending at a syntax error, and functions of these names away.
func (f *feed) script(text, nonce string) string {
	redirect, status := " <&8 8<&- 9>&-\n", ">&9\n"
	if f.file >= 0 {
		redirect, status = " <&108\n", ">&109;"
	}
	var b strings.Builder
	b.Grow(len(text) + len(nonce) + 160)
	b.WriteString("command eval ")
	quote(&b, text)
	b.WriteString(redirect)
	b.WriteString("command echo ")
	b.WriteString(nonce)
	b.WriteString(" \"$?\"") // quoted: IFS may hold digits
	b.WriteString(status)
	if f.file >= 0 {
		b.WriteString(bashWait)
	}
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
// time, at about a microsecond each, but a file in blocks. So its stdin is a file, to
// which each script is appended; at the end of each it waits for a byte from the pipe,
// which comes when there is more in the file.
type feed struct {
	pipe *os.File

	mu   sync.Mutex
	file int   // -1: none
	end  int64 // of the file's content
	hole int64 // up to where the file's memory was given back
}

// bashSetup is the first line for bash.
//
// Closing descriptors for each command and opening them again costs bash nine system
// calls each. It duplicates a descriptor's close-on-exec flag, though, and sets it on
// the copy (the lowest free number from 10 on) that it keeps of one that a redirection
// closes for a while. A duplicate of such a copy needs no closing.
//
// bashWait ends each script. Only the pipe's end gives a status below 128: TMOUT and, in
// its POSIX mode, a signal with a trap interrupt read too.
const (
	bashSetup = `eval 'exec 107<&10' 7<&-; exec 7<&-; eval 'exec 108<&10' 8<&-; exec 8<&-; eval 'exec 109>&10' 9>&-; exec 9>&-; ` + bashWait
	bashWait  = "until command read -rN1 -u107 __dsec||(($?<128));do :;done\n"
)

// holeEvery is how many bytes of scripts that were run a feed keeps.
const holeEvery = 1 << 18

// newFeed returns the feed and the shell's ends: its stdin and its descriptor 7 (-1: none).
func newFeed(bash bool) (f *feed, stdin, wake int, err error) {
	f = &feed{file: -1}
	if bash {
		if f.file, err = unix.MemfdCreate("script", unix.MFD_CLOEXEC); err != nil {
			f.file = -1 // the pipe does it too
		} else if err = f.append(bashSetup); err != nil {
			f.close()
			return nil, 0, 0, errs.Wrap(errs.InternalError, phase, "write the shell's script", err)
		}
	}
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		f.close()
		return nil, 0, 0, errs.Wrap(errs.InternalError, phase, "make the shell's script pipe", err)
	}
	syscall.SetNonblock(p[1], true)
	f.pipe = os.NewFile(uintptr(p[1]), "script")
	if f.file < 0 {
		return f, p[0], -1, nil
	}
	stdin, err = syscall.Dup(f.file)
	if err == nil {
		syscall.CloseOnExec(stdin)
		return f, stdin, p[0], nil
	}
	syscall.Close(p[0])
	f.close()
	return nil, 0, 0, errs.Wrap(errs.InternalError, phase, "open the shell's script", err)
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
		s = "\n"
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

// store appends to the file, while the shell waits at its end. It reports false if this
// shell takes its scripts from the pipe.
func (f *feed) store(script string) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file < 0 {
		return false, nil
	}
	// All but the line at which it waits has been run.
	if done := f.end - int64(len(bashWait)); done-f.hole >= holeEvery {
		if err := unix.Fallocate(f.file, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, f.hole, done-f.hole); err == nil {
			f.hole = done &^ 4095 // the page at its end is still in use
		}
	}
	return true, f.append(script)
}

// append writes s at the file's end, all of it or nothing.
func (f *feed) append(s string) error {
	for off := 0; off < len(s); {
		n, err := unix.Pwrite(f.file, []byte(s[off:]), f.end+int64(off))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return errors.Join(err, unix.Ftruncate(f.file, f.end))
		}
		off += n
	}
	f.end += int64(len(s))
	return nil
}

// close ends the shell's input.
func (f *feed) close() {
	if f.pipe != nil {
		f.pipe.Close()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.file >= 0 {
		syscall.Close(f.file)
		f.file = -1
	}
}
