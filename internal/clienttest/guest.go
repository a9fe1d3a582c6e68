package clienttest

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"sync"
	"syscall"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// guest stands in for a sandbox's agent.
type guest struct {
	root     string
	mu       sync.Mutex
	procs    []*process
	sessions map[string]*msg.SessionInfo
	methods  map[string]aether.Handler
}

func newGuest(root string) *guest {
	g := &guest{root: root, sessions: map[string]*msg.SessionInfo{}}
	g.methods = g.handlers()
	return g
}

// close ends what runs, as the end of a sandbox does.
func (g *guest) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, p := range g.procs {
		p.signal(syscall.SIGKILL)
	}
}

func (g *guest) handlers() map[string]aether.Handler {
	return map[string]aether.Handler{
		"process.exec":   aether.Unary(g.exec),
		"process.start":  g.start,
		"process.attach": g.attach,
		"process.list":   aether.Unary(g.list),
		"process.signal": aether.Unary(g.signal),
		"process.resize": aether.Unary(g.resize),
		"session.open":   aether.Unary(g.sessionOpen),
		"session.exec":   aether.Unary(g.sessionExec),
		"session.run":    g.sessionRun,
		"session.list":   aether.Unary(g.sessionList),
		"session.close":  aether.Unary(g.sessionClose),
		"guest.info": aether.Unary(func(context.Context, *aether.Stream, *msg.Empty) (*msg.GuestInfo, error) {
			return &msg.GuestInfo{Version: "test", Shell: "/bin/sh", DefaultUser: "root", DefaultCwd: "/"}, nil
		}),
		"file.stat":   aether.Unary(g.stat),
		"file.list":   aether.Unary(g.readDir),
		"file.mkdir":  aether.Unary(g.mkdir),
		"file.move":   aether.Unary(g.move),
		"file.remove": aether.Unary(g.remove),
		"file.chmod":  aether.Unary(g.chmod),
		"file.chown":  aether.Unary(g.chown),
		"file.get":    aether.Unary(g.get),
		"file.put":    aether.Unary(g.put),
		"file.read":   g.read,
		"file.write":  g.write,
		"file.pack":   g.pack,
		"file.unpack": g.unpack,
		"file.watch":  g.watch,
		"port.dial":   g.dial,
		"port.list": aether.Unary(func(context.Context, *aether.Stream, *msg.Empty) (*msg.PortList, error) {
			return &msg.PortList{Ports: []*msg.PortInfo{{Port: 80, Address: "127.0.0.1"}}}, nil
		}),
	}
}

func (g *guest) launch(req *msg.StartRequest) *process {
	p := startProcess(g.root, req)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.procs = append(g.procs, p)
	return p
}

func (g *guest) find(s *msg.Selector) (*process, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := len(g.procs) - 1; i >= 0; i-- {
		if p := g.procs[i]; s.Pid != 0 && p.info.Pid == s.Pid || s.Tag != "" && p.info.Tag == s.Tag {
			return p, nil
		}
	}
	return nil, errs.New(errs.ProcessNotFound, "process.find", fmt.Sprintf("there is no process %d%s", s.Pid, s.Tag))
}

func (g *guest) exec(ctx context.Context, _ *aether.Stream, req *msg.ExecRequest) (*msg.ExecResult, error) {
	p := g.launch(req.Start)
	if p.stdin != nil {
		p.stdin.Write(req.Stdin)
		p.stdin.Close()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.exit == nil {
		p.changed.Wait()
	}
	res := &msg.ExecResult{Exit: p.exit, Stdout: bytes.Clone(p.out.b), Stderr: bytes.Clone(p.err.b), Pid: p.info.Pid}
	if m := int(req.MaxOutput); m > 0 && len(res.Stdout) > m {
		res.Stdout, res.Truncated = res.Stdout[len(res.Stdout)-m:], true
	}
	return res, nil
}

func (g *guest) start(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	req := new(msg.StartRequest)
	if err := st.Parse(req); err != nil {
		return nil, err
	}
	p := g.launch(req)
	if err := st.SendMessage(ctx, &msg.ProcessStarted{Pid: p.info.Pid, Tag: req.Tag, StartedUnixMs: p.info.StartedUnixMs}); err != nil {
		return nil, err
	}
	if req.Detach {
		if p.info.Pid == 0 {
			return p.exit, nil
		}
		return &msg.Empty{}, nil
	}
	return g.serve(ctx, st, p, 0, 0, false, req.StdinKeep)
}

func (g *guest) serve(ctx context.Context, st *aether.Stream, p *process, out, errOut uint64, noFollow, keep bool) (aether.Message, error) {
	ictx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.input(ictx, st, keep)
	}()
	x, err := p.follow(ctx, st, out, errOut, noFollow)
	cancel()
	<-done
	if err != nil {
		return nil, err
	}
	return x, nil
}

func (g *guest) attach(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	var req msg.AttachRequest
	if err := st.Parse(&req); err != nil {
		return nil, err
	}
	p, err := g.find(req.Process)
	if err != nil {
		return nil, err
	}
	out, errOut := req.StdoutOffset, req.StderrOffset
	if req.FromEnd {
		info := p.describe()
		out, errOut = info.StdoutBytes, info.StderrBytes
	}
	if !req.Stdin {
		x, err := p.follow(ctx, st, out, errOut, req.NoFollow)
		if err != nil {
			return nil, err
		}
		return x, nil
	}
	return g.serve(ctx, st, p, out, errOut, req.NoFollow, true)
}

func (g *guest) list(context.Context, *aether.Stream, *msg.ProcessListRequest) (*msg.ProcessList, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := &msg.ProcessList{}
	for _, p := range g.procs {
		l.Processes = append(l.Processes, p.describe())
	}
	return l, nil
}

func (g *guest) signal(_ context.Context, _ *aether.Stream, req *msg.SignalRequest) (*msg.Empty, error) {
	p, err := g.find(req.Process)
	if err != nil {
		return nil, err
	}
	return &msg.Empty{}, p.signal(syscall.Signal(req.Signal))
}

func (g *guest) resize(_ context.Context, _ *aether.Stream, req *msg.ResizeRequest) (*msg.Empty, error) {
	p, err := g.find(req.Process)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.resized = append(p.resized, *req.Size)
	return &msg.Empty{}, nil
}

func (g *guest) sessionOpen(_ context.Context, _ *aether.Stream, req *msg.SessionOpenRequest) (*msg.SessionInfo, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	info := &msg.SessionInfo{Id: req.Id, Shell: "/bin/sh", User: req.User}
	if info.Id == "" {
		info.Id = fmt.Sprintf("session%d", len(g.sessions)+1)
	}
	g.sessions[info.Id] = info
	return info, nil
}

func (g *guest) session(id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.sessions[id] == nil {
		return errs.New(errs.SessionNotFound, "session.find", "there is no session "+id)
	}
	g.sessions[id].Commands++
	return nil
}

// runLine runs each line in a shell of its own: state does not carry over in the fake.
func (g *guest) runLine(req *msg.SessionRunRequest) (*msg.SessionResult, error) {
	if err := g.session(req.Id); err != nil {
		return nil, err
	}
	cmd := exec.Command("/bin/sh", "-c", req.Command)
	var out, errOut bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = g.root, &out, &errOut
	cmd.Run()
	return &msg.SessionResult{ExitCode: int32(cmd.ProcessState.ExitCode()), Stdout: out.Bytes(), Stderr: errOut.Bytes()}, nil
}

func (g *guest) sessionExec(_ context.Context, _ *aether.Stream, req *msg.SessionRunRequest) (*msg.SessionResult, error) {
	return g.runLine(req)
}

func (g *guest) sessionRun(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	var req msg.SessionRunRequest
	if err := st.Parse(&req); err != nil {
		return nil, err
	}
	r, err := g.runLine(&req)
	if err != nil {
		return nil, err
	}
	if err := st.Send(ctx, aether.KindStdout, r.Stdout); err != nil {
		return nil, err
	}
	if err := st.Send(ctx, aether.KindStderr, r.Stderr); err != nil {
		return nil, err
	}
	return &msg.SessionResult{ExitCode: r.ExitCode}, nil
}

func (g *guest) sessionList(context.Context, *aether.Stream, *msg.Empty) (*msg.SessionList, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := &msg.SessionList{}
	for _, s := range g.sessions {
		l.Sessions = append(l.Sessions, s)
	}
	return l, nil
}

func (g *guest) sessionClose(_ context.Context, _ *aether.Stream, req *msg.SessionSelect) (*msg.Empty, error) {
	if err := g.session(req.Id); err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.sessions, req.Id)
	return &msg.Empty{}, nil
}
