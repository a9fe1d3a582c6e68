package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"dsec/internal/backend/container/cgroup"
	"dsec/internal/keeper"
)

// Owner says to whom an Item belongs.
type Owner string

// Owners.
const (
	OfServer    Owner = "server"    // of the node that runs on the data directory
	OfSandboxes Owner = "sandboxes" // of sandboxes that it knows
	OfOthers    Owner = "others"    // of nodes that run on other data directories, and their sandboxes
	Leak        Owner = "leaks"     // of nobody, or of a node that does not run
)

// Item is one kernel or disk object that belongs to a sandbox or to a node's machinery.
type Item struct {
	Kind    string `json:"kind"` // one of Kinds
	Name    string `json:"name"`
	Sandbox string `json:"sandbox,omitempty"` // empty: a node's own
	Node    string `json:"node,omitempty"`    // data directory of the running node whose place it is in
	Owner   Owner  `json:"owner"`
}

// Kinds are what an audit looks for. Threads are counted with their process, and what the
// server has open by what it is.
var Kinds = []string{"process", "thread", "namespace", "cgroup", "mount", "loop", "swap", "device", "directory", "socket",
	"fd file", "fd socket", "fd pipe", "fd pidfd", "fd eventfd", "fd epoll", "fd bpf", "fd other"}

// Audit is everything found.
type Audit struct {
	Counts map[string]int           `json:"counts"` // by kind
	Owners map[Owner]map[string]int `json:"owners"` // by owner and kind
	Items  []Item                   `json:"items"`
	Leaks  []Item                   `json:"leaks"`
	Known  int                      `json:"known_sandboxes"`
}

// Node is whose things are looked for. The zero value is none: what is of no running node
// belongs to nobody then.
type Node struct {
	Data  string                    // its data directory
	Known func(sandbox string) bool // whether its server knows a sandbox; nil if none runs
}

func (n *Node) ownerOf(i Item) Owner {
	switch {
	case i.Node != "" && i.Node != n.Data:
		return OfOthers
	case i.Sandbox != "" && n.Known != nil && n.Known(i.Sandbox):
		return OfSandboxes
	case i.Sandbox == "" && i.Node != "":
		return OfServer
	}
	return Leak
}

// idPattern finds sandbox ids in names.
var idPattern = regexp.MustCompile(`\bs[a-z2-7]{21}\b`)

// groupPattern is how nodes name their parent control groups.
var groupPattern = regexp.MustCompile(`^dsec(-[0-9a-f]{8}|test\d+-\d+)(` + cgroup.IdleSuffix + `)?$`)

// testGroup is how tests of backends name theirs, with their process id.
var testGroup = regexp.MustCompile(`^dsectest(\d+)-\d+(` + cgroup.IdleSuffix + `)?$`)

// Run looks for everything of sandboxes on this machine, and says what is n's.
func Run(n Node) (a *Audit, err error) {
	a = &Audit{Counts: map[string]int{}, Owners: map[Owner]map[string]int{}, Items: []Item{}, Leaks: []Item{}}
	if n.Data != "" {
		if n.Data, err = filepath.Abs(n.Data); err != nil {
			return nil, err
		}
		n.Data = cgroup.Resolve(n.Data) // as the kernel names it
	}
	groups, err := cgroups()
	if err != nil {
		return nil, err
	}
	owner := members(groups)
	nodes, err := running(owner)
	if err != nil {
		return nil, err
	}
	// where is a group, or a path on the host.
	add := func(kind, name, sandbox, where string) {
		a.Items = append(a.Items, Item{Kind: kind, Name: name, Sandbox: sandbox, Node: nodes.of(where)})
	}
	for _, g := range groups {
		add("cgroup", g, sandboxOf(g), g)
	}
	if err := keepers(add); err != nil {
		return nil, err
	}
	if err := processes(owner, add); err != nil {
		return nil, err
	}
	if err := swaps(add); err != nil {
		return nil, err
	}
	if err := devices(add); err != nil {
		return nil, err
	}
	if err := mounts(add); err != nil {
		return nil, err
	}
	if err := sockets(add); err != nil {
		return nil, err
	}
	if n.Data != "" {
		for _, sub := range []string{"scratch/sandboxes", "writable/sandboxes", "hollow"} {
			dir := filepath.Join(n.Data, sub)
			entries, err := os.ReadDir(dir)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
			for _, e := range entries {
				add("directory", filepath.Join(dir, e.Name()), e.Name(), dir)
			}
		}
	}
	for _, o := range []Owner{OfServer, OfSandboxes, OfOthers, Leak} {
		a.Owners[o] = map[string]int{}
	}
	count := func(kind string, i Item, n int) {
		a.Counts[kind] += n
		a.Owners[i.Owner][kind] += n
	}
	if server := nodes.servers[n.Data]; n.Data != "" && server != "" {
		for kind, k := range kindsOf(server) {
			count(kind, Item{Owner: OfServer}, k)
		}
		count("process", Item{Owner: OfServer}, 1)
		count("thread", Item{Owner: OfServer}, threads(server))
	}
	seen := map[string]bool{}
	for k := range a.Items {
		i := &a.Items[k]
		i.Owner = n.ownerOf(*i)
		count(i.Kind, *i, 1)
		if i.Kind == "process" {
			count("thread", *i, threads(i.Name))
		}
		switch {
		case i.Owner == Leak:
			a.Leaks = append(a.Leaks, *i)
		case i.Owner == OfSandboxes && !seen[i.Sandbox]:
			seen[i.Sandbox] = true
			a.Known++
		}
	}
	return a, nil
}

// cgroups lists nodes' parent groups and all below them, in every hierarchy.
func cgroups() (found []string, err error) {
	err = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil { // a group that ends while we look
			return nil
		}
		if !d.IsDir() || !groupPattern.MatchString(d.Name()) {
			return nil
		}
		found = append(found, path)
		below, err := os.ReadDir(path)
		if err != nil {
			return nil
		}
		for _, b := range below {
			if b.IsDir() {
				found = append(found, filepath.Join(path, b.Name()))
			}
		}
		return filepath.SkipDir
	})
	return found, err
}

// members maps the processes of groups to theirs.
func members(groups []string) map[int]string {
	owner := map[int]string{}
	for _, g := range groups {
		b, err := os.ReadFile(filepath.Join(g, "cgroup.procs"))
		if err != nil {
			continue // it ended
		}
		for f := range strings.FieldsSeq(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil {
				owner[pid] = g
			}
		}
	}
	return owner
}

// runningNodes are the nodes that run now.
type runningNodes struct {
	data    map[string]string // name of the parent group → data directory
	servers map[string]string // data directory → process that holds its lock
}

// running finds nodes by the lock that each holds on its data directory.
func running(owner map[int]string) (runningNodes, error) {
	nodes := runningNodes{map[string]string{}, map[string]string{}}
	err := each(func(pid int, name string) {
		if owner[pid] != "" { // sandboxes' own do not run nodes
			return
		}
		for fd, path := range descriptors(name) {
			path = strings.TrimSuffix(path, " (deleted)") // the node runs still
			if filepath.Base(path) != "lock" {
				continue
			}
			info, err := os.ReadFile("/proc/" + name + "/fdinfo/" + fd)
			if err == nil && strings.Contains(string(info), "FLOCK") && groupOf(name) == "" {
				data := filepath.Dir(path)
				nodes.data[cgroup.NameOf(data)] = data
				nodes.servers[data] = name
			}
		}
	})
	return nodes, err
}

// of returns the data directory of the running node to which a group or a path belongs, or "".
func (n runningNodes) of(where string) string {
	for dir := where; len(dir) > 1; dir = filepath.Dir(dir) {
		base := filepath.Base(dir)
		if data := n.data[strings.TrimSuffix(base, cgroup.IdleSuffix)]; data != "" {
			return data
		}
		if m := testGroup.FindStringSubmatch(base); m != nil { // a test's, without a data directory
			if _, err := os.Stat("/proc/" + m[1]); err == nil {
				return "/proc/" + m[1]
			}
		}
		for _, data := range n.data {
			if data == dir {
				return dir
			}
		}
	}
	return ""
}

// each calls do for each process, with its id as a number and as /proc has it.
func each(do func(pid int, name string)) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			do(pid, e.Name())
		}
	}
	return nil
}

// descriptors maps what a process has open to what it is; none of one that ended.
func descriptors(pid string) map[string]string {
	dir := "/proc/" + pid + "/fd/"
	open, _ := os.ReadDir(dir)
	to := make(map[string]string, len(open))
	for _, fd := range open {
		if what, err := os.Readlink(dir + fd.Name()); err == nil {
			to[fd.Name()] = what
		}
	}
	return to
}

// processes finds those in a sandbox's group, and guests that are in none, with the
// namespaces they hold.
func processes(owner map[int]string, add func(kind, name, sandbox, where string)) error {
	namespaces := map[string]bool{}
	return each(func(pid int, name string) {
		group, ours := owner[pid]
		if !ours {
			if !isGuest(name) {
				return
			}
			group = groupOf(name) // made since we looked at the groups, if it is in one
		}
		if stat, err := os.ReadFile("/proc/" + name + "/stat"); err != nil || strings.Contains(string(stat), ") Z ") {
			return // it has ended; its parent has yet to say so
		}
		id := sandboxOf(group)
		add("process", name, id, group)
		for _, kind := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
			ns, err := os.Readlink("/proc/" + name + "/ns/" + kind)
			if err == nil && !namespaces[ns] {
				namespaces[ns] = true
				add("namespace", ns, id, group)
			}
		}
	})
}

// keepers finds the processes that hold descriptors for a node, by their command line.
func keepers(add func(kind, name, sandbox, where string)) error {
	return each(func(_ int, pid string) {
		if dir := keeper.DirOf(pid); dir != "" {
			add("process", pid, "", filepath.Dir(dir))
		}
	})
}

// sandboxOf is the id of the sandbox whose group it is; a node's own has none.
func sandboxOf(group string) string {
	if group == "" {
		return "unknown"
	}
	return idPattern.FindString(filepath.Base(group))
}

// groupOf is the node's group that a process says it is in, or "".
func groupOf(pid string) string {
	b, err := os.ReadFile("/proc/" + pid + "/cgroup")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		_, path, _ := strings.Cut(strings.TrimSpace(line), "/")
		if groupPattern.MatchString(filepath.Base(filepath.Dir(path))) {
			return "/" + path
		}
	}
	return ""
}

// mounts lists what nodes have mounted on the host, and the loop devices below.
func mounts(add func(kind, name, sandbox, where string)) error {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 4 && strings.HasSuffix(f[4], "/scratch") && strings.Contains(line, "/dev/loop") {
			add("mount", f[4], "", f[4])
		}
	}
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err == nil && strings.Contains(string(b), "/scratch.img") {
			image := strings.TrimSpace(string(b))
			add("loop", image+" on /dev/"+filepath.Base(filepath.Dir(filepath.Dir(f))), "", image)
		}
	}
	return nil
}

func isGuest(pid string) bool {
	comm, err := os.ReadFile("/proc/" + pid + "/comm")
	return err == nil && strings.TrimSpace(string(comm)) == "dsec-guest"
}

// settle is how long a socket may be without the guest that is to have it, or had it. On a
// machine that others load with creates and removals that can take long; a socket that has
// leaked costs the audit the whole of it.
var settle = []time.Duration{100 * time.Millisecond, 300 * time.Millisecond, 600 * time.Millisecond, time.Second}

// sockets lists the guests' listening sockets. They carry no id: the group of the guest
// that holds one does. One that no guest holds is a leak.
func sockets(add func(kind, name, sandbox, where string)) error {
	left, err := listening()
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		held := heldByGuests()
		for inode := range left {
			if group, ok := held[inode]; ok && group != "" {
				add("socket", "inode "+inode, sandboxOf(group), group)
				delete(left, inode)
			}
		}
		if len(left) == 0 || i == len(settle) {
			break
		}
		time.Sleep(settle[i])
		now, err := listening()
		if err != nil {
			return err
		}
		maps.DeleteFunc(left, func(inode string, _ bool) bool { return !now[inode] })
	}
	for inode := range left {
		add("socket", "inode "+inode, sandboxOf(""), "")
	}
	return nil
}

// listening returns the inodes of guests' sockets.
func listening() (map[string]bool, error) {
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return nil, err
	}
	found := map[string]bool{}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) == 8 && strings.HasSuffix(f[7], "/guest.sock") && f[5] == "01" && f[3] == "00010000" {
			found[f[6]] = true
		}
	}
	return found, nil
}

// heldByGuests maps the inodes of sockets that guests hold to the guests' groups.
func heldByGuests() map[string]string {
	held := map[string]string{}
	_ = each(func(_ int, pid string) {
		if !isGuest(pid) {
			return
		}
		group := groupOf(pid)
		for _, to := range descriptors(pid) {
			if inode, ok := strings.CutPrefix(to, "socket:["); ok {
				held[strings.TrimSuffix(inode, "]")] = group
			}
		}
	})
	return held
}

// Empty tells whether no leak is left; the error lists what is.
func (a *Audit) Empty() error {
	if len(a.Leaks) == 0 {
		return nil
	}
	kinds := []string{}
	for _, k := range Kinds {
		if n := a.Owners[Leak][k]; n > 0 {
			kinds = append(kinds, fmt.Sprintf("%d %s", n, k))
		}
	}
	return fmt.Errorf("left on this machine: %s (first: %s %s)", strings.Join(kinds, ", "), a.Leaks[0].Kind, a.Leaks[0].Name)
}
