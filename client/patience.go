package client

import (
	"context"
	"errors"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// guestGrace is how long after a command's own limit its guest may take to say so. The
// guest keeps the limit; one that is stopped keeps none.
const guestGrace = 10 * time.Second

// errSilent is why a patience's context ended.
var errSilent = errors.New("the guest is silent")

// patience ends an operation whose guest does not keep the operation's time limits. Those count
// what the sandbox runs: when they seem to be over, the sandbox may be paused, or have been.
type patience struct {
	limit, idle time.Duration
	start       time.Time
	cancel      context.CancelCauseFunc
	ctx         context.Context
	sandbox     func(context.Context) (*v1.Sandbox, error)
	pauses      int64 // of the sandbox, that were allowed for; look's only

	mu    sync.Mutex
	timer *time.Timer // nil without limits
	heard time.Time   // when the guest last sent something, and the caller took it
	busy  bool        // the caller is taking something
}

// patient returns a context that also ends a while after the limits, of which 0 is none.
func (s *Sandbox) patient(ctx context.Context, limit, idle time.Duration) (context.Context, *patience) {
	return patient(ctx, limit, idle, func(ctx context.Context) (*v1.Sandbox, error) { return s.c.Get(ctx, s.id) })
}

func patient(ctx context.Context, limit, idle time.Duration, sandbox func(context.Context) (*v1.Sandbox, error)) (context.Context, *patience) {
	now := time.Now()
	p := &patience{limit: limit, idle: idle, start: now, heard: now, sandbox: sandbox}
	if limit <= 0 && idle <= 0 {
		return ctx, p
	}
	ctx, p.cancel = context.WithCancelCause(ctx)
	p.ctx = ctx
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer = time.AfterFunc(time.Until(p.end()), p.look)
	return ctx, p
}

// end is when patience ends if nothing is heard. With p.mu held.
func (p *patience) end() time.Time {
	var end time.Time
	if p.limit > 0 {
		end = p.start.Add(p.limit)
		if p.heard.After(end) {
			end = p.heard
		}
	}
	if idle := p.heard.Add(p.idle); p.idle > 0 && (end.IsZero() || idle.Before(end)) {
		end = idle
	}
	return end.Add(guestGrace)
}

func (p *patience) look() {
	if p.ctx.Err() != nil {
		return
	}
	if p.left() > 0 || p.paused() {
		p.mu.Lock()
		p.timer.Reset(time.Until(p.end()))
		p.mu.Unlock()
		return
	}
	p.cancel(errSilent)
}

func (p *patience) left() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy {
		p.heard = time.Now()
	}
	return time.Until(p.end())
}

// paused asks whether the sandbox is paused, or was again since the last time it was asked, and
// then allows for that: until the next look, or with all of the time once more. A guest that
// stopped in a sandbox that was paused at any time before is so found out one time later.
func (p *patience) paused() bool {
	ctx, cancel := context.WithTimeout(p.ctx, guestGrace)
	defer cancel()
	v, err := p.sandbox(ctx)
	if err != nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch v.State {
	case v1.StatePausing, v1.StatePaused, v1.StateResuming:
	default:
		if v.Pauses == p.pauses {
			return false
		}
		p.pauses, p.start = v.Pauses, time.Now()
	}
	p.heard = time.Now()
	return true
}

// take notes that the guest sent something, which the caller has taken when busy is false.
func (p *patience) take(busy bool) {
	if p.timer == nil {
		return
	}
	p.mu.Lock()
	p.heard, p.busy = time.Now(), busy
	p.mu.Unlock()
}

// stop ends the watch and names the error of an operation that it ended.
func (p *patience) stop(ctx context.Context, s *Sandbox, err error) error {
	if p.timer == nil {
		return err
	}
	p.timer.Stop()
	p.cancel(nil)
	if err == nil || context.Cause(ctx) != errSilent {
		return err
	}
	return p.silent(s)
}

func (p *patience) silent(s *Sandbox) error {
	e := errs.New(errs.GuestUnreachable, "client.timeout", "the guest does not answer: the command's time limit passed, and nothing was heard of it for "+guestGrace.String())
	e.Sandbox = s.id
	return e
}
