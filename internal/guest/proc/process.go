package proc

import (
	"context"
	"errors"
	"os"
	"strconv"
	"syscall"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/guest/clock"
)

// Clock is what the process's limits are measured with.
func (p *Process) Clock() *clock.Clock { return p.table.cfg.Clock }

// Done is closed when the process has ended and what it wrote is in the log.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit returns how the process ended; ok is false while it runs.
func (p *Process) Exit() (e Exit, ok bool) {
	select {
	case <-p.done:
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.exit, true
	default:
		return Exit{}, false
	}
}

// Wait returns how the process ended, when it has.
func (p *Process) Wait(ctx context.Context) (Exit, error) {
	select {
	case <-p.done:
	case <-ctx.Done():
		return Exit{}, ctx.Err()
	}
	e, _ := p.Exit()
	return e, nil
}

// exited is called by the reaper.
func (p *Process) exited(ws syscall.WaitStatus, ru syscall.Rusage) {
	if p.Log.spill != nil {
		go p.finish(ws, ru) // a slow disk must not hold up other children's ends
		return
	}
	p.finish(ws, ru)
}

func (p *Process) finish(ws syscall.WaitStatus, ru syscall.Rusage) {
	for _, s := range p.sources {
		s.drain(p.Spec.PTY != nil)
	}
	e := Exit{
		Code: ws.ExitStatus(), Exited: ws.Exited(),
		Duration: p.table.cfg.Now().Sub(p.Started),
		CPU:      time.Duration(ru.Utime.Nano() + ru.Stime.Nano()),
		MaxRSS:   ru.Maxrss << 10,
	}
	if ws.Signaled() {
		e.Signal = ws.Signal()
		e.Code = 128 + int(e.Signal)
	}
	switch p.killed.Load() {
	case killTimeout:
		e.TimedOut = true
	case killIdle:
		e.IdleTimeout = true
	}
	e.OOM = p.table.cfg.Memory.Since(p.oom, e.Code, p.killed.Load() != 0)
	e.StdoutBytes, e.StderrBytes = p.Log.Sizes()
	p.mu.Lock()
	p.exit, p.over = e, true
	p.sources = nil
	for _, t := range p.timers {
		t.Stop()
	}
	stdin := p.stdin
	p.stdin = nil
	p.mu.Unlock()
	if stdin != nil && stdin != p.pty {
		stdin.Close()
	}
	// First what others look at once they know of the end: the tag is free, and who has read
	// the log to its end finds how the process ended.
	p.table.ended(p)
	close(p.done)
	p.Log.end()
}

// arm starts the timers of the limits.
func (p *Process) arm() {
	if d := p.Spec.Timeout; d > 0 {
		d = max(d-p.waited, time.Millisecond)
		p.timers = append(p.timers, p.Clock().AfterFunc(d, func() {
			p.killed.CompareAndSwap(0, killTimeout)
			p.KillAll()
		}))
	}
	if d := p.Spec.IdleTimeout; d > 0 {
		p.mu.Lock() // the timer is set before the function below can use it
		defer p.mu.Unlock()
		i := len(p.timers)
		p.timers = append(p.timers, p.Clock().AfterFunc(d, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.over {
				return
			}
			if left := d - p.Log.quiet(); left > 0 {
				p.timers[i].Reset(left)
				return
			}
			p.killed.CompareAndSwap(0, killIdle)
			go p.KillAll()
		}))
	}
}

// Signal sends sig to the process's group, or to the process alone. SIGKILL to the group
// takes the whole session. Of a process that has ended it reaches what is left of its
// session. Errors: errs.ProcessExited, errs.BadRequest.
func (p *Process) Signal(sig syscall.Signal, onlyLeader bool) error {
	if sig < 0 || sig > 64 {
		return errs.New(errs.BadRequest, "guest.signal", "signal "+strconv.Itoa(int(sig))+" does not exist")
	}
	if sig == syscall.SIGKILL {
		p.killed.CompareAndSwap(0, killAsked)
		if !onlyLeader && p.KillAll() == nil {
			return nil
		}
	}
	err := p.table.reaper.Signal(p.Pid, sig, !onlyLeader)
	switch {
	case err == syscall.ESRCH && !onlyLeader && p.signalLeft(sig):
		return nil
	case err == syscall.ESRCH:
		return p.gone("guest.signal")
	}
	return errs.Wrap(errs.InternalError, "guest.signal", "signal process "+strconv.Itoa(p.Pid), err)
}

// killRounds bounds how often the processes of a session are looked up to be killed: they
// may fork meanwhile.
const killRounds = 16

// signalLeft sends sig to what the process, which has been reaped, left of its session. It
// needs no new process, so it works at the sandbox's limit too. As long as a member lives
// the kernel gives the session's number to no other process.
func (p *Process) signalLeft(sig syscall.Signal) (any bool) {
	for range killRounds {
		sent := false
		if _, reused := stat(p.Pid); reused || p.Pid == 0 {
			break
		}
		for _, m := range sessionMembers(p.Pid) {
			if !m.zombie && sessionOf(m.pid) == p.Pid && syscall.Kill(m.pid, sig) == nil {
				sent, any = true, true
			}
		}
		if !sent || sig != syscall.SIGKILL {
			break
		}
	}
	return any
}

// SignalAll sends sig to every process of the sandbox but this program, which must be its
// PID 1. None being there is no error. It needs no new process, and no fork escapes a
// SIGKILL. Errors: errs.BadRequest, errs.NotSupported.
func (t *Table) SignalAll(sig syscall.Signal) error {
	const phase = "guest.signal"
	if sig < 1 || sig > 64 {
		return errs.New(errs.BadRequest, phase, "signal "+strconv.Itoa(int(sig))+" does not exist")
	}
	if os.Getpid() != 1 { // then "all" would be those of the machine
		return errs.New(errs.NotSupported, phase, "the guest is not PID 1")
	}
	if sig == syscall.SIGKILL {
		t.mu.Lock()
		for _, p := range t.live {
			p.killed.CompareAndSwap(0, killAsked)
		}
		t.mu.Unlock()
	}
	if err := syscall.Kill(-1, sig); err != nil && err != syscall.ESRCH {
		return errs.Wrap(errs.InternalError, phase, "signal all processes", err)
	}
	return nil
}

func (p *Process) gone(phase string) error {
	return errs.New(errs.ProcessExited, phase, "process "+strconv.Itoa(p.Pid)+" has ended, and nothing is left of its session")
}

// KillAll kills the process, its group and what else is left of its session.
func (p *Process) KillAll() error {
	// Looked up before, killed after the leader, which must not see its children die and
	// go on. While the lock is held the leader is not reaped, so its number stays its own.
	members := sessionMembers(p.Pid)
	p.table.reaper.mu.Lock()
	_, alive := p.table.reaper.exited[p.Pid]
	if alive {
		syscall.Kill(-p.Pid, syscall.SIGKILL)
		syscall.Kill(p.Pid, syscall.SIGKILL)
		for _, m := range members {
			if m.pid != p.Pid && sessionOf(m.pid) == p.Pid {
				syscall.Kill(m.pid, syscall.SIGKILL)
			}
		}
	}
	p.table.reaper.mu.Unlock()
	if !alive {
		return p.gone("guest.kill")
	}
	return nil
}

// Write gives b to the process's stdin or terminal; it waits while the process does not
// read. Errors: errs.ProcessExited (also when stdin is closed), ctx's.
func (p *Process) Write(ctx context.Context, b []byte) error {
	p.mu.Lock()
	f := p.stdin
	p.mu.Unlock()
	if f == nil {
		return errs.New(errs.ProcessExited, "guest.input", "stdin of process "+strconv.Itoa(p.Pid)+" is closed")
	}
	stop := context.AfterFunc(ctx, func() { f.SetWriteDeadline(time.Unix(1, 0)) })
	_, err := f.Write(b)
	if !stop() {
		// Another writer may still be at work.
		f.SetWriteDeadline(time.Time{})
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ctx.Err()
	case errors.Is(err, syscall.EPIPE), errors.Is(err, os.ErrClosed), errors.Is(err, syscall.EIO):
		return errs.New(errs.ProcessExited, "guest.input", "process "+strconv.Itoa(p.Pid)+" no longer reads its stdin")
	}
	return errs.Wrap(errs.InternalError, "guest.input", "write to stdin", err)
}

// CloseStdin closes stdin; it is no error when it is closed already. A terminal cannot
// be closed on one side: errs.BadRequest.
func (p *Process) CloseStdin() error {
	if p.pty != nil {
		return errs.New(errs.BadRequest, "guest.close_stdin", "process "+strconv.Itoa(p.Pid)+" has a terminal; send it ^D")
	}
	p.mu.Lock()
	f := p.stdin
	p.stdin = nil
	p.mu.Unlock()
	if f != nil {
		f.Close()
	}
	return nil
}

// Resize sets the terminal's size. Errors: errs.BadRequest (no terminal), errs.ProcessExited.
func (p *Process) Resize(size Size) error {
	if p.pty == nil {
		return errs.New(errs.BadRequest, "guest.resize", "process "+strconv.Itoa(p.Pid)+" has no terminal")
	}
	p.mu.Lock()
	sources := p.sources
	p.mu.Unlock()
	if sources == nil {
		return p.gone("guest.resize")
	}
	src := sources[0]
	src.mu.Lock()
	defer src.mu.Unlock()
	if src.closed {
		return p.gone("guest.resize")
	}
	return errs.Wrap(errs.InternalError, "guest.resize", "resize the terminal", setSize(src.fd, size))
}

// Release says that whoever started the process has seen what it needs of it. Until then
// its output is kept however many processes end meanwhile.
func (p *Process) Release() { p.Log.release() }

// Drain moves what the process has written so far into its log.
func (p *Process) Drain() {
	p.mu.Lock()
	sources := p.sources
	p.mu.Unlock()
	for _, s := range sources {
		s.drain(p.Spec.PTY != nil)
	}
}
