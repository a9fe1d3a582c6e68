package serve

import (
	"context"
	"io"
	"strconv"
	"syscall"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
	"dsec/internal/guest/proc"
)

// Bounds of the output in one answer, which a frame must hold.
const (
	defaultOutput = 256 << 10
	maxOutput     = 480 << 10
)

func spec(r *msg.StartRequest) (proc.Spec, error) {
	if r == nil {
		return proc.Spec{}, errs.New(errs.BadRequest, "guest.start", "start is missing")
	}
	s := proc.Spec{
		Cmd: r.Cmd, Args: r.Args, Env: r.Envs, Cwd: r.Cwd, User: r.User, Tag: r.Tag, Stdin: r.Stdin,
		Timeout: millis(r.TimeoutMs), IdleTimeout: millis(r.IdleTimeoutMs),
		OutputLimit: int64(min(r.OutputLimit, 1<<40)), SpillLimit: int64(min(r.SpillLimit, 1<<40)), Keep: r.Keep,
	}
	if r.Pty != nil {
		size, err := ptySize(r.Pty)
		if err != nil {
			return s, err
		}
		s.PTY = &size
	}
	return s, nil
}

func millis(ms uint64) time.Duration {
	return time.Duration(min(ms, uint64(1<<62)/uint64(time.Millisecond))) * time.Millisecond
}

func ptySize(p *msg.PtySize) (proc.Size, error) {
	if p == nil || p.Cols > 65535 || p.Rows > 65535 {
		return proc.Size{}, errs.New(errs.BadRequest, "guest.pty", "a terminal's size is missing or beyond 65535")
	}
	return proc.Size{Cols: uint16(p.Cols), Rows: uint16(p.Rows)}, nil
}

func outputLimit(n uint64) (int, error) {
	switch {
	case n == 0:
		return defaultOutput, nil
	case n > maxOutput:
		return 0, errs.New(errs.BadRequest, "guest.output", "max_output is above "+strconv.Itoa(maxOutput)+"; use a stream for more")
	}
	return int(n), nil
}

func exitMessage(e proc.Exit) *msg.Exit {
	return &msg.Exit{
		ExitCode: int32(e.Code), Exited: e.Exited, Signal: int32(e.Signal), TimedOut: e.TimedOut, IdleTimedOut: e.IdleTimeout,
		ErrorCode: string(e.ErrorCode), Error: e.Error, StdoutBytes: uint64(e.StdoutBytes), StderrBytes: uint64(e.StderrBytes),
		DurationUs: uint64(e.Duration.Microseconds()), CpuUs: uint64(e.CPU.Microseconds()), MaxRssBytes: uint64(e.MaxRSS),
		OomKilled: e.OOM.Killed, OomKills: uint64(e.OOM.Kills), MemoryLimitBytes: uint64(e.OOM.Limit),
	}
}

// processExec runs a command to its end. A caller that goes away, or whose deadline
// passes, takes the command with it: nobody else knows of it.
func (g *Guest) processExec(ctx context.Context, _ *aether.Stream, r *msg.ExecRequest) (*msg.ExecResult, error) {
	limit, err := outputLimit(r.MaxOutput)
	if err != nil {
		return nil, err
	}
	sp, err := spec(r.Start)
	if err != nil {
		return nil, err
	}
	if r.Start.Detach || r.Start.StdinKeep {
		return nil, errs.New(errs.BadRequest, "guest.exec", "detach and stdin_keep are for process.start")
	}
	if len(r.Stdin) > 0 {
		sp.Stdin = true
	}
	p, err := g.Procs.Start(sp)
	if err != nil {
		return nil, err
	}
	defer p.Release()
	if sp.Stdin && p.Pid != 0 {
		if sp.PTY != nil {
			go p.Write(ctx, r.Stdin)
		} else {
			go func() {
				p.Write(ctx, r.Stdin) // a command need not read it
				p.CloseStdin()
			}()
		}
	}
	out, errOut := proc.NewCollector(limit), proc.NewCollector(limit)
	reader := p.Log.Read(proc.From{})
	defer reader.Close()
	for {
		piece, err := reader.Next(ctx)
		if err == io.EOF {
			break
		}
		if err != nil {
			p.KillAll()
			return nil, err
		}
		collect(piece, out, errOut)
	}
	e, err := p.Wait(ctx)
	if err != nil {
		return nil, err
	}
	res := &msg.ExecResult{Exit: exitMessage(e), Pid: uint32(p.Pid)}
	var cut1, cut2 bool
	res.Stdout, cut1 = out.Bytes()
	res.Stderr, cut2 = errOut.Bytes()
	res.Truncated = cut1 || cut2
	return res, nil
}

func collect(p proc.Piece, out, errOut *proc.Collector) {
	c := out
	if p.Kind == proc.Stderr {
		c = errOut
	}
	if p.Data == nil {
		c.Gap(p.Gap - p.Off)
		return
	}
	c.Write(p.Data)
}

// processStart starts a process and follows it. The process outlives the stream, but for
// its stdin, which is closed with it unless stdin_keep is set.
func (g *Guest) processStart(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var r msg.StartRequest
	if err := s.Parse(&r); err != nil {
		return nil, err
	}
	sp, err := spec(&r)
	if err != nil {
		return nil, err
	}
	p, err := g.Procs.Start(sp)
	if err != nil {
		return nil, err
	}
	defer p.Release()
	reader := p.Log.Read(proc.From{})
	defer reader.Close()
	err = s.SendMessage(ctx, &msg.ProcessStarted{Pid: uint32(p.Pid), Tag: sp.Tag, StartedUnixMs: uint64(p.Started.UnixMilli())})
	if err != nil || r.Detach {
		if !r.StdinKeep {
			closeStdin(p)
		}
		return nil, err
	}
	return g.follow(ctx, s, p, reader, true, r.StdinKeep)
}

func closeStdin(p *proc.Process) {
	if p.Spec.Stdin && p.Spec.PTY == nil {
		p.CloseStdin()
	}
}

// processAttach follows a process from given offsets. Its stream is not the process's
// owner: losing it does not close stdin, its FIN does.
func (g *Guest) processAttach(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var r msg.AttachRequest
	if err := s.Parse(&r); err != nil {
		return nil, err
	}
	p, err := g.find(r.Process)
	if err != nil {
		return nil, err
	}
	if r.StdoutOffset > 1<<62 || r.StderrOffset > 1<<62 {
		return nil, errs.New(errs.BadRequest, "guest.attach", "an offset is beyond 2^62")
	}
	reader := p.Log.Read(proc.From{
		Stdout: int64(r.StdoutOffset), Stderr: int64(r.StderrOffset), End: r.FromEnd, NoFollow: r.NoFollow,
	})
	defer reader.Close()
	return g.follow(ctx, s, p, reader, r.Stdin, true)
}

// follow sends a process's output and takes its input until it has ended. keep says that
// a lost stream leaves stdin open.
func (g *Guest) follow(ctx context.Context, s *aether.Stream, p *proc.Process, r *proc.Reader, stdin, keep bool) (aether.Message, error) {
	inCtx, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		input(inCtx, s, p, stdin)
	}()
	err := send(ctx, s, p, r)
	stop()
	<-done
	if err != nil {
		if !keep {
			closeStdin(p)
		}
		return nil, err
	}
	e, ok := p.Exit()
	if !ok {
		return nil, nil // without follow, and it still runs
	}
	return exitMessage(e), nil
}

// send sends everything that r gives.
func send(ctx context.Context, s *aether.Stream, p *proc.Process, r *proc.Reader) error {
	for {
		piece, err := r.Next(ctx)
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = sendPiece(ctx, s, piece, p.Spec.PTY != nil)
		}
		if err != nil {
			return err
		}
	}
}

func sendPiece(ctx context.Context, s *aether.Stream, p proc.Piece, pty bool) error {
	kind := aether.KindStdout
	switch {
	case pty && p.Kind == proc.Stdout:
		kind = aether.KindPTY
	case p.Kind == proc.Stderr:
		kind = aether.KindStderr
	}
	if p.Data == nil {
		return s.SendMessage(ctx, &msg.Gap{Kind: uint32(kind), From: uint64(p.Off), To: uint64(p.Gap)})
	}
	return s.Send(ctx, kind, p.Data)
}

// input takes stdin and control messages until the stream or ctx ends. A process that no
// longer reads is no error here: its end comes by the other way.
func input(ctx context.Context, s *aether.Stream, p *proc.Process, stdin bool) {
	for {
		f, err := s.Recv(ctx)
		if err == io.EOF && stdin && ctx.Err() == nil {
			closeStdin(p)
		}
		if err != nil {
			return
		}
		if !f.IsMessage {
			if stdin && len(f.Payload) > 0 {
				p.Write(ctx, f.Payload)
			}
			continue
		}
		var c msg.ProcessControl
		if c.ParseWire(f.Payload) != nil {
			continue
		}
		if c.Resize != nil {
			if size, err := ptySize(c.Resize); err == nil {
				p.Resize(size)
			}
		}
		if c.Signal != 0 {
			p.Signal(syscall.Signal(c.Signal), false)
		}
		if c.CloseStdin && stdin {
			closeStdin(p)
		}
	}
}

func (g *Guest) find(s *msg.Selector) (*proc.Process, error) {
	if s == nil {
		return nil, errs.New(errs.BadRequest, "guest.process", "process is missing")
	}
	return g.Procs.Find(int(s.Pid), s.Tag)
}

// Bounds of a page of processes, which a frame must hold. A running process may have
// arguments and an environment that do not fit.
const (
	pageBytes = 256 << 10
	infoBytes = 64 << 10
)

func (g *Guest) processList(_ context.Context, _ *aether.Stream, r *msg.ProcessListRequest) (*msg.ProcessList, error) {
	out := &msg.ProcessList{}
	size := 0
	var buf []byte
	for _, p := range g.Procs.List() {
		if p.Order() <= r.After {
			continue
		}
		info := processInfo(p)
		buf = info.AppendWire(buf[:0])
		if size += len(buf); size > pageBytes && len(out.Processes) > 0 {
			break
		}
		out.Processes, out.Next = append(out.Processes, info), p.Order()
	}
	if size <= pageBytes {
		out.Next = 0
	}
	return out, nil
}

func processInfo(p *proc.Process) *msg.ProcessInfo {
	sp, _ := p.Spec.Brief(infoBytes)
	if sp.User == "" {
		sp.User = p.User.Name
	}
	start := &msg.StartRequest{
		Cmd: sp.Cmd, Args: sp.Args, Envs: sp.Env, Cwd: sp.Cwd, User: sp.User, Tag: sp.Tag, Stdin: sp.Stdin,
		TimeoutMs: uint64(sp.Timeout.Milliseconds()), IdleTimeoutMs: uint64(sp.IdleTimeout.Milliseconds()),
		OutputLimit: uint64(sp.OutputLimit), SpillLimit: uint64(sp.SpillLimit), Keep: sp.Keep,
	}
	if sp.PTY != nil {
		start.Pty = &msg.PtySize{Cols: uint32(sp.PTY.Cols), Rows: uint32(sp.PTY.Rows)}
	}
	n, m := p.Log.Sizes()
	a, b := p.Log.Kept()
	info := &msg.ProcessInfo{
		Start: start, Pid: uint32(p.Pid), Tag: sp.Tag, Running: true, StartedUnixMs: uint64(p.Started.UnixMilli()),
		StdoutBytes: uint64(n), StderrBytes: uint64(m), StdoutKeptFrom: uint64(a), StderrKeptFrom: uint64(b), Session: sp.Session,
	}
	if e, ok := p.Exit(); ok {
		info.Running, info.Exit = false, exitMessage(e)
		info.EndedUnixMs = uint64(p.Started.Add(e.Duration).UnixMilli())
	}
	return info
}

func (g *Guest) processInput(ctx context.Context, _ *aether.Stream, r *msg.InputRequest) (*msg.Empty, error) {
	p, err := g.find(r.Process)
	if err != nil {
		return nil, err
	}
	if r.Pty != (p.Spec.PTY != nil) {
		return nil, errs.New(errs.BadRequest, "guest.input", "pty says whether the process has a terminal; this one is the other kind")
	}
	if p.Spec.PTY == nil && !p.Spec.Stdin {
		return nil, errs.New(errs.BadRequest, "guest.input", "the process was started without stdin")
	}
	return &msg.Empty{}, p.Write(ctx, r.Data)
}

func (g *Guest) processCloseStdin(_ context.Context, _ *aether.Stream, r *msg.SelectRequest) (*msg.Empty, error) {
	p, err := g.find(r.Process)
	if err != nil {
		return nil, err
	}
	return &msg.Empty{}, p.CloseStdin()
}

func (g *Guest) processSignal(_ context.Context, _ *aether.Stream, r *msg.SignalRequest) (*msg.Empty, error) {
	if r.All {
		if r.Process != nil {
			return nil, errs.New(errs.BadRequest, "guest.signal", "all and a process are named")
		}
		return &msg.Empty{}, g.Procs.SignalAll(syscall.Signal(r.Signal))
	}
	p, err := g.find(r.Process)
	if err != nil {
		return nil, err
	}
	return &msg.Empty{}, p.Signal(syscall.Signal(r.Signal), r.OnlyLeader)
}

func (g *Guest) processResize(_ context.Context, _ *aether.Stream, r *msg.ResizeRequest) (*msg.Empty, error) {
	p, err := g.find(r.Process)
	if err != nil {
		return nil, err
	}
	size, err := ptySize(r.Size)
	if err != nil {
		return nil, err
	}
	return &msg.Empty{}, p.Resize(size)
}

func (g *Guest) processWait(ctx context.Context, _ *aether.Stream, r *msg.SelectRequest) (*msg.Exit, error) {
	p, err := g.find(r.Process)
	if err != nil {
		return nil, err
	}
	e, err := p.Wait(ctx)
	if err != nil {
		return nil, err
	}
	return exitMessage(e), nil
}
