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
)

// Item is one kernel or disk object that belongs to a sandbox or to a node's machinery.
type Item struct {
	Kind    string `json:"kind"` // process, namespace, cgroup, mount, loop, directory, socket
	Name    string `json:"name"`
	Sandbox string `json:"sandbox,omitempty"` // empty: the node's
}

// Audit is everything found.
type Audit struct {
	Counts  map[string]int `json:"counts"` // by kind
	Items   []Item         `json:"items"`
	Orphans []Item         `json:"orphans"` // of sandboxes that nobody knows
	Known   int            `json:"known_sandboxes"`
}

// idPattern finds sandbox ids in names.
var idPattern = regexp.MustCompile(`\bs[a-z2-7]{21}\b`)

// groupPattern is how nodes name their parent control groups.
var groupPattern = regexp.MustCompile(`^dsec(-[0-9a-f]{8}|test\d+-\d+)$`)

// Run looks for everything of sandboxes on this machine. dataDirs are searched for their
// directories; known says whether a sandbox id is accounted for.
func Run(dataDirs []string, known func(id string) bool) (*Audit, error) {
	a := &Audit{Counts: map[string]int{}, Items: []Item{}, Orphans: []Item{}}
	groups, err := cgroups()
	if err != nil {
		return nil, err
	}
	add := func(kind, name, sandbox string) { a.Items = append(a.Items, Item{kind, name, sandbox}) }
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
	for _, d := range dataDirs {
		for _, sub := range []string{"scratch/sandboxes", "writable/sandboxes", "hollow"} {
			entries, err := os.ReadDir(filepath.Join(d, sub))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
			for _, e := range entries {
				add("directory", filepath.Join(d, sub, e.Name()), e.Name())
			}
		}
	}
	seen := map[string]bool{}
	for _, i := range a.Items {
		a.Counts[i.Kind]++
		switch {
		case i.Sandbox == "":
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
			comm, err := os.ReadFile("/proc/" + e.Name() + "/comm")
			if err != nil || strings.TrimSpace(string(comm)) != "dsec-guest" {
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
			add("loop", "/dev/"+filepath.Base(filepath.Dir(filepath.Dir(f)))+" on "+strings.TrimSpace(string(b)), "")
		}
	}
	return nil
}

// sockets counts the guests' listening sockets. They carry no id: the directory they are
// in does.
func sockets(add func(kind, name, sandbox string)) error {
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) == 8 && strings.HasSuffix(f[7], "/guest.sock") && f[5] == "01" && f[3] == "00010000" {
			add("socket", "inode "+f[6], "")
		}
	}
	return nil
}

// Empty tells whether nothing of any sandbox or node is left; the error lists what is.
func (a *Audit) Empty() error {
	if len(a.Items) == 0 {
		return nil
	}
	kinds := make([]string, 0, len(a.Counts))
	for k, n := range a.Counts {
		kinds = append(kinds, fmt.Sprintf("%d %s", n, k))
	}
	slices.Sort(kinds)
	return fmt.Errorf("left on this machine: %s (first: %s %s)", strings.Join(kinds, ", "), a.Items[0].Kind, a.Items[0].Name)
}
