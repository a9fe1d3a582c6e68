package freeze

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
)

const phase = "snapshot.freeze"

// Group says where processes are and where they can be frozen. Its methods go by these
// names alone and remember nothing: any process can thaw what another froze.
type Group struct {
	// Dir is the group's directory in a hierarchy that freezes: version 2, or the version 1
	// freezer.
	Dir string
	// Members, if set, is the directory of the group, in another hierarchy, that has all the
	// processes. Dir is then made when it is needed, and they are moved into it. They stay
	// there after a thaw (their children are born there, so the next freeze finds all in place)
	// until Remove.
	Members string
}

// Limits bound how long processes stand still. Zero values mean the defaults.
type Limits struct {
	Freeze time.Duration // until all stand still (default 2 s)
	// Hold is from then on until they run again by themselves (default 30 s); below 0 they stand still until
	// Thaw, and beyond the end of this process.
	Hold time.Duration
}

func (l *Limits) fill() {
	if l.Freeze == 0 {
		l.Freeze = 2 * time.Second
	}
	if l.Hold == 0 {
		l.Hold = 30 * time.Second
	}
}

// Frozen is a group that stands still.
type Frozen struct {
	g     Group
	since time.Time
	timer *time.Timer // nil: held without end

	mu   sync.Mutex
	done bool
	lost bool
	err  error
}

// Freeze stops all processes of the group and returns once each stands still. If they do not in
// time, or ctx ends, they run on: state_conflict, retryable, with the pids of those
// that would not stop (such as one that waits for a disk). Other errors: not_supported,
// internal_error.
func (g Group) Freeze(ctx context.Context, l Limits) (*Frozen, error) {
	l.fill()
	v1, err := g.prepare()
	if err != nil {
		return nil, err
	}
	deadline, cancel := context.WithTimeout(ctx, l.Freeze)
	defer cancel()
	if v1 {
		err = g.freeze1(deadline)
	} else {
		err = g.freeze2(deadline)
	}
	if err != nil {
		moving := g.moving() // before they run on
		if terr := g.Thaw(); terr != nil {
			err = errors.Join(err, terr)
		}
		if ctx.Err() != nil {
			return nil, errs.Wrap(errs.RequestCanceled, phase, "freeze "+g.Dir, ctx.Err())
		}
		if deadline.Err() != nil {
			e := errs.New(errs.StateConflict, phase, fmt.Sprintf("the processes do not stand still within %v", l.Freeze)).Because(err)
			e.Retryable = true
			return nil, e.With("moving", moving)
		}
		return nil, errs.Wrap(errs.InternalError, phase, "freeze "+g.Dir, err)
	}
	f := &Frozen{g: g, since: time.Now()}
	if l.Hold > 0 {
		f.timer = time.AfterFunc(l.Hold, func() { f.thaw(true) })
	}
	return f, nil
}

// Thaw lets the processes run again; further calls return the same. An error means that they
// may stand still, or (state_conflict) that they ran again before, since the hold was over: what
// was read meanwhile is of no single moment.
func (f *Frozen) Thaw() error {
	if f.timer != nil {
		f.timer.Stop()
	}
	f.thaw(false)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lost && f.err == nil {
		e := errs.New(errs.StateConflict, phase, "the processes were frozen for too long and run again")
		e.Retryable = true
		return e
	}
	return f.err
}

// Since is when the last process stood still.
func (f *Frozen) Since() time.Time { return f.since }

func (f *Frozen) thaw(lost bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.done && f.err == nil {
		return
	}
	f.done, f.lost = true, f.lost || lost
	f.err = f.g.Thaw()
}

// Thaw lets the group's processes run, whoever froze them; a group that is not frozen or not
// there is fine.
func (g Group) Thaw() error {
	for _, c := range []struct{ file, frozen, thaw string }{
		{"freezer.state", "", "THAWED"}, {"cgroup.freeze", "1", "0"},
	} {
		now, err := g.read(c.file)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
			continue
		case err == nil && (now == c.thaw || c.frozen != "" && now != c.frozen):
			return nil
		case err == nil:
			err = g.write(c.file, c.thaw)
			if errors.Is(err, unix.ENODEV) || errors.Is(err, fs.ErrNotExist) {
				return nil
			}
		}
		return errs.Wrap(errs.InternalError, phase, "thaw "+g.Dir, err)
	}
	return nil
}

// IsFrozen tells whether the group is frozen or about to be.
func (g Group) IsFrozen() bool {
	one, err1 := g.read("freezer.state")
	two, err2 := g.read("cgroup.freeze")
	return err1 == nil && one != "THAWED" || err2 == nil && two == "1"
}

// Remove deletes a Dir that was made for freezing, once its processes have ended; until then it
// waits, up to ctx. What does not exist is fine.
func (g Group) Remove(ctx context.Context) error {
	if g.Members == "" {
		return nil // not ours
	}
	for wait := 100 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) {
		err := unix.Rmdir(g.Dir)
		if err == nil || err == unix.ENOENT {
			return nil
		}
		if err != unix.EBUSY || !sleep(ctx, wait) {
			return errs.Wrap(errs.InternalError, phase, "remove "+g.Dir, err)
		}
	}
}

// prepare makes the group if need be and tells its version.
func (g Group) prepare() (v1 bool, err error) {
	if g.Members != "" {
		if err := os.MkdirAll(g.Dir, 0o755); err != nil {
			return false, errs.Wrap(errs.NotSupported, phase, "make the freezer's group", err)
		}
	}
	for _, file := range []string{"freezer.state", "cgroup.freeze"} {
		if _, err := os.Stat(filepath.Join(g.Dir, file)); err == nil {
			return file == "freezer.state", nil
		}
	}
	return false, errs.New(errs.NotSupported, phase, "no freezer at "+g.Dir+" (cgroup v1 freezer, or v2 with kernel 5.2)")
}

// freeze1 freezes first and moves the processes in then: each stops as it enters, so that the
// others, whose children are born outside, become fewer and not more.
func (g Group) freeze1(ctx context.Context) error {
	if err := g.write("freezer.state", "FROZEN"); err != nil {
		return err
	}
	for wait := 50 * time.Microsecond; ; wait = min(2*wait, 5*time.Millisecond) {
		outside, err := g.moveIn()
		if err != nil {
			return err
		}
		if outside == 0 { // all are in, and so are children to come
			state, err := g.read("freezer.state")
			if err != nil || state == "FROZEN" {
				return err
			}
			// One that was moved in as it waited for its vfork's child stops only when it is told again.
			if err := g.write("freezer.state", "FROZEN"); err != nil {
				return err
			}
		}
		if !sleep(ctx, wait) {
			return context.Cause(ctx)
		}
	}
}

func (g Group) freeze2(ctx context.Context) error {
	if err := g.write("cgroup.freeze", "1"); err != nil {
		return err
	}
	for wait := 50 * time.Microsecond; ; wait = min(2*wait, 5*time.Millisecond) {
		outside, err := g.moveIn()
		if err != nil {
			return err
		}
		if outside == 0 {
			events, err := g.read("cgroup.events")
			if err != nil || strings.Contains("\n"+events+"\n", "\nfrozen 1\n") {
				return err
			}
		}
		if !sleep(ctx, wait) {
			return context.Cause(ctx)
		}
	}
}

// moveIn moves the members that are not in Dir yet into it and returns how many there were.
func (g Group) moveIn() (int, error) {
	if g.Members == "" {
		return 0, nil
	}
	all, err := tasks(g.Members)
	if err != nil {
		return 0, err
	}
	in, err := tasks(g.Dir)
	if err != nil {
		return 0, err
	}
	n := 0
	for id := range all {
		if in[id] {
			continue
		}
		n++
		// The kernel moves the whole process of a thread.
		if err := g.write("cgroup.procs", strconv.Itoa(id)); err != nil && !errors.Is(err, unix.ESRCH) {
			return n, fmt.Errorf("move %d: %w", id, err)
		}
	}
	return n, nil
}

// tasks lists a group's threads: unlike its processes, those have not ended though others of
// their process live.
func tasks(dir string) (map[int]bool, error) {
	b, err := os.ReadFile(filepath.Join(dir, "tasks"))
	if errors.Is(err, fs.ErrNotExist) { // version 2
		b, err = os.ReadFile(filepath.Join(dir, "cgroup.threads"))
	}
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	out := map[int]bool{}
	for f := range strings.FieldsSeq(string(b)) {
		id, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("tasks of %s: %w", dir, err)
		}
		out[id] = true
	}
	return out, nil
}

// moving lists, for an error's text, threads that run or wait for a device.
func (g Group) moving() string {
	in, err := tasks(g.Dir)
	if err != nil {
		return ""
	}
	var out []string
	for id := range in {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(id) + "/stat")
		if err != nil {
			continue
		}
		s := string(b)
		open, end := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
		f := strings.Fields(s[end+1:])
		if open < 0 || len(f) == 0 || f[0] != "R" && f[0] != "D" {
			continue
		}
		// What stands still is shown as waiting, too.
		if where, err := os.ReadFile("/proc/" + strconv.Itoa(id) + "/wchan"); err == nil && (string(where) == "__refrigerator" || string(where) == "do_freezer_trap") {
			continue
		}
		if out = append(out, fmt.Sprintf("%d %q %s", id, s[open+1:end], f[0])); len(out) == 10 {
			break
		}
	}
	return strings.Join(out, ", ")
}

func (g Group) read(file string) (string, error) {
	b, err := os.ReadFile(filepath.Join(g.Dir, file))
	return strings.TrimSpace(string(b)), err
}

func (g Group) write(file, value string) error {
	path := filepath.Join(g.Dir, file)
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	for {
		if _, err = unix.Write(fd, []byte(value)); err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("write %q to %s: %w", value, path, err)
	}
	return nil
}

// sleep returns false if ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
