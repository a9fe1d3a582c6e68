package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"dsec/internal/backend/container/cgroup"
)

// Item is one kernel or disk object that belongs to a sandbox or to a node's machinery.
type Item struct {
	Kind    string `json:"kind"` // process, namespace, cgroup, mount, loop, directory, socket
	Name    string `json:"name"`
	Sandbox string `json:"sandbox,omitempty"` // empty: the node's
	Node    string `json:"node,omitempty"`    // data directory of the running node that it belongs to
}

// Audit is everything found.
type Audit struct {
	Counts  map[string]int `json:"counts"` // by kind
	Items   []Item         `json:"items"`
	Orphans []Item         `json:"orphans"` // of sandboxes that nobody knows, and not of a running node elsewhere
	Known   int            `json:"known_sandboxes"`

	ours []string // data directories that were asked about
}

// idPattern finds sandbox ids in names.
var idPattern = regexp.MustCompile(`\bs[a-z2-7]{21}\b`)

// groupPattern is how nodes name their parent control groups.
var groupPattern = regexp.MustCompile(`^dsec(-[0-9a-f]{8}|test\d+-\d+)$`)

// testGroup is how tests of backends name theirs, with their process id.
var testGroup = regexp.MustCompile(`^dsectest(\d+)-\d+$`)

// Run looks for everything of sandboxes on this machine. dataDirs are searched for their
// directories; known says whether a sandbox id is accounted for.
func Run(dataDirs []string, known func(id string) bool) (*Audit, error) {
	a := &Audit{Counts: map[string]int{}, Items: []Item{}, Orphans: []Item{}}
	for _, d := range dataDirs {
		if abs, err := filepath.Abs(d); err == nil {
			a.ours = append(a.ours, abs)
		}
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
		a.Items = append(a.Items, Item{kind, name, sandbox, nodes.of(where)})
	}
	for _, g := range groups {
		add("cgroup", g, idPattern.FindString(filepath.Base(g)), g)
	}
	listening, err := processes(owner, add)
	if err != nil {
		return nil, err
	}
	if err := mounts(add); err != nil {
		return nil, err
	}
	if err := sockets(listening, add); err != nil {
		return nil, err
	}
	for _, d := range dataDirs {
		for _, sub := range []string{"scratch/sandboxes", "writable/sandboxes", "hollow"} {
			entries, err := os.ReadDir(filepath.Join(d, sub))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
			for _, e := range entries {
				add("directory", filepath.Join(d, sub, e.Name()), e.Name(), filepath.Join(d, sub))
			}
		}
	}
	seen := map[string]bool{}
	for _, i := range a.Items {
		a.Counts[i.Kind]++
		switch {
		case i.Sandbox == "" || a.elsewhere(i):
		case !known(i.Sandbox):
			a.Orphans = append(a.Orphans, i)
		case !seen[i.Sandbox]:
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

// runningNodes are the nodes that run now: name of the parent group → data directory.
type runningNodes map[string]string

// running finds nodes by the lock that each holds on its data directory.
func running(owner map[int]string) (runningNodes, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	nodes := runningNodes{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || owner[pid] != "" { // sandboxes' own do not run nodes
			continue
		}
		fds := "/proc/" + e.Name() + "/fd/"
		open, err := os.ReadDir(fds)
		if err != nil {
			continue
		}
		for _, fd := range open {
			if path, err := os.Readlink(fds + fd.Name()); err == nil && filepath.Base(path) == "lock" {
				data := filepath.Dir(path)
				nodes[cgroup.NameOf(data)] = data
			}
		}
	}
	return nodes, nil
}

// of returns the data directory of the running node to which a group or a path belongs, or "".
func (n runningNodes) of(where string) string {
	for dir := where; len(dir) > 1; dir = filepath.Dir(dir) {
		base := filepath.Base(dir)
		if data := n[base]; data != "" {
			return data
		}
		if m := testGroup.FindStringSubmatch(base); m != nil { // a test's, without a data directory
			if _, err := os.Stat("/proc/" + m[1]); err == nil {
				return "/proc/" + m[1]
			}
		}
		if n[cgroup.NameOf(dir)] == dir {
			return dir
		}
	}
	return ""
}

// elsewhere says whether i is of a running node that was not asked about.
func (a *Audit) elsewhere(i Item) bool { return i.Node != "" && !slices.Contains(a.ours, i.Node) }

// processes finds those in a sandbox's group, and guests that are in none, with the
// namespaces they hold. It returns the guests' sockets by inode, with their groups.
func processes(owner map[int]string, add func(kind, name, sandbox, where string)) (listening map[string]string, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	listening = map[string]string{}
	namespaces := map[string]bool{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		group, ours := owner[pid]
		id := idPattern.FindString(filepath.Base(group))
		comm, err := os.ReadFile("/proc/" + e.Name() + "/comm")
		guest := err == nil && strings.TrimSpace(string(comm)) == "dsec-guest"
		if !ours {
			if !guest {
				continue
			}
			if group = groupOf(e.Name()); group != "" { // made since we looked at the groups
				id = idPattern.FindString(filepath.Base(group))
			} else {
				id = "unknown"
			}
		}
		if stat, err := os.ReadFile("/proc/" + e.Name() + "/stat"); err != nil || strings.Contains(string(stat), ") Z ") {
			continue // it has ended; its parent has yet to say so
		}
		add("process", e.Name(), id, group)
		if guest {
			fds := "/proc/" + e.Name() + "/fd/"
			open, err := os.ReadDir(fds)
			for _, fd := range open {
				if what, lerr := os.Readlink(fds + fd.Name()); err == nil && lerr == nil && strings.HasPrefix(what, "socket:[") {
					listening[strings.Trim(what, "socket:[]")] = group
				}
			}
		}
		for _, kind := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
			ns, err := os.Readlink("/proc/" + e.Name() + "/ns/" + kind)
			if err == nil && !namespaces[ns] {
				namespaces[ns] = true
				add("namespace", ns, id, group)
			}
		}
	}
	return listening, nil
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
			add("loop", "/dev/"+filepath.Base(filepath.Dir(filepath.Dir(f)))+" on "+image, "", image)
		}
	}
	return nil
}

// sockets counts the guests' listening sockets. They carry no id: the directory they are
// in does, and the group of the guest that has them.
func sockets(listening map[string]string, add func(kind, name, sandbox, where string)) error {
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) == 8 && strings.HasSuffix(f[7], "/guest.sock") && f[5] == "01" && f[3] == "00010000" {
			add("socket", "inode "+f[6], "", listening[f[6]])
		}
	}
	return nil
}

// Left is what belongs to no running node, or to those that were asked about.
func (a *Audit) Left() []Item {
	return slices.DeleteFunc(slices.Clone(a.Items), a.elsewhere)
}

// Empty tells whether nothing is left; the error lists what is.
func (a *Audit) Empty() error {
	left := a.Left()
	if len(left) == 0 {
		return nil
	}
	counts := map[string]int{}
	for _, i := range left {
		counts[i.Kind]++
	}
	kinds := make([]string, 0, len(counts))
	for k, n := range counts {
		kinds = append(kinds, fmt.Sprintf("%d %s", n, k))
	}
	slices.Sort(kinds)
	return fmt.Errorf("left on this machine: %s (first: %s %s)", strings.Join(kinds, ", "), left[0].Kind, left[0].Name)
}
