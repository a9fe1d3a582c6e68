package proc

import (
	"sync"
	"syscall"
)

// Reaper owns every wait for a child of this program. No other code may call wait:
// then no exit code is ever taken from whom it belongs to, and orphans that the kernel
// hands to PID 1 do not stay as zombies.
type Reaper struct {
	// mu is held over a fork and the registration of its child, and over each wait:
	// a child cannot be reaped before it is known, and a pid that is registered
	// cannot have been given to another process.
	mu     sync.Mutex
	waiter *waiter // nil: no child was started yet
	exited map[int]func(syscall.WaitStatus, syscall.Rusage)
	parked bool
	oom    oom
	wake   chan struct{}
}

// NewReaper returns the reaper. From the first child on it runs as long as the program,
// whose children are to have that oom_score_adj (0: its own). A guest calls it before the
// sandbox has any process.
func NewReaper(oomScore int) *Reaper {
	return &Reaper{oom: openOOM(oomScore), exited: map[int]func(syscall.WaitStatus, syscall.Rusage){}, wake: make(chan struct{}, 1)}
}

// Start calls fork, which must start one child and return its pid, and has exited called
// with the child's end, once, from the reaper's goroutine. registered runs after a
// successful fork, before the child's end can be reported.
func (r *Reaper) Start(fork func() (int, error), registered func(pid int), exited func(syscall.WaitStatus, syscall.Rusage)) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waiter == nil {
		w, err := newWaiter()
		if err != nil {
			return err
		}
		r.waiter = w
		go r.run(w)
		spareThread()
	}
	pid, err := r.oom.fork(fork)
	if err != nil {
		return err
	}
	r.exited[pid] = exited
	registered(pid)
	if r.parked {
		r.parked = false
		r.wake <- struct{}{}
	}
	return nil
}

// Signal sends sig to pid, a child, or to its process group. It returns ESRCH when the
// child has been reaped, whoever has its number now.
func (r *Reaper) Signal(pid int, sig syscall.Signal, group bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.exited[pid]; !ok {
		return syscall.ESRCH
	}
	if group {
		if err := syscall.Kill(-pid, sig); err != syscall.ESRCH {
			return err
		}
		// The leader moved to another group; it is still to be had by its own number.
	}
	return syscall.Kill(pid, sig)
}

func (r *Reaper) run(w *waiter) {
	for w.wait() == nil {
		if r.reap() == syscall.ECHILD {
			r.park()
		}
		if w.done() != nil {
			return
		}
	}
}

// reap collects everything that is dead now. It returns syscall.ECHILD if there is no
// child left.
func (r *Reaper) reap() error {
	for {
		r.mu.Lock()
		var ws syscall.WaitStatus
		var ru syscall.Rusage
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, &ru)
		if err == syscall.EINTR {
			r.mu.Unlock()
			continue
		}
		if err != nil || pid <= 0 {
			r.mu.Unlock()
			return err
		}
		f := r.exited[pid]
		delete(r.exited, pid)
		r.mu.Unlock()
		if f != nil {
			f(ws, ru)
		}
	}
}

// park waits until there is a child again.
func (r *Reaper) park() {
	r.mu.Lock()
	if len(r.exited) > 0 { // started since
		r.mu.Unlock()
		return
	}
	r.parked = true
	r.mu.Unlock()
	<-r.wake
}
