package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	v1 "dsec/api/v1"
)

// Owner says to whom an Item belongs.
type Owner string

// Owners.
const (
	OfServer    Owner = "server"    // of the node that runs on the data directory
	OfSandboxes Owner = "sandboxes" // of sandboxes that it knows
	OfOthers    Owner = "others"    // of another data directory's node and its sandboxes
	Leak        Owner = "leaks"     // of nobody
)

// Item is one kernel or disk object that belongs to a sandbox or to a node's machinery.
type Item struct {
	Kind    string `json:"kind"` // one of Kinds
	Name    string `json:"name"`
	Sandbox string `json:"sandbox,omitempty"` // empty: a node's own
	Owner   Owner  `json:"owner"`
}

// Kinds are what an audit looks for.
var Kinds = []string{"process", "namespace", "cgroup", "mount", "loop", "directory", "socket"}

// Audit is everything found.
type Audit struct {
	Counts map[string]int           `json:"counts"` // by kind
	Owners map[Owner]map[string]int `json:"owners"` // by owner and kind
	Items  []Item                   `json:"items"`
	Leaks  []Item                   `json:"leaks"`
	Known  int                      `json:"known_sandboxes"`
}

// Node is whose things are looked for. One without an ID is none: all that is found
// belongs to nobody then.
type Node struct {
	Data   string // its data directory, absolute
	ID     string
	Group  string // its parent control group
	Served bool   // it runs
	Known  func(sandbox string) bool
}

func (n *Node) ownerOf(i Item) Owner {
	other, ours := n.ID != "", strings.HasPrefix(i.Name, n.Data+"/") || filepath.Base(i.Name) == n.Group
	if i.Sandbox != "" {
		if n.Known(i.Sandbox) {
			return OfSandboxes
		}
		id, _, err := v1.ParseSandboxID(i.Sandbox)
		other, ours = other && err == nil && id != n.ID, false
	}
	switch {
	case ours && n.Served && i.Kind != "directory":
		return OfServer
	case other && !ours:
		return OfOthers
	}
	return Leak
}

// idPattern finds sandbox ids in names.
var idPattern = regexp.MustCompile(`\bs[a-z2-7]{21}\b`)

// groupPattern is how nodes name their parent control groups.
var groupPattern = regexp.MustCompile(`^dsec(-[0-9a-f]{8}|test\d+-\d+)$`)

// Run looks for everything of sandboxes on this machine, and says what is n's.
func Run(n Node) (*Audit, error) {
	a := &Audit{Counts: map[string]int{}, Owners: map[Owner]map[string]int{}, Items: []Item{}, Leaks: []Item{}}
	groups, err := cgroups()
	if err != nil {
		return nil, err
	}
	add := func(kind, name, sandbox string) {
		a.Items = append(a.Items, Item{Kind: kind, Name: name, Sandbox: sandbox})
	}
	for _, g := range groups {
		add("cgroup", g, idPattern.FindString(filepath.Base(g)))
	}
	if err := processes(groups, add); err != nil {
		return nil, err
	}
	if err := mounts(add); err != nil {
		return nil, err
	}
	if err := sockets(add); err != nil {
		return nil, err
	}
	for _, sub := range []string{"scratch/sandboxes", "writable/sandboxes", "hollow"} {
		entries, err := os.ReadDir(filepath.Join(n.Data, sub))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			add("directory", filepath.Join(n.Data, sub, e.Name()), e.Name())
		}
	}
	for _, o := range []Owner{OfServer, OfSandboxes, OfOthers, Leak} {
		a.Owners[o] = map[string]int{}
	}
	seen := map[string]bool{}
	for k := range a.Items {
		i := &a.Items[k]
		i.Owner = n.ownerOf(*i)
		a.Counts[i.Kind]++
		a.Owners[i.Owner][i.Kind]++
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

// processes finds those in a sandbox's group, and guests that are in none, with the
// namespaces they hold.
func processes(groups []string, add func(kind, name, sandbox string)) error {
	owner := map[int]string{}
	for _, g := range groups {
		b, err := os.ReadFile(filepath.Join(g, "cgroup.procs"))
		if err != nil {
			continue // it ended
		}
		for f := range strings.FieldsSeq(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil {
				owner[pid] = idPattern.FindString(filepath.Base(g))
			}
		}
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	namespaces := map[string]bool{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		id, ours := owner[pid]
		if !ours {
			if !isGuest(e.Name()) {
				continue
			}
			id = "unknown"
		}
		if stat, err := os.ReadFile("/proc/" + e.Name() + "/stat"); err != nil || strings.Contains(string(stat), ") Z ") {
			continue // it has ended; its parent has yet to say so
		}
		add("process", e.Name(), id)
		for _, kind := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
			ns, err := os.Readlink("/proc/" + e.Name() + "/ns/" + kind)
			if err == nil && !namespaces[ns] {
				namespaces[ns] = true
				add("namespace", ns, id)
			}
		}
	}
	return nil
}

// mounts lists what nodes have mounted on the host, and the loop devices below.
func mounts(add func(kind, name, sandbox string)) error {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 4 && strings.HasSuffix(f[4], "/scratch") && strings.Contains(line, "/dev/loop") {
			add("mount", f[4], "")
		}
	}
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err == nil && strings.Contains(string(b), "/scratch.img") {
			add("loop", strings.TrimSpace(string(b))+" on /dev/"+filepath.Base(filepath.Dir(filepath.Dir(f))), "")
		}
	}
	return nil
}

func isGuest(pid string) bool {
	comm, err := os.ReadFile("/proc/" + pid + "/comm")
	return err == nil && strings.TrimSpace(string(comm)) == "dsec-guest"
}

// settle is how long a socket may be without the guest that is to have it, or had it.
const settle = 100 * time.Millisecond

// sockets lists the guests' listening sockets. They carry no id: the guest that holds one
// does. One that no guest holds is a leak.
func sockets(add func(kind, name, sandbox string)) error {
	found, err := listening()
	if err != nil {
		return err
	}
	held, err := heldByGuests(found, add)
	if err != nil || len(held) == len(found) {
		return err
	}
	time.Sleep(settle)
	still, err := listening()
	if err != nil {
		return err
	}
	for inode := range found {
		if held[inode] || !still[inode] {
			delete(found, inode)
		}
	}
	if held, err = heldByGuests(found, add); err != nil {
		return err
	}
	for inode := range found {
		if !held[inode] {
			add("socket", "inode "+inode, "unknown")
		}
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

// heldByGuests adds those of the sockets that a guest holds, and returns them.
func heldByGuests(sockets map[string]bool, add func(kind, name, sandbox string)) (map[string]bool, error) {
	held := map[string]bool{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil || !isGuest(e.Name()) {
			continue
		}
		groups, err := os.ReadFile("/proc/" + e.Name() + "/cgroup")
		if err != nil {
			continue // it ended
		}
		id := idPattern.FindString(string(groups))
		if id == "" {
			id = "unknown"
		}
		dir := "/proc/" + e.Name() + "/fd/"
		fds, _ := os.ReadDir(dir) // none of one that ended
		for _, fd := range fds {
			to, _ := os.Readlink(dir + fd.Name())
			inode := strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")
			if sockets[inode] && !held[inode] {
				held[inode] = true
				add("socket", "inode "+inode, id)
			}
		}
	}
	return held, nil
}

// Empty tells whether nothing is left but what belongs to others; the error lists what is.
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
