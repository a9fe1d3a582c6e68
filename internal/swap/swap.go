package swap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Kind says what a node's paused sandboxes go to.
type Kind string

// Kinds.
const (
	Auto Kind = "auto" // the machine's own swap if it has some, else a file
	None Kind = "none" // nothing is paused
	Host Kind = "host" // the machine's own swap, as it is
	File Kind = "file" // a file of the node's
	Zram Kind = "zram" // memory of the machine, compressed
)

// Kinds in the order in which help tells of them.
func Kinds() []Kind { return []Kind{Auto, None, Host, File, Zram} }

// Option is a kind, and for a device of the node's own its size; 0: see [Config].
type Option struct {
	Kind  Kind
	Bytes int64
}

func (o Option) String() string {
	if o.Bytes == 0 {
		return string(o.Kind)
	}
	return fmt.Sprintf("%s:%d", o.Kind, o.Bytes)
}

// Least is the smallest size of a device.
const Least = 1 << 20

// Check says what is wrong with an option.
func (o Option) Check() error {
	switch o.Kind {
	case Auto, None, Host:
		if o.Bytes != 0 {
			return fmt.Errorf("%s has no size", o.Kind)
		}
	case File, Zram:
		if o.Bytes != 0 && o.Bytes < Least {
			return fmt.Errorf("the size is at least %d bytes", Least)
		}
	default:
		return fmt.Errorf("%q is not auto, none, host, file or zram", o.Kind)
	}
	return nil
}

// Config of a Space.
type Config struct {
	// Dir is where the node's own device is, or is noted; made when there is something to put there. Of a
	// file without a size it has the smaller one of the machine's memory and a quarter of what is free there; a
	// zram device without a size holds half of the machine's memory, before compression.
	Dir    string
	Option Option

	kernel kernel // nil: the real one
}

// kernel is what tests replace.
type kernel interface {
	machine() (total, free, memory int64, err error)
	swaps() ([]area, error)
	on(path string) error
	off(ctx context.Context, path string) error
}

// Space is a node's.
type Space struct {
	cfg Config

	ready atomic.Bool // the device is in use

	mu      sync.Mutex    // also held while the device is made or removed
	taken   int64         // by those whose pages are on their way
	changed chan struct{} // closed when taken falls
}

// New looks at nothing yet. An option without a kind is Auto.
func New(cfg Config) (*Space, error) {
	if cfg.Option.Kind == "" {
		cfg.Option.Kind = Auto
	}
	if err := cfg.Option.Check(); err != nil {
		return nil, errs.Wrap(errs.BadRequest, phase, "swap", err)
	}
	if cfg.kernel == nil {
		cfg.kernel = system{}
	}
	return &Space{cfg: cfg, changed: make(chan struct{})}, nil
}

const phase = "swap"

// Take makes the device if it is not there, and sees that so many bytes more fit into what is free. They are
// kept for the caller until it calls release: once its pages are there, or will not come. While others'
// are on their way it waits for these. Errors: errs.SwapFull, which says how much is
// needed and free, errs.NotSupported, errs.RequestCanceled.
func (s *Space) Take(ctx context.Context, bytes int64) (release func(), err error) {
	for {
		s.mu.Lock()
		if err := s.prepare(); err != nil {
			s.mu.Unlock()
			return nil, err
		}
		total, free, _, err := s.cfg.kernel.machine()
		taken, changed := s.taken, s.changed
		if err == nil && bytes <= free-taken {
			s.taken += bytes
			s.mu.Unlock()
			return sync.OnceFunc(func() { s.put(bytes) }), nil
		}
		s.mu.Unlock()
		if err != nil {
			return nil, errs.Wrap(errs.InternalError, phase, "look at what is free", err)
		}
		if taken == 0 || bytes > free {
			return nil, errs.New(errs.SwapFull, phase, fmt.Sprintf("%d bytes of memory do not fit into what is free of the swap: %d of %d", bytes, free, total)).
				With("needed_bytes", fmt.Sprint(bytes)).With("free_bytes", fmt.Sprint(free))
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, errs.Wrap(errs.RequestCanceled, phase, "wait for others that go to the swap", ctx.Err())
		}
	}
}

func (s *Space) put(bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken -= bytes
	close(s.changed)
	s.changed = make(chan struct{})
}

// prepare sees that there is swap. s.mu is held.
func (s *Space) prepare() error {
	if s.ready.Load() {
		return nil
	}
	plan, err := s.plan()
	if err != nil {
		return err
	}
	switch plan.Kind {
	case File:
		err = s.makeFile(plan.Bytes)
	case Zram:
		err = s.makeZram(plan.Bytes)
	case Host: // which somebody may switch off: looked at again each time
		return nil
	}
	s.ready.Store(err == nil)
	return err
}

// plan is what prepare does: Host, or a device of a size.
func (s *Space) plan() (Option, error) {
	o := s.cfg.Option
	unsupported := func(text, hint string) (Option, error) {
		return Option{Kind: None}, errs.New(errs.NotSupported, phase, text).Advise(hint)
	}
	if o.Kind == None {
		return unsupported("this server was started with --swap none: nothing is paused", "start it with another --swap to pause sandboxes")
	}
	if o.Kind == Auto || o.Kind == Host {
		areas, err := s.cfg.kernel.swaps()
		if err != nil {
			return o, errs.Wrap(errs.InternalError, phase, "look at the machine's swap", err)
		}
		for _, a := range areas {
			if !a.nodes() {
				return Option{Kind: Host}, nil
			}
		}
		if o.Kind == Host {
			return unsupported("the machine has no swap", "add some with swapon, or start the server with --swap auto")
		}
		o.Kind = File
	}
	if o.Bytes > 0 {
		return o, nil
	}
	_, _, memory, err := s.cfg.kernel.machine()
	if err != nil {
		return o, errs.Wrap(errs.InternalError, phase, "look at the machine's memory", err)
	}
	if o.Kind == Zram {
		o.Bytes = memory / 2
		return o, nil
	}
	if st, err := os.Stat(s.path(fileName)); err == nil { // it takes its room already
		o.Bytes = st.Size()
		return o, nil
	}
	free, err := freeDisk(s.cfg.Dir)
	if err != nil {
		return o, errs.Wrap(errs.InternalError, phase, "look at the free disk space", err)
	}
	if o.Bytes = min(memory, free/4) / int64(page) * int64(page); o.Bytes < Least {
		return unsupported("the disk of the data directory has no room for a swap file", "free disk space there, or start the server with --swap host or zram")
	}
	return o, nil
}

// freeDisk is what is free where dir is or will be.
func freeDisk(dir string) (int64, error) {
	for {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		if err == nil {
			return int64(st.Bavail) * st.Bsize, nil
		}
		if up := filepath.Dir(dir); err == unix.ENOENT && up != dir {
			dir = up
			continue
		}
		return 0, err
	}
}

// Stat tells how large the swap is, before a device of the node's own is made with what that will add, and how much
// of it is used. Others of the machine use it, too. With nothing to pause to it is nothing. It waits for nobody.
func (s *Space) Stat() v1.Swap {
	total, free, _, err := s.cfg.kernel.machine()
	if err != nil {
		return v1.Swap{}
	}
	used := total - free
	if !s.ready.Load() {
		plan, err := s.plan()
		if err != nil {
			return v1.Swap{}
		}
		if plan.Kind != Host && len(s.active()) == 0 {
			total += plan.Bytes
		}
	}
	return v1.Swap{TotalBytes: total, UsedBytes: used}
}

// Device is one that a node made.
type Device struct {
	Kind   Kind
	Path   string
	Active bool // the kernel swaps to it
}

// Devices lists the node's own, for audits.
func (s *Space) Devices() []Device {
	var out []Device
	active := s.active()
	if path := s.path(fileName); exists(path) {
		out = append(out, Device{File, path, active[path]})
	}
	if n, ok := s.noted(); ok {
		path := n.path()
		out = append(out, Device{Zram, path, active[path]})
	}
	return out
}

// active are the paths of the node's own devices that the kernel swaps to.
func (s *Space) active() map[string]bool {
	out := map[string]bool{}
	areas, err := s.cfg.kernel.swaps()
	if err != nil {
		return out
	}
	n, ok := s.noted()
	for _, a := range areas {
		if a.is(s.path(fileName)) {
			out[s.path(fileName)] = true
		}
		if ok && a.is(n.path()) {
			out[n.path()] = true
		}
	}
	return out
}

// Remove switches the node's own devices off and removes them. What is still swapped out comes back into memory:
// it takes long, or fails, if that is much; ctx bounds the wait. The space can be used again afterwards.
func (s *Space) Remove(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready.Store(false)
	err := errors.Join(s.removeFile(ctx), s.removeZram(ctx))
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "remove the node's swap", err)
	}
	if err := os.Remove(s.cfg.Dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return errs.Wrap(errs.InternalError, phase, "remove the node's swap", err)
	}
	return nil
}

func (s *Space) path(name string) string { return filepath.Join(s.cfg.Dir, name) }

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }

// area is a line of /proc/swaps.
type area struct {
	path  string
	total int64
	used  int64
}

// nodes tells whether a node made it: it goes when that node does, and is no swap of the machine. A
// zram device does not show it.
func (a area) nodes() bool { return filepath.Base(a.path) == fileName }

// is tells whether path is what the area lies in.
func (a area) is(path string) bool {
	one, err := os.Stat(a.path)
	if err != nil {
		return a.path == path
	}
	two, err := os.Stat(path)
	return err == nil && os.SameFile(one, two)
}

// system is the real kernel.
type system struct{}

func (system) machine() (total, free, memory int64, err error) {
	var i unix.Sysinfo_t
	if err := unix.Sysinfo(&i); err != nil {
		return 0, 0, 0, err
	}
	unit := int64(i.Unit)
	return int64(i.Totalswap) * unit, int64(i.Freeswap) * unit, int64(i.Totalram) * unit, nil
}

func (system) swaps() ([]area, error) {
	b, err := os.ReadFile("/proc/swaps")
	if errors.Is(err, fs.ErrNotExist) { // a kernel without swap
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return parseSwaps(string(b))
}

// parseSwaps reads lines of path, type, size, used (KiB) and priority, below a head.
func parseSwaps(text string) (out []area, err error) {
	_, lines, _ := strings.Cut(text, "\n")
	for line := range strings.Lines(lines) {
		f := strings.Fields(line)
		if len(f) != 5 {
			return nil, fmt.Errorf("unexpected line in /proc/swaps: %q", line)
		}
		var a area
		if _, err := fmt.Sscan(f[2]+" "+f[3], &a.total, &a.used); err != nil {
			return nil, fmt.Errorf("unexpected line in /proc/swaps: %q", line)
		}
		a.total, a.used = a.total<<10, a.used<<10
		a.path = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(f[0])
		out = append(out, a)
	}
	return out, nil
}
