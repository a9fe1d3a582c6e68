package client

import (
	"context"
	"fmt"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// Cmd says what to run. Nothing is interpreted by a shell.
type Cmd struct {
	Path string   // looked up in PATH unless it has a slash
	Args []string // without the command's own name
	Env  map[string]string
	Dir  string // empty: the sandbox's working directory
	User string // name or uid, with :group if wanted; empty: the sandbox's
	// Timeout kills the whole process group after this time; IdleTimeout after this time
	// without output. The output so far is returned, and Exit says what happened. The guest
	// keeps these limits; one that is silent for 10 s more is errs.GuestUnreachable. Time that
	// the sandbox is paused does not count.
	// If the limit passes before the command could be started, since data of the image is not
	// here and the store does not answer, the error is errs.DeadlineExceeded.
	Timeout, IdleTimeout time.Duration
	// Tag is a name to find the process by.
	Tag string
	// OutputLimit and SpillLimit bound what is kept of the output for a later attach, in
	// memory and on the sandbox's disk; 0: the guest's default, and no spill.
	OutputLimit, SpillLimit uint64
}

// Command is a Cmd of a path and its arguments.
func Command(path string, args ...string) Cmd { return Cmd{Path: path, Args: args} }

func (c Cmd) message() *msg.StartRequest {
	return &msg.StartRequest{
		Cmd: c.Path, Args: c.Args, Envs: c.Env, Cwd: c.Dir, User: c.User, Tag: c.Tag,
		TimeoutMs: millis(c.Timeout), IdleTimeoutMs: millis(c.IdleTimeout),
		OutputLimit: c.OutputLimit, SpillLimit: c.SpillLimit,
	}
}

// millis rounds up: a limit must not become 0, which means none.
func millis(d time.Duration) uint64 {
	if d <= 0 {
		return 0
	}
	return uint64((d + time.Millisecond - 1) / time.Millisecond)
}

// Exit says how a command ended.
type Exit struct {
	Code                   int // 128+n after signal n; 127 not found; 126 not executable
	Signal                 int
	TimedOut, IdleTimedOut bool
	// Err is set when the command could not be run: errs.CommandNotFound or CommandNotExec.
	Err error
	// StdoutBytes and StderrBytes were written in all, kept or not.
	StdoutBytes, StderrBytes uint64
	Duration, CPU            time.Duration
	MaxRSS                   uint64
	// OOMKilled says that the command ended as by SIGKILL, and that this was the sandbox's
	// memory limit of MemoryLimit bytes. OOMKills counts the processes that the limit
	// killed while the command ran: its children, or others of the sandbox.
	OOMKilled   bool
	OOMKills    int
	MemoryLimit int64 // with OOMKills
}

func exitOf(m *msg.Exit) Exit {
	if m == nil {
		m = &msg.Exit{}
	}
	e := Exit{
		Code: int(m.ExitCode), Signal: int(m.Signal), TimedOut: m.TimedOut, IdleTimedOut: m.IdleTimedOut,
		StdoutBytes: m.StdoutBytes, StderrBytes: m.StderrBytes, MaxRSS: m.MaxRssBytes,
		Duration: time.Duration(m.DurationUs) * time.Microsecond, CPU: time.Duration(m.CpuUs) * time.Microsecond,
		OOMKilled: m.OomKilled, OOMKills: int(m.OomKills), MemoryLimit: int64(m.MemoryLimitBytes),
	}
	if m.ErrorCode != "" {
		e.Err = errs.New(errs.Code(m.ErrorCode), "process.start", m.Error)
	}
	return e
}

// Result of a command that was run to its end.
type Result struct {
	Exit
	PID            uint32
	Stdout, Stderr []byte
	Truncated      bool // the middle of the output is missing
}

// ExecOption changes one Exec.
type ExecOption func(*msg.ExecRequest)

// Input is given to the command as its stdin; without it stdin is empty.
func Input(b []byte) ExecOption {
	return func(r *msg.ExecRequest) { r.Stdin, r.Start.Stdin = b, true }
}

// MaxOutput bounds what is returned of each of stdout and stderr: 256 KiB by default,
// 480 KiB at most; more needs [Sandbox.Start].
func MaxOutput(n uint64) ExecOption { return func(r *msg.ExecRequest) { r.MaxOutput = n } }

// Exec runs a command to its end and returns its output. It costs one round trip. When
// ctx ends, or the connection is lost, the command is killed. For large or live output, or
// a command that outlives a lost connection, use [Sandbox.Start].
func (s *Sandbox) Exec(ctx context.Context, cmd Cmd, opts ...ExecOption) (*Result, error) {
	var resp msg.ExecResult
	ctx, limit := s.patient(ctx, cmd.Timeout, 0)
	err := s.call(ctx, "process.exec", execRequest(cmd, opts), &resp)
	if err = limit.stop(ctx, s, err); err != nil {
		return nil, fmt.Errorf("exec %s: %w", cmd.Path, err)
	}
	return resultOf(&resp), nil
}

// Run is Exec of a path and its arguments.
func (s *Sandbox) Run(ctx context.Context, path string, args ...string) (*Result, error) {
	return s.Exec(ctx, Command(path, args...))
}

func execRequest(cmd Cmd, opts []ExecOption) *msg.ExecRequest {
	r := &msg.ExecRequest{Start: cmd.message()}
	for _, o := range opts {
		o(r)
	}
	return r
}

func resultOf(m *msg.ExecResult) *Result {
	return &Result{Exit: exitOf(m.Exit), PID: m.Pid, Stdout: m.Stdout, Stderr: m.Stderr, Truncated: m.Truncated}
}

// ProcessInfo describes a process of a sandbox.
type ProcessInfo = msg.ProcessInfo

// Processes lists what was started in the sandbox and is still known, in the order of
// starts: what runs, and the last 4096 that ended, of which those with a tag or started
// detached are given up last. Output is kept for less long: StdoutKeptFrom and
// StderrKeptFrom say from where on.
func (s *Sandbox) Processes(ctx context.Context) ([]*ProcessInfo, error) {
	var all []*ProcessInfo
	for after := uint64(0); ; {
		var l msg.ProcessList
		if err := s.read(ctx, "process.list", &msg.ProcessListRequest{After: after}, &l); err != nil {
			return nil, fmt.Errorf("list processes: %w", err)
		}
		all = append(all, l.Processes...)
		if l.Next <= after {
			return all, nil
		}
		after = l.Next
	}
}

// Selector names a process by pid or tag.
type Selector struct {
	PID uint32
	Tag string
}

func (s Selector) message() *msg.Selector { return &msg.Selector{Pid: s.PID, Tag: s.Tag} }

func (s Selector) String() string {
	if s.Tag != "" {
		return s.Tag
	}
	return fmt.Sprint(s.PID)
}

// KillAll sends a signal to every process of the sandbox but its PID 1, whoever started
// it. It needs no new process: it also works at the sandbox's limit of processes.
func (s *Sandbox) KillAll(ctx context.Context, signal int) error {
	if err := s.call(ctx, "process.signal", &msg.SignalRequest{All: true, Signal: int32(signal)}, &msg.Empty{}); err != nil {
		return fmt.Errorf("signal all processes: %w", err)
	}
	return nil
}

// Kill sends a signal to the process's whole group; when the process has ended, to what
// it left of its session.
func (s *Sandbox) Kill(ctx context.Context, p Selector, signal int) error {
	if err := s.call(ctx, "process.signal", &msg.SignalRequest{Process: p.message(), Signal: int32(signal)}, &msg.Empty{}); err != nil {
		return fmt.Errorf("signal process %s: %w", p, err)
	}
	return nil
}
