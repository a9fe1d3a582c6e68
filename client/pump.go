package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

func isEOF(err error) bool { return err == io.EOF }

// ErrWriter marks a failure of the caller's own writer, which is part of the error too.
var ErrWriter = errors.New("output cannot be written")

// pump receives until the process ends, over as many streams as it takes.
func (p *Process) pump(st *aether.Stream) {
	defer func() {
		p.stop()
		p.mu.Lock()
		p.stream = nil
		p.err = p.limit.stop(p.ctx, p.sb, p.err)
		switch {
		case p.detached:
			p.err = nil
		case p.caller != nil:
			p.err = errs.Wrap(errs.RequestCanceled, "process.wait", "the process was given up", p.caller)
		}
		p.mu.Unlock()
		p.closePipes(p.err)
		close(p.done)
		p.cancel()
	}()
	var b broken
	for {
		var x msg.Exit
		p.progress = false
		err := finish(st, p.receive(st), &x)
		if err == nil {
			p.exit = exitOf(&x)
			return
		}
		if errors.Is(err, ErrWriter) && p.ctx.Err() == nil {
			st.Cancel()
			if p.owned { // nobody can take the output any more: it ends as from a broken pipe
				ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), killGrace)
				p.sb.Kill(ctx, p.selector(), sigKill)
				cancel()
			}
			p.err = err
			return
		}
		if p.ctx.Err() != nil || !p.canReattach(err) {
			st.Cancel()
			p.err = fmt.Errorf("process %s: %w", p.selector(), err)
			return
		}
		if p.progress {
			b = broken{}
		}
		if st, err = p.attachAgain(&b, err); err != nil {
			p.err = fmt.Errorf("process %s: %w", p.selector(), err)
			return
		}
	}
}

// receive delivers output until the stream's end, which is the error it returns.
func (p *Process) receive(st *aether.Stream) error {
	for {
		p.limit.take(false)
		f, err := st.Recv(p.ctx)
		p.limit.take(true)
		if err != nil {
			p.limit.take(false)
			return err
		}
		p.progress = true
		if f.IsMessage {
			var g msg.Gap
			if err := g.ParseWire(f.Payload); err != nil {
				return errs.Wrap(errs.ProtocolError, "process.output", "a message cannot be read", err)
			}
			i := stream2index(aether.Kind(g.Kind))
			p.offsets[i].Store(g.To)
			if p.io.OnGap != nil {
				p.io.OnGap(i == 1, g.From, g.To)
			}
			continue
		}
		i := stream2index(f.Kind)
		w := p.io.Stdout
		if i == 1 {
			w = p.io.Stderr
		}
		if w != nil {
			if _, err := w.Write(f.Payload); err != nil {
				return fmt.Errorf("%w: %w", ErrWriter, err)
			}
		}
		p.offsets[i].Add(uint64(len(f.Payload)))
	}
}

func stream2index(k aether.Kind) int {
	if k == aether.KindStderr {
		return 1
	}
	return 0
}

// canReattach says whether err is the way's, not the process's.
func (p *Process) canReattach(err error) bool {
	if p.sb.c.reattach < 0 {
		return false
	}
	return transient(err)
}

func transient(err error) bool {
	for _, c := range []errs.Code{errs.ConnectionLost, errs.ServerUnreachable, errs.EdgeUnreachable, errs.GuestUnreachable, errs.ShuttingDown} {
		if errors.Is(err, c) {
			return true
		}
	}
	return false
}

// broken is how long a process's streams have been failing without any progress.
type broken struct {
	since time.Time
	wait  time.Duration
}

// attachAgain makes a new stream from where the old one broke off.
func (p *Process) attachAgain(b *broken, cause error) (*aether.Stream, error) {
	p.mu.Lock()
	p.stream = nil
	p.mu.Unlock()
	if b.since.IsZero() {
		b.since = time.Now()
	}
	limited, cancel := context.WithDeadline(p.ctx, b.since.Add(p.sb.c.reattach))
	defer cancel()
	for {
		// The first attempt after a break goes at once, and whatever the limit: a dial has
		// its own. A stream that breaks without progress, or cannot be made, backs off.
		ctx := p.ctx
		if b.wait > 0 {
			if ctx = limited; !sleep(ctx, b.wait) {
				return nil, cause
			}
		}
		b.wait = min(max(2*b.wait, retryMin), retryMax)
		st, err := p.openAttach(ctx)
		if err == nil {
			p.mu.Lock()
			p.stream = st
			p.mu.Unlock()
			return st, nil
		}
		switch {
		case transient(err):
			cause = err
		case limited.Err() != nil && p.ctx.Err() == nil: // why it broke says more than that time is over
			return nil, cause
		default:
			return nil, err
		}
	}
}

// openAttach dials within ctx; the stream itself lives as long as the process.
func (p *Process) openAttach(ctx context.Context) (*aether.Stream, error) {
	if _, err := p.sb.link().get(ctx, p.sb.c); err != nil {
		return nil, err
	}
	out, errOut := p.Offsets()
	return p.sb.open(p.ctx, "process.attach", &msg.AttachRequest{
		Process: p.selector().message(), StdoutOffset: out, StderrOffset: errOut,
		Stdin: p.io.KeepStdin && (p.io.Stdin != nil || p.io.OpenStdin),
	})
}

// reattachDefault is how long attachAgain tries when Options do not say.
const reattachDefault = 30 * time.Second
