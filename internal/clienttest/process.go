package clienttest

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// log keeps one kind of output whole.
type log struct {
	mu      *sync.Mutex
	changed *sync.Cond
	b       []byte
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, p...)
	l.changed.Broadcast()
	return len(p), nil
}

type process struct {
	info     msg.ProcessInfo
	cmd      *exec.Cmd
	stdin    io.WriteCloser
	mu       sync.Mutex
	changed  *sync.Cond
	out, err log
	exit     *msg.Exit
	resized  []msg.PtySize
}

// startProcess runs a command in the directory that stands for the sandbox's root.
func startProcess(root string, req *msg.StartRequest) *process {
	p := &process{}
	p.changed = sync.NewCond(&p.mu)
	p.out, p.err = log{mu: &p.mu, changed: p.changed}, log{mu: &p.mu, changed: p.changed}
	p.info = msg.ProcessInfo{Start: req, Tag: req.Tag, Running: true, StartedUnixMs: uint64(time.Now().UnixMilli())}
	p.cmd = exec.Command(req.Cmd, req.Args...)
	p.cmd.Dir = root + req.Cwd
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.err
	p.cmd.WaitDelay = 100 * time.Millisecond
	p.cmd.Env = os.Environ()
	for k, v := range req.Envs {
		p.cmd.Env = append(p.cmd.Env, k+"="+v)
	}
	if req.Stdin {
		p.stdin, _ = p.cmd.StdinPipe()
	}
	start := time.Now()
	if err := p.cmd.Start(); err != nil {
		p.exit = &msg.Exit{ExitCode: 127, ErrorCode: string(errs.CommandNotFound), Error: err.Error()}
		if errors.Is(err, fs.ErrPermission) {
			p.exit.ExitCode, p.exit.ErrorCode = 126, string(errs.CommandNotExec)
		}
		return p
	}
	p.info.Pid = uint32(p.cmd.Process.Pid)
	var timedOut bool
	timer := time.AfterFunc(time.Hour, func() {})
	if req.TimeoutMs > 0 {
		timer = time.AfterFunc(time.Duration(req.TimeoutMs)*time.Millisecond, func() {
			p.mu.Lock()
			timedOut = true
			p.mu.Unlock()
			p.signal(syscall.SIGKILL)
		})
	}
	go func() {
		p.cmd.Wait()
		timer.Stop()
		p.mu.Lock()
		defer p.mu.Unlock()
		x := &msg.Exit{Exited: true, ExitCode: int32(p.cmd.ProcessState.ExitCode()), DurationUs: uint64(time.Since(start).Microseconds()), TimedOut: timedOut}
		if ws := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() {
			x.Exited, x.Signal, x.ExitCode = false, int32(ws.Signal()), 128+int32(ws.Signal())
		}
		x.StdoutBytes, x.StderrBytes = uint64(len(p.out.b)), uint64(len(p.err.b))
		p.exit = x
		p.changed.Broadcast()
	}()
	return p
}

func (p *process) signal(s syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exit != nil {
		return errs.New(errs.ProcessExited, "process.signal", "the process has ended")
	}
	return syscall.Kill(-p.cmd.Process.Pid, s)
}

// follow sends output from the offsets on, and returns the exit.
func (p *process) follow(ctx context.Context, st *aether.Stream, out, errOut uint64, noFollow bool) (*msg.Exit, error) {
	stop := context.AfterFunc(ctx, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.changed.Broadcast()
	})
	defer stop()
	for {
		p.mu.Lock()
		for ctx.Err() == nil && uint64(len(p.out.b)) <= out && uint64(len(p.err.b)) <= errOut && p.exit == nil && !noFollow {
			p.changed.Wait()
		}
		o, e, x := tail(p.out.b, out), tail(p.err.b, errOut), p.exit
		p.mu.Unlock()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if len(o) == 0 && len(e) == 0 {
			if x == nil {
				x = &msg.Exit{}
			}
			return x, nil
		}
		if len(o) > 0 {
			if err := st.Send(ctx, aether.KindStdout, o); err != nil {
				return nil, err
			}
		}
		if len(e) > 0 {
			if err := st.Send(ctx, aether.KindStderr, e); err != nil {
				return nil, err
			}
		}
		out, errOut = out+uint64(len(o)), errOut+uint64(len(e))
	}
}

func tail(b []byte, from uint64) []byte {
	if from >= uint64(len(b)) {
		return nil
	}
	return append([]byte(nil), b[from:]...)
}

// input takes a stream's data to the process until the stream ends.
func (p *process) input(ctx context.Context, st *aether.Stream, keep bool) {
	for {
		f, err := st.Recv(ctx)
		if err != nil {
			if p.stdin != nil && !keep {
				p.stdin.Close()
			}
			return
		}
		if !f.IsMessage {
			if p.stdin != nil {
				p.stdin.Write(f.Payload)
			}
			continue
		}
		var c msg.ProcessControl
		if c.ParseWire(f.Payload) == nil && c.CloseStdin && p.stdin != nil {
			p.stdin.Close()
		}
	}
}

func (p *process) describe() *msg.ProcessInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	info := p.info
	info.Running, info.Exit = p.exit == nil, p.exit
	info.StdoutBytes, info.StderrBytes = uint64(len(p.out.b)), uint64(len(p.err.b))
	return &info
}
