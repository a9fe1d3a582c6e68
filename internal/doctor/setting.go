package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// SettingsDir is where the kernel has its settings.
const SettingsDir = "/proc/sys"

// Setting of the kernel that all sandboxes of a machine share. A node raises those that are lower
// (internal/up) and never lowers one.
type Setting struct {
	Name string // as sysctl has it
	Want int64  // so much that what each sandbox may have is the limit
	// With PerSandbox × sandboxes + Base a node works, though sandboxes may meet at the limit.
	PerSandbox, Base int64
	Why              string
}

// Settings are all of them. What is not here is of each sandbox (its namespaces' or its user ids'), or is not
// needed: sandboxes have no aio rings and no keyrings.
func Settings() []Setting {
	return []Setting{
		{"kernel.pid_max", 4194304, 6, 4096, "process ids of all sandboxes; each has its own limit"},
		{"kernel.threads-max", 4194304, 6, 4096, "threads of all sandboxes; their memory counts in each"},
		{"kernel.pty.max", 1 << 20, 0, 4096, "terminals of all sandboxes; each may have 256"},
		{"fs.file-max", 1 << 28, 100, 100_000, "open files of all sandboxes; their memory counts in each"},
		{"fs.nr_open", 1 << 20, 3, 1024, "open files of one process: the server's and its keepers'"},
		{"fs.inotify.max_user_instances", 8192, 0, 256, "inotify instances of one sandbox, which may have 256, or of another user"},
		{"fs.inotify.max_user_watches", 1 << 20, 0, 65536, "watches of one sandbox, which may have 65,536, or of another user; their memory counts in each"},
		{"fs.mount-max", 100_000, 0, 1024, "mounts of one sandbox, and of the machine"},
		{"net.core.netdev_max_backlog", 16384, 0, 1000, "packets on all loopbacks, which wait in one queue for each processor"},
		{"net.ipv4.neigh.default.gc_thresh2", 1 << 17, 0, 512, "neighbours on all loopbacks, of which the kernel has one table"},
		{"net.ipv4.neigh.default.gc_thresh3", 1 << 18, 1, 64, "neighbours on all loopbacks, of which the kernel has one table"},
		{"net.ipv6.neigh.default.gc_thresh2", 1 << 17, 0, 512, "neighbours on all loopbacks, of which the kernel has one table"},
		{"net.ipv6.neigh.default.gc_thresh3", 1 << 18, 1, 64, "neighbours on all loopbacks, of which the kernel has one table"},
		{"vm.max_map_count", 1 << 20, 0, 65530, "mappings of one process, which large databases want more of; their memory counts in each sandbox"},
	}
}

// Path of the setting's file below dir.
func (s Setting) Path(dir string) string {
	return filepath.Join(dir, strings.ReplaceAll(s.Name, ".", "/"))
}

// Value is what it is now. A kernel may be built without it (fs.ErrNotExist).
func (s Setting) Value(dir string) (int64, error) { return readNumber(s.Path(dir)) }

// Need is what a node with so many sandboxes cannot do without.
func (s Setting) Need(sandboxes int64) int64 { return min(s.PerSandbox*sandboxes+s.Base, s.Want) }

// checkSettings looks at what is lower than the sandboxes need and cannot be raised.
func checkSettings(dir string, sandboxes int64) (out []Check) {
	for _, s := range Settings() {
		have, err := s.Value(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		c := Check{Name: s.Name, Status: OK, Detail: fmt.Sprint(have)}
		switch need := s.Need(sandboxes); {
		case err != nil:
			c.Status, c.Detail = Warn, err.Error()
		case have >= s.Want:
		case canWrite(s.Path(dir)):
			c.Detail = fmt.Sprintf("%d; 'dsec up' raises it to %d", have, s.Want)
		case have < need:
			c.Status, c.Detail = Warn, fmt.Sprintf("%d, and it cannot be raised from here; %d sandboxes need about %d (%s)", have, sandboxes, need, s.Why)
			c.Fix = fmt.Sprintf("sysctl -w %s=%d on the machine itself", s.Name, s.Want)
		default:
			c.Detail = fmt.Sprintf("%d; it cannot be raised from here to %d (%s)", have, s.Want, s.Why)
		}
		out = append(out, c)
	}
	return out
}

// canWrite tells whether a file can be opened for writing, and writes nothing.
func canWrite(path string) bool {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		f.Close()
	}
	return err == nil
}

// checkCorePattern looks where the kernel sends what a process of a sandbox leaves when it crashes.
func checkCorePattern(dir string) Check {
	c := Check{Name: "core dumps", Status: OK, Detail: "in the sandbox of the program that crashed"}
	pattern, err := os.ReadFile(filepath.Join(dir, "kernel/core_pattern"))
	switch {
	case err != nil:
		c.Status, c.Detail = Warn, err.Error()
	case strings.HasPrefix(string(pattern), "|"), strings.HasPrefix(string(pattern), "@"):
		c.Status = Warn
		c.Detail = "crashes in sandboxes feed a program of this machine, outside of their limits: " + strings.TrimSpace(string(pattern))
		c.Fix = "sysctl -w kernel.core_pattern=core"
	}
	return c
}
