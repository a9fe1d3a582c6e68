package session

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/guest/proc"
)

// Times.
const (
	startLimit = 30 * time.Second      // for a shell to say that it is there
	grace      = time.Second           // for a shell to come back after its command was killed
	again      = 20 * time.Millisecond // between kills meanwhile
)

// Session is one persistent shell.
type Session struct {
	ID     string
	Shell  string
	Opened time.Time
	Proc   *proc.Process

	feed    *feed
	status  *os.File
	reader  *proc.Reader
	results chan result
	memory  proc.Memory

	mu       sync.Mutex
	busy     bool
	commands uint64
	prefix   string // of the nonces
}

type result struct {
	nonce string
	code  int
}

// Result is how a command ended.
type Result struct {
	Code     int
	TimedOut bool
	Ended    bool // the shell is gone
	Duration time.Duration
	OOM      proc.OOM
}

// start makes the shell and waits until it reads its script.
func start(ctx context.Context, tab *proc.Table, id, shell string, spec proc.Spec, prefix string, null int) (*Session, error) {
	s := &Session{ID: id, Shell: shell, results: make(chan result, 1), prefix: prefix, memory: tab.Memory()}
	name := shell[strings.LastIndexByte(shell, '/')+1:]
	feed, stdin, wake, err := newFeed(name == "bash")
	if err != nil {
		return nil, err
	}
	s.feed = feed
	var out [2]int
	if err := syscall.Pipe2(out[:], syscall.O_CLOEXEC); err != nil {
		syscall.Close(stdin)
		if wake >= 0 {
			syscall.Close(wake)
		}
		s.feed.close()
		return nil, errs.Wrap(errs.InternalError, phase, "make the shell's status pipe", err)
	}
	syscall.SetNonblock(out[0], true)
	s.status = os.NewFile(uintptr(out[0]), "status")

	spec.Cmd, spec.Session, spec.Input = shell, id, stdin
	spec.Name = name                                         // how it signs its messages
	spec.Inherit = []int{-1, -1, -1, -1, wake, null, out[1]} // 3 to 9: see script.go
	p, err := tab.Start(spec)
	syscall.Close(stdin)
	if wake >= 0 {
		syscall.Close(wake)
	}
	syscall.Close(out[1])
	if err == nil && p.Pid == 0 {
		e, _ := p.Exit()
		err = errs.New(errs.NotSupported, phase, "the shell cannot be started: "+e.Error)
	}
	if err != nil {
		s.feed.close()
		s.status.Close()
		return nil, err
	}
	s.Proc, s.Opened = p, p.Started
	s.reader = p.Log.Read(proc.From{NoFollow: true})
	go s.readStatus()
	ctx, cancel := s.Proc.Clock().WithTimeout(ctx, startLimit)
	defer cancel()
	r, err := s.Run(ctx, ":", 0, func(proc.Piece) error { return nil })
	s.commands = 0
	if err != nil && context.Cause(ctx) == context.DeadlineExceeded {
		err = context.DeadlineExceeded
	}
	if err == nil && r.Ended || errors.Is(err, errs.SessionEnded) {
		e, _ := s.Proc.Exit()
		err = errs.New(errs.NotSupported, phase, shell+" ended at once with exit code "+strconv.Itoa(e.Code)+"; it is not a POSIX shell?")
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// readStatus takes the shell's reports: "nonce status\n".
func (s *Session) readStatus() {
	defer s.status.Close()
	var buf [256]byte
	n := 0
	for {
		m, err := s.status.Read(buf[n:])
		n += m
		for {
			i := strings.IndexByte(string(buf[:n]), '\n')
			if i < 0 {
				break
			}
			nonce, code, _ := strings.Cut(string(buf[:i]), " ")
			n = copy(buf[:], buf[i+1:n])
			if c, err := strconv.Atoi(code); err == nil {
				// What the command wrote is in the pipes by now: it comes first.
				s.Proc.Drain()
				select {
				case s.results <- result{nonce, c}:
				case <-s.Proc.Done():
				}
			}
		}
		if err != nil {
			return
		}
		if n == len(buf) {
			n = 0 // not a report
		}
	}
}

// Run runs one command and gives its output to emit as it comes, with what background
// jobs wrote since the last command. After timeout (0: none), or when ctx ends or emit
// fails, the command's descendants are killed, and the shell too if it does not come
// back. Errors: errs.SessionBusy, errs.SessionEnded, ctx's, emit's.
func (s *Session) Run(ctx context.Context, text string, timeout time.Duration, emit func(proc.Piece) error) (Result, error) {
	if strings.IndexByte(text, 0) >= 0 {
		return Result{}, errs.New(errs.BadRequest, phase, "command holds a NUL byte")
	}
	nonce, err := s.take()
	if err != nil {
		return Result{}, err
	}
	s.reader.Follow(true)
	defer s.release()
	c := command{s: s, nonce: nonce, emit: emit, began: time.Now(), ticks: proc.Ticks(), oom: s.memory.Kills()}
	if timeout > 0 {
		var stop func()
		c.timeout, stop = s.after(timeout)
		defer stop()
	}
	if err := s.feed.give(ctx, s.feed.script(text, nonce)); err == errStuck {
		s.Proc.KillAll() // it may have half a script, and cannot be used any more
		return Result{}, errs.Wrap(errs.SessionEnded, phase, "the shell did not take the command", ctx.Err())
	} else if err != nil {
		return Result{}, err
	}
	return c.wait(ctx)
}

// take marks the session busy.
func (s *Session) take() (nonce string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.Proc.Done():
		return "", errs.New(errs.SessionEnded, phase, "the shell of session "+strconv.Quote(s.ID)+" has ended")
	default:
	}
	if s.busy {
		return "", errs.New(errs.SessionBusy, phase, "session "+strconv.Quote(s.ID)+" runs a command")
	}
	s.busy = true
	s.commands++
	return s.prefix + strconv.FormatUint(s.commands, 36), nil
}

func (s *Session) release() {
	s.reader.Follow(false)
	s.mu.Lock()
	s.busy = false
	s.mu.Unlock()
}

// State returns whether a command runs and how many were started.
func (s *Session) State() (busy bool, commands uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.busy, s.commands
}

// Close ends the shell and all of its session.
func (s *Session) Close() {
	s.Proc.KillAll()
	s.feed.close()
	s.status.Close()
	s.Proc.Release()
}

// command is one run.
type command struct {
	s       *Session
	nonce   string
	emit    func(proc.Piece) error
	began   time.Time
	ticks   uint64
	oom     int64 // the memory limit's kills before
	timeout <-chan struct{}

	timedOut bool
	err      error           // why it was given up
	retry    *time.Ticker    // kills again, until
	dead     <-chan struct{} // the shell is given up too
	cease    func()          // ends dead's timer
}

// after returns a channel that is closed when the sandbox has run for d.
func (s *Session) after(d time.Duration) (over <-chan struct{}, stop func()) {
	c := make(chan struct{})
	return c, s.Proc.Clock().AfterFunc(d, func() { close(c) }).Stop
}

func (c *command) wait(ctx context.Context) (Result, error) {
	defer func() {
		if c.retry != nil {
			c.retry.Stop()
			c.cease()
		}
	}()
	var tick <-chan time.Time
	done := ctx.Done()
	for {
		if c.retry != nil {
			tick, done = c.retry.C, nil
		}
		select {
		case r := <-c.s.results:
			if r.nonce != c.nonce {
				continue // of a command that was given up, or forged
			}
			return c.finish(Result{Code: r.code})
		case <-c.s.reader.Ready():
			if err := c.flush(); err != nil {
				c.giveUp(err)
			}
		case <-c.s.Proc.Done():
			e, _ := c.s.Proc.Exit()
			return c.finish(Result{Code: e.Code, Ended: true})
		case <-c.timeout:
			c.timeout, c.timedOut = nil, true
			c.giveUp(nil)
		case <-done:
			c.giveUp(ctx.Err())
		case <-tick:
			c.s.Proc.KillSince(c.ticks)
		case <-c.dead:
			c.dead = nil
			c.s.Proc.KillAll()
		}
	}
}

// giveUp kills the command; the shell has a moment to come back.
func (c *command) giveUp(err error) {
	if c.err == nil {
		c.err = err
	}
	if c.retry == nil {
		c.s.Proc.KillSince(c.ticks)
		c.retry = time.NewTicker(again)
		c.dead, c.cease = c.s.after(grace)
	}
}

// flush gives what is in the log to emit.
func (c *command) flush() error {
	for {
		p, ok := c.s.reader.TryNext()
		if !ok {
			return nil
		}
		if c.err != nil {
			continue // nobody takes it
		}
		if err := c.emit(p); err != nil {
			return err
		}
	}
}

func (c *command) finish(r Result) (Result, error) {
	if err := c.flush(); err != nil && c.err == nil {
		c.err = err
	}
	r.TimedOut = c.timedOut
	r.OOM = c.s.memory.Since(c.oom, r.Code, c.timedOut || c.err != nil)
	r.Duration = time.Since(c.began)
	return r, c.err
}
