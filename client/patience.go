package client

import (
	"context"
	"errors"
	"sync"
	"time"

	"dsec/api/v1/errs"
)

// guestGrace is how long after a command's own limit its guest may take to say so. The
// guest keeps the limit; one that is stopped keeps none.
const guestGrace = 10 * time.Second

// errSilent is why a patience's context ended.
var errSilent = errors.New("the guest is silent")

// patience ends an operation whose guest does not keep the operation's time limits.
type patience struct {
	limit, idle time.Duration
	start       time.Time
	cancel      context.CancelCauseFunc

	mu    sync.Mutex
	timer *time.Timer // nil without limits
	heard time.Time   // when the guest last sent something, and the caller took it
	busy  bool        // the caller is taking something
}

// patient returns a context that also ends a while after the limits, of which 0 is none.
func patient(ctx context.Context, limit, idle time.Duration) (context.Context, *patience) {
	now := time.Now()
	p := &patience{limit: limit, idle: idle, start: now, heard: now}
	if limit <= 0 && idle <= 0 {
		return ctx, p
	}
	ctx, p.cancel = context.WithCancelCause(ctx)
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
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy {
		p.heard = time.Now()
	}
	if left := time.Until(p.end()); left > 0 {
		p.timer.Reset(left)
		return
	}
	p.cancel(errSilent)
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
