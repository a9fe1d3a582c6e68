package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// Size of a terminal.
type Size struct{ Cols, Rows uint32 }

func (s Size) message() *msg.PtySize { return &msg.PtySize{Cols: s.Cols, Rows: s.Rows} }

// IO connects a process to the caller.
type IO struct {
	// Stdin is copied to the process, then its stdin is closed. The copy may still hold
	// one Read when the process has ended.
	Stdin io.Reader
	// OpenStdin gives the process a stdin that [Process.Stdin] writes to. Without it and
	// Stdin, the process reads from /dev/null.
	OpenStdin bool
	// KeepStdin leaves stdin open when the connection breaks, so that writing can go on
	// after the re-attach; bytes in flight may be lost. Without it a break closes stdin.
	KeepStdin bool
	// Stdout and Stderr are written from one goroutine; nil: dropped. A terminal's
	// output goes to Stdout. A slow writer slows nothing but this process's stream. When
	// one fails, a process of Start is killed, as by a broken pipe; of one that was only
	// attached to, nothing but the attachment ends. Wait returns the writer's error.
	Stdout, Stderr io.Writer
	// Pipes makes [Process.Stdout] and [Process.Stderr] readable instead: read both to
	// their end before Wait.
	Pipes bool
	// TTY runs the process on a terminal of this size.
	TTY *Size
	// OnGap is told of output that was dropped before it could be sent.
	OnGap func(stderr bool, from, to uint64)
}

// Process is a running command, or one attached to. Its output position is kept: if
// the connection breaks, it attaches again where it was.
type Process struct {
	sb      *Sandbox
	io      IO
	pid     uint32
	tag     string
	owned   bool             // we started it, so it ends with us
	offsets [2]atomic.Uint64 // of stdout (or the terminal) and stderr

	outR, errR *io.PipeReader
	outW, errW *io.PipeWriter

	ctx    context.Context // of the streams; ends with done
	cancel context.CancelFunc
	stop   func() bool // stops watching the caller's context
	done   chan struct{}
	exit   Exit
	err    error
	// progress says whether the current stream delivered anything; the pump's only.
	progress bool
	limit    *patience

	mu       sync.Mutex
	stream   *aether.Stream // current; nil while it is being made again
	caller   error          // why the caller's context ended
	detached bool
}

// Start starts a command and returns once it runs. When ctx ends, the process is killed.
func (s *Sandbox) Start(ctx context.Context, cmd Cmd, o IO) (*Process, error) {
	req := cmd.message()
	req.Stdin, req.StdinKeep = o.Stdin != nil || o.OpenStdin, o.KeepStdin
	if o.TTY != nil {
		req.Pty = o.TTY.message()
	}
	p := s.newProcess(ctx, o)
	p.owned = true
	p.ctx, p.limit = s.patient(p.ctx, cmd.Timeout, cmd.IdleTimeout)
	st, err := s.open(p.ctx, "process.start", req)
	if err != nil {
		defer p.cancel()
		return nil, fmt.Errorf("start %s: %w", cmd.Path, p.limit.stop(p.ctx, s, err))
	}
	// Both the caller and our patience may end it.
	stop := context.AfterFunc(p.ctx, st.Cancel)
	started, err := recvStarted(ctx, st)
	stop()
	if err != nil {
		st.Cancel()
		defer p.cancel()
		return nil, fmt.Errorf("start %s: %w", cmd.Path, p.limit.stop(p.ctx, s, err))
	}
	p.pid, p.tag = started.Pid, started.Tag
	p.run(ctx, st)
	return p, nil
}

// StartDetached starts a command that nobody waits for; [Sandbox.Attach] reaches it later.
func (s *Sandbox) StartDetached(ctx context.Context, cmd Cmd) (pid uint32, err error) {
	// Not with the message's own detach: the end of this stream says why a command
	// could not be run.
	req := cmd.message()
	req.Keep = true
	st, err := s.open(ctx, "process.start", req)
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	defer st.Cancel()
	started, err := recvStarted(ctx, st)
	if err == nil && started.Pid == 0 {
		var x msg.Exit
		if err = discard(ctx, st, &x); err == nil {
			err = exitOf(&x).Err
		}
	}
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return started.Pid, nil
}

// recvStarted reads the first message of process.start. A command that could not be run
// has no process: its stream ends with an Exit that says why.
func recvStarted(ctx context.Context, st *aether.Stream) (*msg.ProcessStarted, error) {
	f, err := st.Recv(ctx)
	if isEOF(err) {
		var x msg.Exit
		if err := st.Result(&x); err != nil {
			return nil, err
		}
		if e := exitOf(&x); e.Err != nil {
			return nil, e.Err
		}
		return nil, errs.New(errs.ProtocolError, "process.start", "the stream ended before the process started")
	}
	if err != nil {
		return nil, err
	}
	started := new(msg.ProcessStarted)
	if !f.IsMessage {
		return nil, errs.New(errs.ProtocolError, "process.start", "output came before the process started")
	}
	if err := started.ParseWire(f.Payload); err != nil {
		return nil, errs.Wrap(errs.ProtocolError, "process.start", "the first message cannot be read", err)
	}
	return started, nil
}

// AttachOptions say what of the output to send.
type AttachOptions struct {
	// StdoutFrom (also of a terminal) and StderrFrom are offsets to start at.
	StdoutFrom, StderrFrom uint64
	FromEnd                bool // only output from now on
	NoFollow               bool // end when what is kept has been sent
}

// Attach connects to a process that was started before; also to one that has ended,
// whose kept output and exit are then returned. When ctx ends, or a writer of o fails,
// only the attachment ends: the process is never signalled. The end of o.Stdin closes its
// stdin; a failed read of it does not.
func (s *Sandbox) Attach(ctx context.Context, sel Selector, o IO, a AttachOptions) (*Process, error) {
	p := s.newProcess(ctx, o)
	p.pid, p.tag = sel.PID, sel.Tag
	p.offsets[0].Store(a.StdoutFrom)
	p.offsets[1].Store(a.StderrFrom)
	st, err := s.open(p.ctx, "process.attach", &msg.AttachRequest{
		Process: sel.message(), StdoutOffset: a.StdoutFrom, StderrOffset: a.StderrFrom,
		FromEnd: a.FromEnd, NoFollow: a.NoFollow, Stdin: o.Stdin != nil || o.OpenStdin,
	})
	if err != nil {
		p.cancel()
		return nil, fmt.Errorf("attach to process %s: %w", sel, err)
	}
	p.run(ctx, st)
	return p, nil
}

func (s *Sandbox) newProcess(ctx context.Context, o IO) *Process {
	p := &Process{sb: s, io: o, done: make(chan struct{}), limit: &patience{}}
	// The streams outlive the caller's context for as long as a kill needs.
	p.ctx, p.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if o.Pipes {
		p.outR, p.outW = io.Pipe()
		p.errR, p.errW = io.Pipe()
		p.io.Stdout, p.io.Stderr = p.outW, p.errW
		// Nobody may be reading when the process is given up.
		context.AfterFunc(p.ctx, func() { p.closePipes(p.ctx.Err()) })
	}
	return p
}

// closePipes ends the readable ends; the first call decides how.
func (p *Process) closePipes(err error) {
	if p.outW != nil {
		p.outW.CloseWithError(err) // nil reads as io.EOF
		p.errW.CloseWithError(err)
	}
}

// run starts the goroutines of a process whose stream is open.
func (p *Process) run(ctx context.Context, st *aether.Stream) {
	p.stream = st
	p.stop = context.AfterFunc(ctx, func() {
		p.mu.Lock()
		p.caller = context.Cause(ctx)
		p.mu.Unlock()
		p.closePipes(p.caller) // or the exit could wait behind output that nobody reads
		if p.owned {
			p.endNow()
		}
		p.cancel()
	})
	go p.pump(st)
	if p.io.Stdin != nil {
		go func() {
			w := p.Stdin()
			// An error here is the process's end or a broken connection: Wait reports both.
			buf := make([]byte, stdinBuffer)
			if _, err := io.CopyBuffer(w, struct{ io.Reader }{p.io.Stdin}, buf); err == nil {
				w.Close()
			}
		}()
	}
}

// stdinBuffer is what is read at once of IO.Stdin: one frame.
const stdinBuffer = 64 << 10

// killGrace is how long a killed process may take to be reported as ended.
const killGrace = 5 * time.Second

// endNow kills the process and waits a little for its exit.
func (p *Process) endNow() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), killGrace)
	defer cancel()
	if p.sb.Kill(ctx, p.selector(), sigKill) != nil {
		return
	}
	select {
	case <-p.done:
	case <-ctx.Done():
	}
}

const sigKill = 9

func (p *Process) selector() Selector {
	if p.pid != 0 {
		return Selector{PID: p.pid}
	}
	return Selector{Tag: p.tag}
}

// PID returns the process's id inside the sandbox; 0 if it was attached to by tag.
func (p *Process) PID() uint32 { return p.pid }

// Tag returns the process's tag.
func (p *Process) Tag() string { return p.tag }

// Stdout reads the process's output; only with IO.Pipes.
func (p *Process) Stdout() io.Reader { return p.outR }

// Stderr reads the process's error output; only with IO.Pipes.
func (p *Process) Stderr() io.Reader { return p.errR }

// Offsets returns how much of stdout (or the terminal) and stderr has been delivered:
// where an attach would go on.
func (p *Process) Offsets() (stdout, stderr uint64) {
	return p.offsets[0].Load(), p.offsets[1].Load()
}

// Wait returns how the process ended. Its error is of the connection, the caller's
// context or a writer of IO, never of the command.
func (p *Process) Wait() (Exit, error) {
	<-p.done
	return p.exit, p.err
}

// Done is closed when Wait would return.
func (p *Process) Done() <-chan struct{} { return p.done }

// Signal sends a signal to the whole process group.
func (p *Process) Signal(ctx context.Context, signal int) error {
	return p.sb.Kill(ctx, p.selector(), signal)
}

// Resize changes the terminal's size.
func (p *Process) Resize(ctx context.Context, size Size) error {
	if err := p.sb.call(ctx, "process.resize", &msg.ResizeRequest{Process: p.selector().message(), Size: size.message()}, &msg.Empty{}); err != nil {
		return fmt.Errorf("resize process %s: %w", p.selector(), err)
	}
	return nil
}

// Detach ends the attachment and leaves the process running. Wait then returns no error
// and an empty Exit.
func (p *Process) Detach() {
	p.mu.Lock()
	p.detached = true
	p.mu.Unlock()
	p.stop()
	p.cancel()
	<-p.done
}

// Stdin writes to the process. Close closes its stdin.
func (p *Process) Stdin() io.WriteCloser { return stdinWriter{p} }

type stdinWriter struct{ p *Process }

func (w stdinWriter) Write(b []byte) (int, error) {
	st, err := w.p.current()
	if err != nil {
		return 0, err
	}
	if err := st.Send(w.p.ctx, aether.KindInput, b); err != nil {
		return 0, fmt.Errorf("write stdin: %w", err)
	}
	return len(b), nil
}

// Close says it in a message, not by ending our direction: the stream must stay usable
// for the process to be told more.
func (w stdinWriter) Close() error {
	st, err := w.p.current()
	if err != nil {
		return err
	}
	if err := st.SendMessage(w.p.ctx, &msg.ProcessControl{CloseStdin: true}); err != nil {
		return fmt.Errorf("close stdin: %w", err)
	}
	return nil
}

// current returns the stream; while it is being made again it waits for it.
func (p *Process) current() (*aether.Stream, error) {
	for {
		p.mu.Lock()
		st := p.stream
		p.mu.Unlock()
		if st != nil {
			return st, nil
		}
		select {
		case <-p.done:
			return nil, errors.Join(errs.New(errs.ProcessExited, "process.input", "the process's stream has ended"), p.err)
		case <-time.After(retryMin):
		}
	}
}
