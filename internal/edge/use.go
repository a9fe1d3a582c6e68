package edge

import (
	"context"
	"sync/atomic"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// using is what is known of a sandbox's use: operations that began and ended, streams included.
type using struct {
	awake   atomic.Bool // it runs, and no pause of it has begun
	began   atomic.Uint64
	ended   atomic.Uint64
	lastUse atomic.Int64 // when the last one ended, or the sandbox began to run; nanoseconds
}

// use is a moment of that. Whoever decides that a sandbox is not used must find the same when it acts.
type use struct {
	began uint64
	open  uint64 // that have not ended
	last  time.Time
}

// begin counts a use, whether the sandbox runs or not.
func (u *using) begin() { u.began.Add(1) }

func (u *using) end(now time.Time) {
	u.lastUse.Store(now.UnixNano())
	u.ended.Add(1)
}

// touch is a use that has ended already.
func (u *using) touch(now time.Time) {
	u.begin()
	u.end(now)
}

func (u *using) seen() use {
	ended := u.ended.Load() // before began: there are never less open than it says
	began := u.began.Load()
	return use{began: began, open: began - ended, last: time.Unix(0, u.lastUse.Load())}
}

// manner is what an operation of a guest means for whether its sandbox runs.
type manner int

const (
	wakes   manner = iota // it is use, and resumes a paused sandbox first
	passive               // it is no use: a look at the guest, which fails if the sandbox is paused
	private               // the edge's alone
)

// manners has the methods of guests that are no use of their sandbox.
var manners = map[string]manner{"guest.info": passive, "guest.resumed": private, "guest.activity": private}

// mannerOf returns what an operation means: of a batch, what its operations mean together.
func mannerOf(open *msg.Open) manner {
	if open.Method != aether.MethodBatch {
		return manners[open.Method]
	}
	var b msg.Batch
	if b.ParseWire(open.Body) != nil {
		return passive // the guest says so
	}
	m := passive
	for _, op := range b.Ops {
		switch manners[op.Method] {
		case private:
			return private
		case wakes:
			m = wakes
		}
	}
	return m
}

// open lets an operation of a guest begin: a sandbox that is paused, or about to be, is resumed
// first, unless a look is all that is wanted.
func (e *Edge) open(ctx context.Context, s *sandbox, open *msg.Open) (aether.Relay, error) {
	switch mannerOf(open) {
	case private:
		return aether.Relay{}, errs.New(errs.UnknownMethod, "edge.route", "no method "+open.Method+" is served to clients")
	case passive:
		conn, err := s.connect(ctx)
		return aether.Relay{Conn: conn}, err
	}
	s.begin()
	conn, err := e.reach(ctx, s)
	if err != nil {
		s.end(e.cfg.Now())
		return aether.Relay{}, err
	}
	return aether.Relay{Conn: conn, Touch: s.onInput, Done: s.onEnd}, nil
}

// reach returns the connection to the guest of a sandbox that runs, or now does.
func (e *Edge) reach(ctx context.Context, s *sandbox) (*aether.Conn, error) {
	for {
		if !s.awake.Load() {
			if err := e.wake(ctx, s); err != nil {
				return nil, err
			}
		}
		conn, err := s.connect(ctx)
		if err == nil || ctx.Err() != nil || !s.standing() { // else a pause has begun in between
			return conn, err
		}
	}
}

// hear makes what relays call. They are made once: there is a stream for each operation.
func (e *Edge) hear(s *sandbox) {
	s.onEnd = func() { s.end(e.cfg.Now()) }
	s.onInput = func() {
		if s.awake.Load() {
			return
		}
		s.inputs.Add(1)
		if !s.waking.Swap(true) {
			go e.wakeForInput(s) // whoever reads the client's connection must not wait
		}
	}
}

// wakeForInput resumes a sandbox for input on a stream that it had before it was paused. The input
// itself goes to the guest's socket meanwhile.
func (e *Edge) wakeForInput(s *sandbox) {
	ctx, cancel := context.WithTimeout(s.life, resumeTime)
	defer cancel()
	for {
		n := s.inputs.Load()
		if err := e.wake(ctx, s); err != nil && s.life.Err() == nil {
			e.cfg.Log.Warn("input came for a sandbox that cannot run", "sandbox", s.snapshot().ID, "err", err)
		}
		s.waking.Store(false)
		if s.inputs.Load() == n || s.waking.Swap(true) { // else there was more for the next pause
			return
		}
	}
}

// standing tells whether the sandbox is paused, or on its way to or from that.
func (s *sandbox) standing() bool {
	switch s.snapshot().State {
	case v1.StatePausing, v1.StatePaused, v1.StateResuming:
		return true
	}
	return false
}
