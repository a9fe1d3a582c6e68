package cgroup

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"dsec/internal/snapshot/freeze"

	"golang.org/x/sys/unix"
)

// Limits of one group. Zero means no limit.
type Limits struct {
	MemoryBytes int64
	PIDs        int64
	Idle        bool // it gets what all others leave of the processors; see cpu.go
}

// Usage counters of one group.
type Usage struct {
	CPU             time.Duration
	MemoryBytes     int64
	PeakMemoryBytes int64
	SwapBytes       int64 // of its memory, what is swapped out; 0 where the kernel does not count it
	PIDs            int64
	OOMKills        int64
	PIDsRefused     int64 // forks that the limit refused
}

// Hierarchy is where groups are made: one directory for each controller (v1), or one
// for all (v2).
type Hierarchy struct {
	v2   bool
	dirs map[string]string // controller → parent directory; v2: one entry "unified"
	// freezer is the parent of groups in a hierarchy of their own that freezes them, made
	// at a sandbox's first freeze. "": v2, where every group can be frozen, or none is here.
	freezer string

	hurries hurries

	sockets, swap bool // whether the kernel can limit these
}

// v1Controllers are those a group is made in. cpuacct may share the mount of cpu.
var v1Controllers = []string{"memory", "cpu", "cpuacct", "pids"}

// socketLimit is of the buffers of TCP and UDP sockets, which v1 counts apart from other memory and
// only in groups in which this was ever written. A group may have a socketPart-th of its memory
// limit for them beyond that.
const (
	socketLimit = "memory.kmem.tcp.limit_in_bytes"
	socketPart  = 4
)

const memoryLimitV1 = "memory.limit_in_bytes"

// A memory limit alone says nothing of swap: what a group has too much would fill that of the machine.
const (
	swapLimitV1 = "memory.memsw.limit_in_bytes"
	swapLimitV2 = "memory.swap.max"
	swapUsageV1 = "memory.memsw.usage_in_bytes"
	swapUsageV2 = "memory.swap.current"
)

// cpuPeriod of the CPU quota, the kernel's default.
const cpuPeriod = 100_000 // microseconds

// Open returns the hierarchy that an earlier process chose and wrote to file, if it still
// exists, and otherwise detects one and writes it there: a node that is restarted
// from another place of the cgroup tree must find its groups again.
func Open(file, root, self, name string) (*Hierarchy, error) {
	var saved struct {
		V2      bool              `json:"v2"`
		Dirs    map[string]string `json:"dirs"`
		Freezer string            `json:"freezer,omitempty"`
	}
	if data, err := os.ReadFile(file); err == nil && json.Unmarshal(data, &saved) == nil && len(saved.Dirs) > 0 {
		usable := true
		for _, d := range parents(saved.Dirs, saved.Freezer) {
			_, err := os.Stat(filepath.Join(d, "cgroup.procs"))
			usable = usable && err == nil
		}
		if usable && (saved.V2 || saved.Freezer != "") {
			h := &Hierarchy{v2: saved.V2, dirs: saved.Dirs, freezer: saved.Freezer}
			return h, h.prepare()
		}
	}
	h, err := Detect(root, self, name)
	if err != nil {
		return nil, err
	}
	if err := h.prepare(); err != nil {
		return nil, err
	}
	saved.V2, saved.Dirs, saved.Freezer = h.v2, h.dirs, h.freezer
	data, err := json.Marshal(saved)
	if err != nil {
		return nil, err
	}
	return h, os.WriteFile(file, data, 0o600)
}

// parents are all directories in which groups are.
func parents(dirs map[string]string, freezer string) []string {
	out := slices.Collect(maps.Values(dirs))
	if freezer != "" {
		out = append(out, freezer)
	}
	return out
}

func (h *Hierarchy) parents() []string { return append(parents(h.dirs, h.freezer), h.idleParent()) }

// Freezer says where group name can be frozen.
func (h *Hierarchy) Freezer(name string) freeze.Group {
	if h.freezer == "" { // with v1: there is no freezer, and freezing says so
		return freeze.Group{Dir: h.group("pids", name)}
	}
	return freeze.Group{Dir: filepath.Join(h.freezer, name), Members: h.group("pids", name)}
}

// CanFreeze fails, with what is missing, where groups cannot be frozen.
func (h *Hierarchy) CanFreeze() error {
	dir := h.freezer
	if h.v2 {
		dir = h.dirs["unified"]
	}
	for _, file := range []string{"freezer.state", "cgroup.freeze"} {
		if _, err := os.Stat(filepath.Join(dir, file)); dir != "" && err == nil {
			return nil
		}
	}
	return errors.New("no cgroup freezer is mounted")
}

// RemoveAll deletes the parent groups, which must have no groups left in them.
func (h *Hierarchy) RemoveAll() error {
	var errs []error
	for _, d := range h.parents() {
		if err := unix.Rmdir(d); err != nil && err != unix.ENOENT {
			errs = append(errs, fmt.Errorf("remove cgroup %s: %w", d, err))
		}
	}
	return errors.Join(errs...)
}

// Detect finds the host's controllers under root (/sys/fs/cgroup) and makes the parent
// group name in each: below our own group with v1 (whose limits then hold for all
// sandboxes too), below the root with v2 (where a group with processes cannot have
// children with controllers). self is /proc/self/cgroup.
func Detect(root, self, name string) (*Hierarchy, error) {
	own, err := ownGroups(self)
	if err != nil {
		return nil, err
	}
	if b, err := os.ReadFile(filepath.Join(root, "cgroup.controllers")); err == nil {
		for _, want := range []string{"cpu", "memory", "pids"} {
			if !strings.Contains(" "+strings.TrimSpace(string(b))+" ", " "+want+" ") {
				return nil, fmt.Errorf("cgroup v2 at %s has no %s controller", root, want)
			}
		}
		if err := enableV2(root); err != nil {
			return nil, err
		}
		dir := filepath.Join(root, name)
		if err := mkdir(dir); err != nil {
			return nil, err
		}
		if err := enableV2(dir); err != nil {
			return nil, err
		}
		return &Hierarchy{v2: true, dirs: map[string]string{"unified": dir}}, nil
	}
	h := &Hierarchy{dirs: map[string]string{}}
	seen := map[string]bool{}
	for _, c := range v1Controllers {
		dir, err := parentV1(filepath.Join(root, c), own[c], name)
		if err != nil {
			return nil, fmt.Errorf("cgroup v1 controller %s: %w", c, err)
		}
		if !seen[dir] {
			h.dirs[c] = dir
			seen[dir] = true
		}
	}
	// Either freezes; without one there are sandboxes all the same, but no snapshots.
	for _, f := range []struct{ mount, own string }{{"freezer", own["freezer"]}, {"unified", own[""]}} {
		dir, err := parentV1(filepath.Join(root, f.mount), f.own, name)
		if err == nil {
			h.freezer = dir
			break
		}
	}
	return h, nil
}

// enableV2 gives the groups below dir their controllers.
func enableV2(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+cpu +memory +pids"), 0); err != nil {
		return fmt.Errorf("enable controllers in %s: %w", dir, err)
	}
	return nil
}

// parentV1 makes the parent group in one hierarchy, below our own group there.
func parentV1(mount, own, name string) (string, error) {
	if resolved, err := filepath.EvalSymlinks(mount); err == nil {
		mount = resolved // cpu and cpuacct are often one mount with two names
	}
	if _, err := os.Stat(filepath.Join(mount, "tasks")); err != nil {
		if _, v2 := os.Stat(filepath.Join(mount, "cgroup.procs")); v2 != nil { // of a version 2 tree beside version 1
			return "", err
		}
	}
	dir := filepath.Join(mount, own, name)
	if old, err := Find(mount, name); err != nil {
		return "", err
	} else if len(old) > 0 { // of an earlier process of this node, which ran elsewhere in the tree
		dir = old[0]
	}
	return dir, mkdir(dir)
}

// NameOf is the parent group of the node with that data directory (absolute): its own, so
// that several nodes can share a machine.
func NameOf(data string) string {
	sum := sha256.Sum256([]byte(Resolve(data)))
	return "dsec-" + hex.EncodeToString(sum[:4])
}

// Resolve follows the symbolic links of an absolute path, as far as it exists: a directory
// has one name then, also after it was removed.
func Resolve(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	if dir := filepath.Dir(path); dir != path {
		return filepath.Join(Resolve(dir), filepath.Base(path))
	}
	return path
}

// Find returns the groups with that name below root, wherever they are, outermost first.
func Find(root, name string) (found []string, err error) {
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil && path == root:
			return err
		case err != nil || !d.IsDir(): // groups end while we look
			return nil
		case d.Name() == name:
			found = append(found, path)
			return fs.SkipDir
		case strings.HasPrefix(d.Name(), "dsec-"): // another node's: it may have thousands
			return fs.SkipDir
		}
		return nil
	})
	return found, err
}

func ownGroups(self string) (map[string]string, error) {
	f, err := os.Open(self)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	own := map[string]string{}
	for s := bufio.NewScanner(f); s.Scan(); {
		parts := strings.SplitN(s.Text(), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for _, c := range strings.Split(parts[1], ",") {
			own[c] = parts[2]
		}
	}
	return own, nil
}

func mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make cgroup: %w", err)
	}
	return nil
}

// V2 tells which version is in use.
func (h *Hierarchy) V2() bool { return h.v2 }

// dir of a controller, where cpuacct may live in cpu's directory.
func (h *Hierarchy) dir(controller string) string {
	if h.v2 {
		return h.dirs["unified"]
	}
	if d, ok := h.dirs[controller]; ok {
		return d
	}
	return h.dirs["cpu"]
}

// prepare sets what holds for all groups together, and looks at what the kernel has.
func (h *Hierarchy) prepare() error {
	has := func(file string) bool {
		_, err := os.Stat(filepath.Join(h.dir("memory"), file))
		return err == nil
	}
	if h.v2 {
		h.swap = has(swapLimitV2)
		return h.prepareCPU()
	}
	h.swap, h.sockets = has(swapLimitV1), has(socketLimit)
	if has(swappinessV1) { // groups begin with their parent's
		if err := write(filepath.Join(h.dir("memory"), swappinessV1), "0"); err != nil {
			return err
		}
	}
	if h.sockets {
		// No limit, but the kernel patches itself when the first group counts and when the last one
		// that does is gone: this one is there always.
		if err := write(filepath.Join(h.dir("memory"), socketLimit), "-1"); err != nil {
			return err
		}
	}
	return h.prepareCPU()
}

func write(path, value string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(value)); err != nil {
		return fmt.Errorf("write %q to %s: %w", value, path, err)
	}
	return nil
}

// Create makes group name with its limits. It is idempotent.
func (h *Hierarchy) Create(name string, l Limits) error {
	for controller, dir := range h.dirs {
		if l.Idle && (h.v2 || controller == "cpu") {
			dir = h.idleParent()
		}
		if err := mkdir(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	set := func(controller, file, value string) error {
		return write(filepath.Join(h.group(controller, name), file), value)
	}
	var errs []error
	if l.MemoryBytes > 0 {
		if h.v2 {
			errs = append(errs, set("memory", "memory.max", itoa(l.MemoryBytes)))
		} else {
			errs = append(errs, set("memory", memoryLimitV1, itoa(l.MemoryBytes)))
			if h.sockets {
				errs = append(errs, set("memory", socketLimit, itoa(l.MemoryBytes/socketPart)))
			}
		}
		if h.swap { // none; v1 limits the sum
			if h.v2 {
				errs = append(errs, set("memory", swapLimitV2, "0"))
			} else {
				errs = append(errs, set("memory", swapLimitV1, itoa(l.MemoryBytes)))
			}
		}
	}
	if l.PIDs > 0 {
		errs = append(errs, set("pids", "pids.max", itoa(l.PIDs)))
	}
	return errors.Join(errs...)
}

// LimitCPU sets how much CPU time group name may use. It is no part of Create, since the kernel looks at every
// CPU group of the machine when one gets a quota (6.18: tg_set_bandwidth).
func (h *Hierarchy) LimitCPU(name string, millis int64) error {
	quota := itoa(millis * cpuPeriod / 1000)
	if h.v2 {
		return write(filepath.Join(h.group("cpu", name), "cpu.max"), quota+" "+itoa(cpuPeriod))
	}
	return write(filepath.Join(h.group("cpu", name), "cpu.cfs_quota_us"), quota)
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// Entry is how a new process gets into a group: cloned into it (v2, one descriptor of
// its directory), or by writing "0" to each of the descriptors itself (v1) while it
// has one thread.
type Entry struct {
	CloneInto int // -1 with v1
	JoinFDs   []int
}

// Open opens group name for joining.
func (h *Hierarchy) Open(name string) (Entry, error) {
	e := Entry{CloneInto: -1}
	if h.v2 {
		fd, err := unix.Open(h.group("cpu", name), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return e, fmt.Errorf("open cgroup %s: %w", name, err)
		}
		e.CloneInto = fd
		return e, nil
	}
	for _, c := range v1Controllers {
		if _, ok := h.dirs[c]; !ok {
			continue
		}
		fd, err := unix.Open(filepath.Join(h.group(c, name), "tasks"), unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			e.Close()
			return Entry{CloneInto: -1}, fmt.Errorf("open cgroup %s of %s: %w", name, c, err)
		}
		e.JoinFDs = append(e.JoinFDs, fd)
	}
	return e, nil
}

// Close closes the descriptors.
func (e Entry) Close() {
	if e.CloneInto >= 0 {
		unix.Close(e.CloneInto)
	}
	for _, fd := range e.JoinFDs {
		unix.Close(fd)
	}
}

// Remove deletes group name; what does not exist is fine. A group whose last process
// has just died may be busy for a moment: that is waited for, up to the deadline.
func (h *Hierarchy) Remove(name string, deadline time.Time) error {
	var errs []error
	for _, dir := range h.parents() {
		path := filepath.Join(dir, name)
		for wait := 100 * time.Microsecond; ; wait *= 2 {
			err := unix.Rmdir(path)
			if err == nil || err == unix.ENOENT {
				break
			}
			if err != unix.EBUSY || time.Now().After(deadline) {
				errs = append(errs, fmt.Errorf("remove cgroup %s: %w", path, err))
				break
			}
			time.Sleep(min(wait, 20*time.Millisecond))
		}
	}
	return errors.Join(errs...)
}

// List names all groups, made by Create under the parent, of which any part is left.
func (h *Hierarchy) List() ([]string, error) {
	seen := map[string]bool{}
	var names []string
	for _, dir := range h.parents() {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.IsDir() && !seen[e.Name()] {
				seen[e.Name()] = true
				names = append(names, e.Name())
			}
		}
	}
	return names, nil
}

// Paths returns the directories of group name that exist.
func (h *Hierarchy) Paths(name string) []string {
	var out []string
	for _, dir := range h.parents() {
		p := filepath.Join(dir, name)
		if _, err := os.Lstat(p); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// PIDs lists the processes of group name; none if it does not exist.
func (h *Hierarchy) PIDs(name string) ([]int, error) {
	b, err := os.ReadFile(filepath.Join(h.group("pids", name), "cgroup.procs"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, f := range strings.Fields(string(b)) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("cgroup.procs of %s: %w", name, err)
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// memoryEvents is the file that counts the OOM kills of group name.
func (h *Hierarchy) memoryEvents(name string) string {
	file := "memory.oom_control"
	if h.v2 {
		file = "memory.events"
	}
	return filepath.Join(h.group("memory", name), file)
}

// OpenMemoryEvents opens the file in which a line "oom_kill N" counts the processes of group
// name that its memory limit killed.
func (h *Hierarchy) OpenMemoryEvents(name string) (int, error) {
	fd, err := unix.Open(h.memoryEvents(name), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", h.memoryEvents(name), err)
	}
	return fd, nil
}

// OOMKills counts the processes of group name that its memory limit killed. It costs much
// less than Usage.
func (h *Hierarchy) OOMKills(name string) (int64, error) {
	fd, err := h.OpenMemoryEvents(name)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	var buf [512]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", h.memoryEvents(name), err)
	}
	kills, err := strconv.ParseInt(field(string(buf[:n]), "oom_kill"), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s has no count: %w", h.memoryEvents(name), err)
	}
	return kills, nil
}

// MemoryBytes is what group name has of memory. It costs much less than Usage.
func (h *Hierarchy) MemoryBytes(name string) (int64, error) {
	file := "memory.usage_in_bytes"
	if h.v2 {
		file = "memory.current"
	}
	path := filepath.Join(h.group("memory", name), file)
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	var buf [32]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", path, err)
	}
	return strconv.ParseInt(strings.TrimSpace(string(buf[:n])), 10, 64)
}

// Usage reads the counters of group name.
func (h *Hierarchy) Usage(name string) (Usage, error) {
	var u Usage
	var err error
	read := func(controller, file string) string {
		b, e := os.ReadFile(filepath.Join(h.group(controller, name), file))
		if e != nil && err == nil {
			err = e
		}
		return strings.TrimSpace(string(b))
	}
	num := func(s string) int64 {
		n, _ := strconv.ParseInt(s, 10, 64) // "max" and absent read as 0
		return n
	}
	u.PIDs = num(read("pids", "pids.current"))
	u.PIDsRefused = num(field(read("pids", "pids.events"), "max"))
	if h.v2 {
		u.CPU = time.Duration(num(field(read("cpu", "cpu.stat"), "usage_usec"))) * time.Microsecond
		u.MemoryBytes = num(read("memory", "memory.current"))
		u.OOMKills = num(field(read("memory", "memory.events"), "oom_kill"))
		if err != nil {
			return u, err
		}
		u.PeakMemoryBytes = num(read("memory", "memory.peak")) // kernel 5.19
		u.SwapBytes = num(read("memory", swapUsageV2))
		return u, nil
	}
	u.CPU = time.Duration(num(read("cpuacct", "cpuacct.usage")))
	u.MemoryBytes = num(read("memory", "memory.usage_in_bytes"))
	u.PeakMemoryBytes = num(read("memory", "memory.max_usage_in_bytes"))
	u.OOMKills = num(field(read("memory", "memory.oom_control"), "oom_kill"))
	if h.swap { // read after the memory alone: it is no less, unless that fell in between
		u.SwapBytes = max(0, num(read("memory", swapUsageV1))-u.MemoryBytes)
	}
	return u, err
}

// field finds "key value" in lines.
func field(s, key string) string {
	for line := range strings.Lines(s) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && k == key {
			return v
		}
	}
	return ""
}
