package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// Client has descriptors held by all keepers. It is safe for concurrent use.
type Client struct {
	cfg   Config
	role  byte
	dir   *os.File
	links []*link

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	stopping atomic.Bool // no keeper is started any more

	mu    sync.Mutex
	files map[string][]*os.File // what a keeper that comes back is given
}

// link is the connection to the keeper of one slot.
type link struct {
	c    *Client
	slot int

	mu     sync.Mutex // held during a call
	conn   *net.UnixConn
	broken chan struct{}       // closed when conn fails
	up     chan struct{}       // closed while there is a connection
	drops  map[string]struct{} // to be dropped when it comes back; guarded by Client.mu
}

// Start connects an edge to its keepers and starts those that do not run. It
// returns when all run, or at least one does after a few seconds.
// Errors: internal_error, edge_unreachable (none can be started).
func Start(ctx context.Context, cfg Config) (*Client, error) { return connect(ctx, cfg, roleEdge) }

// Connect connects a tool to keepers that run: it starts none, and does not count
// as an edge.
func Connect(ctx context.Context, cfg Config) (*Client, error) { return connect(ctx, cfg, rolePeer) }

func connect(ctx context.Context, cfg Config, role byte) (*Client, error) {
	cfg.fill()
	var err error
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "find directory", err)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "make directory", err)
	}
	d, err := os.Open(cfg.Dir)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "open directory", err)
	}
	c := &Client{cfg: cfg, role: role, dir: d, files: map[string][]*os.File{}}
	c.ctx, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	for slot := range cfg.Slots {
		l := &link{c: c, slot: slot, up: make(chan struct{}), drops: map[string]struct{}{}}
		c.links = append(c.links, l)
		c.tasks.Add(1)
		go func() {
			defer c.tasks.Done()
			l.keep()
		}()
	}
	wait, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	up := 0
	for _, l := range c.links {
		if l.await(wait) {
			up++
		}
	}
	if up == 0 {
		c.Close()
		return nil, errs.New(errs.EdgeUnreachable, phase, "no keeper runs; see "+filepath.Join(cfg.Dir, "keeper-0.log"))
	}
	if up < len(c.links) {
		cfg.Log.Warn("not all keepers run", "running", up, "of", len(c.links))
	}
	return c, nil
}

// await waits for a connection.
func (l *link) await(ctx context.Context) bool {
	l.c.mu.Lock()
	up := l.up
	l.c.mu.Unlock()
	select {
	case <-up:
		return true
	default:
	}
	select {
	case <-up:
		return true
	case <-ctx.Done():
	case <-l.c.ctx.Done():
	}
	return false
}

// keep keeps the link up.
func (l *link) keep() {
	starter := spawner{slot: l.slot}
	pause := 5 * time.Millisecond
	for l.c.ctx.Err() == nil {
		conn, pid, err := dial(l.c.dir, l.slot)
		if err == nil {
			err = l.sync(conn)
			if err == nil {
				pause = 5 * time.Millisecond
				l.hold(conn, pid)
				continue
			}
			conn.Close()
			l.c.cfg.Log.Warn("keeper does not answer", "slot", l.slot, "error", err)
		}
		// Its peers start it too; whoever comes second finds the slot taken.
		if l.c.role == roleEdge && !l.c.stopping.Load() {
			starter.spawn(l.c.cfg, l.c.dir)
		}
		select {
		case <-time.After(pause):
		case <-l.c.ctx.Done():
		}
		pause = min(2*pause, 500*time.Millisecond)
	}
}

// sync says hello and gives the keeper what it should have.
func (l *link) sync(conn *net.UnixConn) error {
	c := l.c
	ctx, cancel := context.WithTimeout(c.ctx, 20*time.Second)
	defer cancel()
	if _, _, err := call(ctx, conn, request{op: opHello, role: c.role}, nil); err != nil {
		return err
	}
	if c.role != roleEdge {
		c.mu.Lock()
		defer c.mu.Unlock()
		l.set(conn)
		return nil
	}
	// Under the lock: a Put or Drop in between would be missed.
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, files := range c.files {
		fds, err := descriptors(files)
		if err != nil {
			delete(c.files, name) // its owner has closed them: the cache is closed
			continue
		}
		if _, _, err := call(ctx, conn, request{op: opPut, text: name}, fds); err != nil {
			return err
		}
	}
	for name := range l.drops {
		if _, _, err := call(ctx, conn, request{op: opDrop, text: name}, nil); err != nil {
			return err
		}
		delete(l.drops, name)
	}
	l.set(conn)
	return nil
}

// set makes conn the link's. Client.mu is held.
func (l *link) set(conn *net.UnixConn) {
	l.mu.Lock()
	l.conn, l.broken = conn, make(chan struct{})
	l.mu.Unlock()
	close(l.up)
}

// hold waits for the end of the keeper or of the connection.
func (l *link) hold(conn *net.UnixConn, pid int) {
	l.mu.Lock()
	broken := l.broken
	l.mu.Unlock()
	ctx, cancel := context.WithCancel(l.c.ctx)
	go func() {
		select {
		case <-broken:
			cancel()
		case <-ctx.Done():
		}
	}()
	waitDead(ctx, pid)
	cancel()
	l.c.mu.Lock()
	l.up = make(chan struct{})
	l.c.mu.Unlock()
	l.mu.Lock()
	l.conn = nil
	l.mu.Unlock()
	conn.Close()
}

func descriptors(files []*os.File) ([]int, error) {
	var fds []int
	for _, f := range files {
		fd := rawFD(f)
		if fd < 0 {
			return nil, os.ErrClosed
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

var errDown = errors.New("keeper is down")

func (l *link) call(ctx context.Context, r request, fds []int) ([]byte, []int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return nil, nil, errDown
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	text, got, err := call(ctx, l.conn, r, fds)
	var e *errs.Error
	if err != nil && !errors.As(err, &e) {
		// The connection is of no use any more: an answer may still come.
		l.conn = nil
		close(l.broken)
		return nil, nil, fmt.Errorf("%w: %w", errDown, err)
	}
	return text, got, err
}

// all does r with every keeper, waiting a little for those that are being
// restarted, and counts those that did it.
func (c *Client) all(ctx context.Context, r request, fds []int) (done int, err error) {
	wait, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	for _, l := range c.links {
		for {
			if !l.await(wait) {
				if err == nil {
					err = errDown
				}
				break
			}
			_, _, cerr := l.call(ctx, r, fds)
			if cerr == nil {
				done++
				break
			}
			err = cerr
			if !errors.Is(cerr, errDown) || wait.Err() != nil {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	return done, err
}

// Dir is the directory of the keepers.
func (c *Client) Dir() string { return c.cfg.Dir }

// Put has files held under a name, which may be taken: then the old ones go. At
// least one keeper has them when it returns; those that are down get them when
// they come back. The files stay open until Drop or Close.
func (c *Client) Put(ctx context.Context, name string, files []*os.File) error {
	if len(name) == 0 || len(name) > maxName || len(files) == 0 || len(files) > maxFiles {
		return errs.New(errs.InternalError, phase, fmt.Sprintf("cannot hold %d files as %q", len(files), name))
	}
	fds, err := descriptors(files)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "hold "+name, err)
	}
	c.mu.Lock()
	c.files[name] = files
	for _, l := range c.links {
		delete(l.drops, name)
	}
	c.mu.Unlock()
	n, err := c.all(ctx, request{op: opPut, text: name}, fds)
	if n == 0 {
		return errs.Wrap(errs.EdgeUnreachable, phase, "hold "+name, err)
	}
	if n < len(c.links) {
		c.cfg.Log.Warn("not all keepers hold it", "name", name, "keepers", n, "error", err)
	}
	return nil
}

// Drop lets go of a name. Unknown names are no error.
func (c *Client) Drop(ctx context.Context, name string) error {
	c.mu.Lock()
	delete(c.files, name)
	for _, l := range c.links {
		l.drops[name] = struct{}{}
	}
	c.mu.Unlock()
	var all []error
	for _, l := range c.links {
		if _, _, err := l.call(ctx, request{op: opDrop, text: name}, nil); err == nil {
			c.mu.Lock()
			if _, again := c.files[name]; !again {
				delete(l.drops, name)
			}
			c.mu.Unlock()
		} else if !errors.Is(err, errDown) {
			all = append(all, err)
		}
	}
	return errs.Wrap(errs.InternalError, phase, "drop "+name, errors.Join(all...))
}

// Take returns new descriptors of what is held under a name; it stays held.
func (c *Client) Take(ctx context.Context, name string) ([]*os.File, error) {
	var last error = errDown
	for _, l := range c.links {
		_, fds, err := l.call(ctx, request{op: opTake, text: name}, nil)
		if err != nil {
			last = err
			continue
		}
		files := make([]*os.File, len(fds))
		for i, fd := range fds {
			files[i] = os.NewFile(uintptr(fd), fmt.Sprintf("%s[%d]", name, i))
		}
		c.mu.Lock()
		c.files[name] = files
		c.mu.Unlock()
		return files, nil
	}
	return nil, errs.Wrap(errs.InternalError, phase, "take "+name, last)
}

// List returns the names that any keeper holds.
func (c *Client) List(ctx context.Context) ([]string, error) {
	seen := map[string]bool{}
	var out []string
	var last error = errDown
	ok := false
	for _, l := range c.links {
		list, err := l.list(ctx)
		if err != nil {
			last = err
			continue
		}
		ok = true
		for _, n := range list {
			if !seen[n] {
				seen[n] = true
				out = append(out, n)
			}
		}
	}
	if !ok {
		return nil, errs.Wrap(errs.EdgeUnreachable, phase, "list", last)
	}
	return out, nil
}

func (l *link) list(ctx context.Context) ([]string, error) {
	var all []string
	for after := ""; ; {
		p, _, err := l.call(ctx, request{op: opList, text: after}, nil)
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

// Status is one keeper.
type Status struct {
	PID   int
	Names int // held
	Files int
	Edges int // connected
}

// Status returns the keepers that run.
func (c *Client) Status(ctx context.Context) []Status {
	var out []Status
	for _, l := range c.links {
		p, _, err := l.call(ctx, request{op: opStatus}, nil)
		if err != nil {
			continue
		}
		if s, err := status(p); err == nil {
			out = append(out, s)
		}
	}
	return out
}

// Close disconnects. The keepers hold on.
func (c *Client) Close() error {
	c.cancel()
	c.tasks.Wait()
	return c.dir.Close()
}

// Stop ends the keepers with all they hold: readers that depend on it see zeros
// from then on, so nothing must be mounted.
func (c *Client) Stop(ctx context.Context) error {
	c.stopping.Store(true)
	for _, l := range c.links {
		l.call(ctx, request{op: opQuiesce}, nil)
	}
	var all []error
	for _, l := range c.links {
		if _, _, err := l.call(ctx, request{op: opStop}, nil); err != nil && !errors.Is(err, errDown) {
			all = append(all, err)
		}
	}
	c.cancel()
	c.tasks.Wait()
	c.dir.Close()
	return errs.Wrap(errs.InternalError, phase, "stop keepers", errors.Join(all...))
}

// Stop ends the keepers of cfg.Dir, if any run, as [Client.Stop] does, and by force those
// that cannot be reached since their directory was removed.
func Stop(ctx context.Context, cfg Config) error {
	cfg.fill()
	keepers := watched{}
	defer keepers.close()
	if _, err := keepers.find(cfg.Dir); err != nil {
		return err
	}
	dir, err := os.Open(cfg.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return keepers.kill(ctx, cfg.Dir)
	}
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "open directory", err)
	}
	defer dir.Close()
	running := false
	for slot := range cfg.Slots {
		running = running || !slotFree(dir, slot)
	}
	if running {
		c, err := Connect(ctx, cfg)
		if err != nil {
			return err
		}
		if err := c.Stop(ctx); err != nil {
			return err
		}
	}
	return keepers.kill(ctx, cfg.Dir)
}

// watched are keepers by pidfd: one that exits has no name to be found by any more, long
// before it has let go of what it holds.
type watched map[int]int // by pid

// find adds the keepers of a directory that run and returns how many there are.
func (w watched) find(dir string) (n int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, errs.Wrap(errs.InternalError, phase, "look for keepers", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || DirOf(e.Name()) != dir {
			continue
		}
		n++
		if _, known := w[pid]; known {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // it has ended
		}
		if DirOf(e.Name()) != dir { // the pid is another's by now
			unix.Close(fd)
			continue
		}
		w[pid] = fd
	}
	return n, nil
}

func (w watched) close() {
	for _, fd := range w {
		unix.Close(fd)
	}
}

// over tells whether all have ended and let go of everything.
func (w watched) over() bool {
	for _, fd := range w {
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); err != nil || n == 0 {
			return false
		}
	}
	return true
}

// kill ends what is left of the keepers of a directory, all at once, since each would
// start the others again, and waits for the ends of all that were found.
func (w watched) kill(ctx context.Context, dir string) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		n, err := w.find(dir)
		if err != nil {
			return err
		}
		if n == 0 && w.over() {
			return nil
		}
		for _, fd := range w {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
		select {
		case <-ctx.Done():
			return errs.Wrap(errs.InternalError, phase, "wait for the end of keepers", ctx.Err())
		case <-time.After(wait):
		}
	}
}
