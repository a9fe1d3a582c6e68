package main

import (
	"context"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// signals hands a signal to whoever asked for it, or ends the command.
type signals struct {
	cancel  context.CancelCauseFunc
	mu      sync.Mutex
	forward func(syscall.Signal)
	taken   int
}

func newSignals(cancel context.CancelCauseFunc) *signals { return &signals{cancel: cancel} }

// signalError is the cause of a context that a signal ended.
type signalError struct{ sig syscall.Signal }

func (e signalError) Error() string { return "stopped by " + unix.SignalName(e.sig) }

// deliver forwards the first signal of a series; a second one means that the user
// wants to be rid of it.
func (s *signals) deliver(sig syscall.Signal) {
	s.mu.Lock()
	f := s.forward
	s.taken++
	n := s.taken
	s.mu.Unlock()
	if f != nil && n == 1 {
		go f(sig)
		return
	}
	s.cancel(signalError{sig})
}

// to sends signals to f until the returned function is called.
func (s *signals) to(f func(syscall.Signal)) (restore func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forward, s.taken = f, 0
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.forward = nil
	}
}
