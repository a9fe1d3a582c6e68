package client

import (
	"context"
	"fmt"
	"io"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
)

// SessionOptions say what shell to open.
type SessionOptions struct {
	ID    string // empty: chosen by the guest
	Shell string // empty: bash, or sh where there is none
	Dir   string
	Env   map[string]string
	User  string
}

// Session is a persistent shell: directory, variables and functions stay from one
// command to the next. It runs one command at a time; errs.SessionBusy says so.
type Session struct {
	sb   *Sandbox
	info *msg.SessionInfo
}

// SessionInfo describes a session.
type SessionInfo = msg.SessionInfo

// OpenSession starts a shell.
func (s *Sandbox) OpenSession(ctx context.Context, o SessionOptions) (*Session, error) {
	info := new(msg.SessionInfo)
	req := &msg.SessionOpenRequest{Id: o.ID, Shell: o.Shell, Cwd: o.Dir, Envs: o.Env, User: o.User}
	if err := s.call(ctx, "session.open", req, info); err != nil {
		return nil, fmt.Errorf("open session: %w", err)
	}
	return &Session{sb: s, info: info}, nil
}

// Session returns a handle on a session that is open.
func (s *Sandbox) Session(id string) *Session {
	return &Session{sb: s, info: &msg.SessionInfo{Id: id}}
}

// Sessions lists the open sessions.
func (s *Sandbox) Sessions(ctx context.Context) ([]*SessionInfo, error) {
	var l msg.SessionList
	if err := s.read(ctx, "session.list", &msg.Empty{}, &l); err != nil {
		return nil, fmt.Errorf("list sessions: %w", err)
	}
	return l.Sessions, nil
}

// ID returns the session's id.
func (s *Session) ID() string { return s.info.Id }

// Info returns what opening the session answered.
func (s *Session) Info() SessionInfo { return *s.info }

// SessionCommand is one command line for a session's shell.
type SessionCommand struct {
	Line string
	// Timeout ends the command, its descendants included; the shell stays if it can.
	Timeout time.Duration
	// MaxOutput bounds what Exec returns of each of stdout and stderr; 0: 256 KiB.
	MaxOutput uint64
}

// SessionResult of a command.
type SessionResult struct {
	Code           int
	TimedOut       bool
	Ended          bool // the shell itself ended
	Stdout, Stderr []byte
	Truncated      bool
	Duration       time.Duration
	// OOMKilled, OOMKills and MemoryLimit are as in [Exit].
	OOMKilled   bool
	OOMKills    int
	MemoryLimit int64
}

func sessionResult(m *msg.SessionResult) *SessionResult {
	return &SessionResult{
		Code: int(m.ExitCode), TimedOut: m.TimedOut, Ended: m.Ended, Stdout: m.Stdout, Stderr: m.Stderr,
		Truncated: m.Truncated, Duration: time.Duration(m.DurationUs) * time.Microsecond,
		OOMKilled: m.OomKilled, OOMKills: int(m.OomKills), MemoryLimit: int64(m.MemoryLimitBytes),
	}
}

// Sh is Exec of a line without options.
func (s *Session) Sh(ctx context.Context, line string) (*SessionResult, error) {
	return s.Exec(ctx, SessionCommand{Line: line})
}

// Exec runs a line and returns its output. It costs one round trip.
func (s *Session) Exec(ctx context.Context, cmd SessionCommand) (*SessionResult, error) {
	var m msg.SessionResult
	req := &msg.SessionRunRequest{Id: s.info.Id, Command: cmd.Line, TimeoutMs: millis(cmd.Timeout), MaxOutput: cmd.MaxOutput}
	ctx, limit := s.sb.patient(ctx, cmd.Timeout, 0)
	err := s.sb.call(ctx, "session.exec", req, &m)
	if err = limit.stop(ctx, s.sb, err); err != nil {
		return nil, fmt.Errorf("session %s: %w", s.info.Id, err)
	}
	return sessionResult(&m), nil
}

// Run runs a line and writes its output as it comes; nil writers drop it. When ctx ends or
// a writer fails, the line's command is killed; the shell stays if it can.
func (s *Session) Run(ctx context.Context, cmd SessionCommand, stdout, stderr io.Writer) (*SessionResult, error) {
	ctx, limit := s.sb.patient(ctx, cmd.Timeout, 0)
	defer limit.stop(ctx, s.sb, nil)
	st, err := s.sb.open(ctx, "session.run", &msg.SessionRunRequest{Id: s.info.Id, Command: cmd.Line, TimeoutMs: millis(cmd.Timeout)})
	if err != nil {
		return nil, fmt.Errorf("session %s: %w", s.info.Id, limit.stop(ctx, s.sb, err))
	}
	for {
		limit.take(false)
		f, err := st.Recv(ctx)
		limit.take(true)
		if err != nil {
			var m msg.SessionResult
			if err := limit.stop(ctx, s.sb, finish(st, err, &m)); err != nil {
				st.Cancel()
				return nil, fmt.Errorf("session %s: %w", s.info.Id, err)
			}
			return sessionResult(&m), nil
		}
		w := stdout
		if f.Kind == aether.KindStderr {
			w = stderr
		}
		if f.IsMessage || w == nil {
			continue
		}
		if _, err := w.Write(f.Payload); err != nil {
			st.Cancel()
			return nil, fmt.Errorf("session %s: %w: %w", s.info.Id, ErrWriter, err)
		}
	}
}

// Close ends the shell and what runs in it.
func (s *Session) Close(ctx context.Context) error {
	if err := s.sb.call(ctx, "session.close", &msg.SessionSelect{Id: s.info.Id}, &msg.Empty{}); err != nil {
		return fmt.Errorf("close session %s: %w", s.info.Id, err)
	}
	return nil
}
