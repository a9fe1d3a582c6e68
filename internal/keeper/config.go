package keeper

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dsec/api/v1/errs"
)

// Config says how keepers run. Zero values mean the defaults.
type Config struct {
	Dir      string        // of sockets, locks and logs; one set of keepers each
	Verb     []string      // arguments with which this binary calls [Main] (default "keeper")
	Slots    int           // keepers (default 2)
	Patience time.Duration // without an edge, before Hooks.Abandoned (default 30 s)
	Linger   time.Duration // of keepers that hold nothing and serve no edge (default 30 s)
	Log      *slog.Logger
}

func (c *Config) fill() {
	if len(c.Verb) == 0 {
		c.Verb = []string{"keeper"}
	}
	if c.Slots == 0 {
		c.Slots = 2
	}
	if c.Patience == 0 {
		c.Patience = 30 * time.Second
	}
	if c.Linger == 0 {
		c.Linger = 30 * time.Second
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

// Hooks is what a keeper's process can do besides keeping.
type Hooks struct {
	// Abandoned, if set, is called when descriptors are held and no edge has been
	// there for Patience, with a client of the keepers, until ctx ends because an edge
	// came. Several keepers may call it; it is called again if it fails.
	Abandoned func(ctx context.Context, held *Client) error
}

func (c Config) args(slot int) []string {
	return append(append([]string(nil), c.Verb...), "-dir", c.Dir, "-slot", strconv.Itoa(slot), "-slots", strconv.Itoa(c.Slots),
		"-patience", c.Patience.String(), "-linger", c.Linger.String())
}

func parseArgs(args []string, verb []string) (Config, int, error) {
	c := Config{Verb: verb}
	fs := flag.NewFlagSet("keeper", flag.ContinueOnError)
	fs.StringVar(&c.Dir, "dir", "", "directory of the sockets")
	slot := fs.Int("slot", 0, "which one this is")
	fs.IntVar(&c.Slots, "slots", 2, "how many there are")
	fs.DurationVar(&c.Patience, "patience", 0, "without an edge")
	fs.DurationVar(&c.Linger, "linger", 0, "with nothing to do")
	if err := fs.Parse(args); err != nil {
		return c, 0, err
	}
	if c.Dir == "" || *slot < 0 || *slot >= c.Slots || c.Slots > 16 {
		return c, 0, fmt.Errorf("keeper is started by an edge, not by hand")
	}
	c.fill()
	return c, *slot, nil
}

// processName is a keeper's first argument: its program is the edge's.
const processName = "dsec-keeper"

// DirOf returns the directory of the keeper with a process id, or "" if it is none.
func DirOf(pid string) string {
	b, err := os.ReadFile("/proc/" + pid + "/cmdline")
	if err != nil {
		return ""
	}
	args := strings.Split(string(b), "\x00")
	if i := slices.Index(args, "-dir"); args[0] == processName && i > 0 && i+1 < len(args) {
		return args[i+1]
	}
	return ""
}

const maxLog = 1 << 20

// spawn starts the keeper of a slot: a session of its own, so that what is sent to
// the starter's group or terminal does not reach it.
// The channel closes when it has ended: if another one has the slot, at once.
func (c Config) spawn(slot int) (<-chan struct{}, error) {
	path := filepath.Join(c.Dir, fmt.Sprintf("keeper-%d.log", slot))
	if st, err := os.Stat(path); err == nil && st.Size() > maxLog {
		os.Truncate(path, 0)
	}
	out, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "open keeper's log", err)
	}
	defer out.Close()
	cmd := &exec.Cmd{
		Path:   "/proc/self/exe", // also when the file was replaced since
		Args:   append([]string{processName}, c.args(slot)...),
		Env:    []string{"PATH=" + os.Getenv("PATH"), "GOGC=50"},
		Dir:    "/",
		Stdout: out, Stderr: out,
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "start keeper", err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		cmd.Wait()
	}()
	return ended, nil
}

// spawner starts the keeper of one slot, not again while the last one it started runs.
type spawner struct {
	slot  int
	child <-chan struct{}
}

func (s *spawner) spawn(c Config, dir *os.File) {
	select {
	case <-s.child:
	default:
		if s.child != nil {
			return
		}
	}
	if !slotFree(dir, s.slot) {
		return
	}
	child, err := c.spawn(s.slot)
	if err != nil {
		c.Log.Error("keeper not started", "slot", s.slot, "error", err)
		return
	}
	s.child = child
}
