package session

import (
	"context"
	"encoding/binary"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"dsec/api/v1/errs"
	"dsec/internal/guest/proc"

	"golang.org/x/sys/unix"
)

const phase = "guest.session"

// maxSessions bounds the open sessions of a sandbox.
const maxSessions = 4096

// Request says which shell to open.
type Request struct {
	ID    string // empty: chosen here
	Shell string // empty: bash, or sh where there is none
	Cwd   string
	Env   map[string]string
	User  string
}

// Table holds the sandbox's open sessions.
type Table struct {
	procs *proc.Table
	null  int

	mu   sync.Mutex
	open map[string]*Session // nil: is being opened
	next uint64
}

// NewTable returns a table whose shells are processes of procs.
func NewTable(procs *proc.Table) *Table {
	return &Table{procs: procs, null: procs.Null(), open: map[string]*Session{}}
}

// Open starts a shell. Errors: errs.NotSupported (no shell), errs.StateConflict (the id
// is taken), those of proc.Table.Start.
func (t *Table) Open(ctx context.Context, r Request) (*Session, error) {
	spec := proc.Spec{Cwd: r.Cwd, Env: r.Env, User: r.User}
	shell, err := t.Shell(r.Shell, spec)
	if err != nil {
		return nil, err
	}
	id, err := t.reserve(r.ID)
	if err != nil {
		return nil, err
	}
	s, err := start(ctx, t.procs, id, shell, spec, random(), t.null)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		delete(t.open, id)
		return nil, err
	}
	t.open[id] = s
	return s, nil
}

// Shell finds the shell that a session would use; name may be empty.
func (t *Table) Shell(name string, spec proc.Spec) (string, error) {
	names := []string{"bash", "sh", "dash", "ash"}
	if name != "" {
		names = []string{name}
	}
	for _, n := range names {
		if path, ok := t.procs.Lookup(n, spec); ok {
			return path, nil
		}
	}
	return "", errs.New(errs.NotSupported, phase, "the sandbox has no shell: looked for "+strings.Join(names, ", ")+" in its PATH")
}

func (t *Table) reserve(id string) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.open) >= maxSessions {
		return "", errs.New(errs.StateConflict, phase, "the sandbox has "+strconv.Itoa(maxSessions)+" open sessions, the most it can have").Advise("close one with 'dsec session rm'")
	}
	if id == "" {
		for {
			t.next++
			id = "s" + strconv.FormatUint(t.next, 10)
			if _, taken := t.open[id]; !taken {
				break
			}
		}
	} else if len(id) > 128 {
		return "", errs.New(errs.BadRequest, phase, "id is longer than 128 bytes")
	}
	if s, taken := t.open[id]; taken && (s == nil || !s.ended()) {
		return "", errs.New(errs.StateConflict, phase, "session "+strconv.Quote(id)+" is open already").Advise("use it as it is, or choose another name")
	} else if taken {
		s.Close() // its shell has ended: the id is free
	}
	t.open[id] = nil
	return id, nil
}

func (s *Session) ended() bool {
	_, ok := s.Proc.Exit()
	return ok
}

// Find returns an open session. One whose shell has ended is found until it is closed
// or its id is opened again. Errors: errs.SessionNotFound.
func (t *Table) Find(id string) (*Session, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.open[id]; s != nil {
		return s, nil
	}
	return nil, errs.New(errs.SessionNotFound, phase, "no session "+strconv.Quote(id))
}

// Close ends a session: its shell and everything left of it.
func (t *Table) Close(id string) error {
	s, err := t.Find(id)
	if err != nil {
		return err
	}
	t.mu.Lock()
	if t.open[id] == s {
		delete(t.open, id)
	}
	t.mu.Unlock()
	s.Close()
	return nil
}

// List returns the open sessions by id.
func (t *Table) List() []*Session {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []*Session
	for _, s := range t.open {
		if s != nil {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b *Session) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// random is the part of a session's nonces that its commands cannot guess.
func random() string {
	var b [8]byte
	for {
		n, err := unix.Getrandom(b[:], 0)
		if err == syscall.EINTR {
			continue
		}
		if n == len(b) {
			return strconv.FormatUint(binary.NativeEndian.Uint64(b[:]), 36) + "."
		}
		return "0." // no random numbers: the count alone tells commands apart
	}
}
