package proc

import (
	"cmp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/guest/clock"
	"dsec/internal/guest/user"
)

// Config is what every process of a sandbox has in common.
type Config struct {
	User     string            // the sandbox's user; empty: root
	Cwd      string            // the sandbox's working directory; empty: the user's home
	Env      map[string]string // for every process
	Users    *user.Database
	Memory   Memory
	CPUs     int           // processors that processes run on and see; 0: all
	SpillDir string        // for output beyond the cap; empty: /tmp
	Stall    time.Duration // a reader that does not move for so long is absent; 0: 30 s
	Now      func() time.Time
	Clock    *clock.Clock // of limits; nil: one that is told of no pause
}

// Table holds the sandbox's processes: those that run, and the last ones that ended.
type Table struct {
	cfg    Config
	reaper *Reaper
	pin    *pin // with the reaper's lock
	null   int
	stuck  atomic.Int32 // starts that were given up and wait for the image's data

	readHead func(path string) error

	mu   sync.Mutex
	live map[int]*Process
	tags map[string]*Process // of live processes
	past []*Process          // ended, oldest first
	kept int                 // about what the output of past takes
	runs uint64              // processes started so far
	lost int                 // ended processes of which nothing is known any more

	unswept int // processes that ended since kept was counted
}

// NewTable returns a table whose children r waits for.
func NewTable(cfg Config, r *Reaper) (*Table, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.New(time.Now)
	}
	if cfg.Stall == 0 {
		cfg.Stall = 30 * time.Second
	}
	if cfg.SpillDir == "" {
		cfg.SpillDir = "/tmp"
	}
	// Opened once: later the sandbox may have put something else there.
	null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		// An image without devices: a pipe nobody writes to also reads as empty.
		var p [2]int
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
			return nil, errs.Wrap(errs.InternalError, "guest.start", "make a null descriptor", err)
		}
		syscall.Close(p[1])
		null = p[0]
	}
	return &Table{cfg: cfg, reaper: r, pin: newPin(cfg.CPUs), null: null, readHead: readHead, live: map[int]*Process{}, tags: map[string]*Process{}}, nil
}

func (t *Table) reserveTag(tag string, p *Process) error {
	if tag == "" {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tags[tag] != nil {
		return errs.New(errs.TagInUse, "guest.start", "tag "+strconv.Quote(tag)+" names a process that runs")
	}
	t.tags[tag] = p
	return nil
}

func (t *Table) releaseTag(tag string, p *Process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tags[tag] == p {
		delete(t.tags, tag)
	}
}

func (t *Table) add(p *Process, pid int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p.Pid = pid
	t.runs++
	p.order = t.runs
	t.live[pid] = p
}

// ended moves p to the ended ones, and gives up what is beyond their bounds.
func (t *Table) ended(p *Process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.live[p.Pid] == p { // its number may be in use again by now
		delete(t.live, p.Pid)
	}
	if t.tags[p.Spec.Tag] == p {
		delete(t.tags, p.Spec.Tag)
	}
	t.remember(p)
}

// Find returns the process with this pid or tag; a live one before an ended one, the
// latest ended one first. Errors: errs.ProcessNotFound, errs.BadRequest.
func (t *Table) Find(pid int, tag string) (*Process, error) {
	if pid == 0 && tag == "" {
		return nil, errs.New(errs.BadRequest, "guest.process", "name a process by pid or tag")
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.live[pid]; p != nil && pid != 0 {
		return p, nil
	}
	if p := t.tags[tag]; p != nil && pid == 0 && p.Pid != 0 {
		return p, nil
	}
	for i := len(t.past) - 1; i >= 0; i-- {
		p := t.past[i]
		if pid != 0 && p.Pid == pid || pid == 0 && p.Spec.Tag == tag {
			return p, nil
		}
	}
	what := "tag " + strconv.Quote(tag)
	if pid != 0 {
		what = "pid " + strconv.Itoa(pid)
	}
	why := "no process with " + what
	if t.lost > 0 {
		why += " is known; of those that have ended " + strconv.Itoa(t.lost) + " are no longer kept"
	}
	return nil, errs.New(errs.ProcessNotFound, "guest.process", why)
}

// List returns the processes that run and the ended ones that are still known, in the
// order of their starts.
func (t *Table) List() []*Process {
	t.mu.Lock()
	out := append([]*Process(nil), t.past...)
	for _, p := range t.live {
		out = append(out, p)
	}
	t.mu.Unlock()
	slices.SortFunc(out, func(a, b *Process) int { return cmp.Compare(a.order, b.order) })
	return out
}

// Live returns the number of processes that run.
func (t *Table) Live() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.live)
}

// Commands returns how many processes run that are not a session's shell.
func (t *Table) Commands() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.live {
		if p.Spec.Session == "" {
			n++
		}
	}
	return n
}

// Clock is what limits are measured with.
func (t *Table) Clock() *clock.Clock { return t.cfg.Clock }

// Trim gives back memory that is only held for speed.
func (t *Table) Trim() {
	for _, p := range t.List() {
		p.Log.trim()
	}
}

// Null is the descriptor of /dev/null, for processes that are given it.
func (t *Table) Null() int { return t.null }

// Lookup finds a command as Start would, for a process like spec.
func (t *Table) Lookup(cmd string, spec Spec) (path string, ok bool) {
	name := spec.User
	if name == "" {
		name = t.cfg.User
	}
	u, err := t.cfg.Users.Lookup(name)
	if err != nil {
		u = &user.User{Home: "/"}
	}
	path, missing := lookup(cmd, u.Home, t.environ(&spec, u))
	return path, missing == nil
}
