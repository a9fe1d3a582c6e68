package keeper

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"sort"
	"strings"
	"sync"
	"syscall"
	"time"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// Main is a keeper's process: args are those after the verb that Config.Verb
// names. It returns the process's exit code.
func Main(args []string, verb []string, hooks Hooks) int {
	cfg, slot, err := parseArgs(args, verb)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("keeper", slot, "pid", os.Getpid())
	// It ends when there is nothing to hold, not when someone cleans up around it.
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE, syscall.SIGUSR1, syscall.SIGUSR2)
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0); err != nil {
		cfg.Log.Warn("not protected when memory runs out", "error", err)
	}
	k := &server{cfg: cfg, hooks: hooks, slot: slot, held: map[string][]int{}, last: time.Now(), end: make(chan struct{})}
	if err := k.run(); err != nil {
		cfg.Log.Error("keeper ends", "error", err)
		return 1
	}
	return 0
}

type server struct {
	cfg   Config
	hooks Hooks
	slot  int
	dir   *os.File

	mu       sync.Mutex
	held     map[string][]int
	edges    int
	last     time.Time // when the last edge left
	quiesced bool
	end      chan struct{}
	ended    bool

	// Held while Abandoned runs or an edge says hello.
	abandon sync.Mutex
	cancel  context.CancelFunc // guarded by mu
}

func (k *server) run() error {
	d, err := os.Open(k.cfg.Dir)
	if err != nil {
		return err
	}
	defer d.Close()
	k.dir = d
	lock, ok := k.lock()
	if !ok {
		return nil // another one has the slot
	}
	defer lock.Close()
	// What the others hold comes first: from listening on, edges change it.
	for slot := range k.cfg.Slots {
		if slot != k.slot {
			k.copyFrom(slot)
		}
	}
	addr := address(d, k.slot)
	os.Remove(addr.Name)
	old := unix.Umask(0o177)
	l, err := net.ListenUnix("unixpacket", addr)
	unix.Umask(old)
	if err != nil {
		return err
	}
	defer l.Close()
	k.cfg.Log.Info("keeper runs", "held", len(k.held))
	for slot := range k.cfg.Slots {
		if slot != k.slot {
			go k.watch(slot)
		}
	}
	go k.accept(l)
	k.idle()
	os.Remove(addr.Name)
	return nil
}

// lock takes the slot. Who comes second goes at once: waiting, it could come to life
// when the first one has been told to end.
func (k *server) lock() (*os.File, bool) {
	fd, err := unix.Openat(rawFD(k.dir), lockName(k.slot), unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, false
	}
	l := unix.Flock_t{Type: unix.F_WRLCK}
	if unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &l) != nil {
		unix.Close(fd)
		return nil, false
	}
	return os.NewFile(uintptr(fd), "lock"), true
}

const quiet = "keepers are being stopped"

// copyFrom takes what another keeper holds.
func (k *server) copyFrom(slot int) {
	c, _, err := dial(k.dir, slot)
	if err != nil {
		return
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err = func() error {
		if _, _, err := call(ctx, c, request{op: opHello, role: rolePeer}, nil); err != nil {
			return err
		}
		list, err := listAll(ctx, c)
		if err != nil {
			return err
		}
		for _, name := range list {
			if _, ok := k.held[name]; ok {
				continue
			}
			_, fds, err := call(ctx, c, request{op: opTake, text: name}, nil)
			var e *errs.Error
			switch {
			case errors.As(err, &e) && e.Message == quiet:
				// All are being stopped: hold nothing.
				for name := range k.held {
					closeAll(k.held[name])
				}
				clear(k.held)
				return err
			case errors.As(err, &e):
				continue // dropped meanwhile
			case err != nil:
				return err // it has died; better a part than nothing
			}
			k.held[name] = fds
		}
		return nil
	}()
	if err != nil {
		k.cfg.Log.Error("descriptors not copied", "from", slot, "error", err)
	}
}

func listAll(ctx context.Context, c *net.UnixConn) ([]string, error) {
	var all []string
	for after := ""; ; {
		p, _, err := call(ctx, c, request{op: opList, text: after}, nil)
		if err != nil {
			return nil, err
		}
		more := names(p)
		if len(more) == 0 {
			return all, nil
		}
		all = append(all, more...)
		after = more[len(more)-1]
	}
}

// watch starts the keeper of another slot whenever it is not there.
func (k *server) watch(slot int) {
	starter := spawner{slot: slot}
	pause := 10 * time.Millisecond
	for {
		c, pid, err := dial(k.dir, slot)
		if err == nil {
			pause = 10 * time.Millisecond
			waitDead(context.Background(), pid)
			c.Close()
			k.cfg.Log.Info("another keeper has ended", "slot", slot, "its pid", pid)
		}
		k.mu.Lock()
		needed := !k.quiesced && !k.ended && (len(k.held) > 0 || k.edges > 0)
		k.mu.Unlock()
		if needed {
			starter.spawn(k.cfg, k.dir)
		}
		time.Sleep(pause)
		pause = min(2*pause, time.Second)
	}
}

func (k *server) accept(l *net.UnixListener) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			k.cfg.Log.Error("connection not accepted", "error", err)
			time.Sleep(100 * time.Millisecond) // out of descriptors, say
			continue
		}
		if _, err := peer(c); err != nil {
			k.cfg.Log.Warn("connection refused", "error", err)
			c.Close()
			continue
		}
		go k.serve(c)
	}
}

func (k *server) serve(c *net.UnixConn) {
	defer c.Close()
	edge := false
	defer func() {
		if edge {
			k.mu.Lock()
			k.edges--
			k.last = time.Now()
			k.mu.Unlock()
		}
	}()
	for {
		p, fds, err := receive(c)
		if err != nil {
			return
		}
		r, err := parseRequest(p)
		var text []byte
		var out []int
		if err == nil {
			if r.op == opHello && r.role == roleEdge && !edge {
				edge = true
				k.welcome()
			}
			text, out, err = k.answer(r, fds)
		} else {
			closeAll(fds)
		}
		answer := append([]byte{0}, text...)
		if err != nil {
			answer = append([]byte{1}, err.Error()...)
		}
		err = send(c, answer, out)
		closeAll(out)
		if r.op == opStop && err == nil {
			k.finish()
		}
		if err != nil {
			return
		}
	}
}

// welcome counts an edge and takes what Abandoned did out of its way.
func (k *server) welcome() {
	k.mu.Lock()
	k.edges++
	if k.cancel != nil {
		k.cancel()
	}
	k.mu.Unlock()
	k.abandon.Lock()
	defer k.abandon.Unlock()
}

// answer does one request. The descriptors it returns are the caller's to close.
func (k *server) answer(r request, fds []int) (text []byte, out []int, err error) {
	if r.op != opPut {
		closeAll(fds)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	switch r.op {
	case opPut:
		if len(fds) == 0 {
			return nil, nil, fmt.Errorf("nothing to hold")
		}
		closeAll(k.held[r.text])
		k.held[r.text] = fds
	case opTake:
		if k.quiesced {
			return nil, nil, errors.New(quiet)
		}
		held, ok := k.held[r.text]
		if !ok {
			return nil, nil, fmt.Errorf("%q is not held", r.text)
		}
		// Copies: a Drop may come before they are sent.
		for _, fd := range held {
			n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				closeAll(out)
				return nil, nil, err
			}
			out = append(out, n)
		}
	case opDrop:
		closeAll(k.held[r.text])
		delete(k.held, r.text)
	case opList:
		var list []string
		for name := range k.held {
			if name > r.text {
				list = append(list, name)
			}
		}
		sort.Strings(list)
		if n := maxPacket / (maxName + 1); len(list) > n {
			list = list[:n]
		}
		text = []byte(strings.Join(list, "\x00"))
	case opStatus:
		files := 0
		for _, fds := range k.held {
			files += len(fds)
		}
		le := binary.LittleEndian
		text = le.AppendUint32(nil, uint32(os.Getpid()))
		text = le.AppendUint32(text, uint32(len(k.held)))
		text = le.AppendUint32(text, uint32(files))
		text = le.AppendUint32(text, uint32(k.edges))
	case opQuiesce, opStop:
		k.quiesced = true
	}
	return text, out, nil
}

func (k *server) finish() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.ended {
		k.ended = true
		close(k.end)
	}
}

// idle waits for the end: told, or nothing to do for long. Meanwhile it has
// abandoned readers served.
func (k *server) idle() {
	step := min(k.cfg.Patience, k.cfg.Linger, time.Second) / 4
	t := time.NewTicker(max(step, time.Millisecond))
	defer t.Stop()
	for {
		select {
		case <-k.end:
			return
		case <-t.C:
		}
		k.mu.Lock()
		alone := k.edges == 0
		since := time.Since(k.last)
		held := len(k.held)
		if alone && held == 0 && since > k.cfg.Linger {
			k.ended = true
			k.mu.Unlock()
			return
		}
		k.mu.Unlock()
		if alone && held > 0 && since > k.cfg.Patience && k.hooks.Abandoned != nil {
			k.tryAbandoned()
		}
	}
}

func (k *server) tryAbandoned() {
	if !k.abandon.TryLock() {
		return
	}
	k.mu.Lock()
	if k.edges > 0 {
		k.mu.Unlock()
		k.abandon.Unlock()
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	k.cancel = cancel
	k.mu.Unlock()
	go func() {
		defer k.abandon.Unlock()
		defer cancel()
		held, err := Connect(ctx, k.cfg)
		if err == nil {
			err = k.hooks.Abandoned(ctx, held)
			held.Close()
		}
		if err != nil && ctx.Err() == nil {
			k.cfg.Log.Warn("abandoned readers not served", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}()
}
