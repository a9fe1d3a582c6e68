package bed

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"dsec/internal/backend/container/cgroup"
	"dsec/internal/keeper"
)

// Held counts what the kernel and the disk hold for sandboxes of this bed's node, by
// kind. Other nodes on the machine do not disturb it.
func (b *Bed) Held() (map[string]int, error) {
	held := map[string]int{}
	list, err := b.list(func(path string) bool { return path == b.Data || strings.HasPrefix(path, b.Data+"/") })
	for _, x := range list {
		kind, _, _ := strings.Cut(x, " ")
		held[kind]++
	}
	return held, err
}

// Leftovers lists what must not be there once the node is down.
func (b *Bed) Leftovers() ([]string, error) {
	left, err := b.list(func(path string) bool { return strings.HasPrefix(path, b.Data+"/") })
	if err != nil {
		return nil, err
	}
	swaps, err := os.ReadFile("/proc/swaps")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(swaps)) {
		if strings.HasPrefix(line, b.Data+"/") {
			left = append(left, "swap "+strings.TrimSpace(line))
		}
	}
	made, err := filepath.Glob(filepath.Join(b.Data, "swap", "*"))
	for _, m := range made { // a zram device is noted there
		left = append(left, "swap "+m)
	}
	return left, err
}

// list names each process, namespace, control group, mount, loop device and directory.
func (b *Bed) list(ours func(path string) bool) ([]string, error) {
	group := b.group()
	var found []string
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() { // groups come and go while we look
			return nil
		}
		if strings.Contains(path, "/"+group) {
			found = append(found, "cgroup "+path)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	processes, err := b.processes(group)
	if err != nil {
		return nil, err
	}
	found = append(found, processes...)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && ours(f[4]) {
			found = append(found, "mount "+f[4])
		}
	}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	for _, f := range loops {
		if backing, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(backing), b.Data+"/") {
			found = append(found, "loop "+strings.TrimSpace(string(backing)))
		}
	}
	for _, sub := range []string{"scratch/sandboxes", "writable/sandboxes", "hollow"} {
		entries, err := os.ReadDir(filepath.Join(b.Data, sub))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			found = append(found, "directory "+filepath.Join(sub, e.Name()))
		}
	}
	return found, nil
}

// group is what the node calls its parent control group.
func (b *Bed) group() string { return cgroup.NameOf(b.Data) }

// processes of the node's groups, guests that fell out of them, and their namespaces.
func (b *Bed) processes(group string) (found []string, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	namespaces := map[string]bool{}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		dir := "/proc/" + e.Name()
		if keeper.DirOf(e.Name()) == filepath.Join(b.Data, "keeper") {
			found = append(found, "keeper "+e.Name())
			continue
		}
		groups, err := os.ReadFile(dir + "/cgroup")
		if err != nil {
			continue // it ended
		}
		exe, _ := os.Readlink(dir + "/exe") // none of a kernel thread's or a zombie's
		if !strings.Contains(string(groups), "/"+group) && !strings.HasPrefix(exe, b.Data+"/container/") {
			continue
		}
		stat, _ := os.ReadFile(dir + "/stat")
		if _, rest, ok := strings.Cut(string(stat), ") "); !ok || strings.HasPrefix(rest, "Z") || strings.HasPrefix(rest, "X") {
			continue // dead: whoever inherited it has yet to collect it
		}
		found = append(found, fmt.Sprintf("process %s (%s)", e.Name(), exe))
		for _, kind := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
			own, _ := os.Readlink("/proc/self/ns/" + kind)
			ns, err := os.Readlink(dir + "/ns/" + kind)
			if err == nil && ns != own && !namespaces[ns] {
				namespaces[ns] = true
				found = append(found, "namespace "+ns)
			}
		}
	}
	return found, nil
}

// GuestPID finds the host's pid of a sandbox's first process.
func (b *Bed) GuestPID(id string) (int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		groups, err := os.ReadFile("/proc/" + e.Name() + "/cgroup")
		if err != nil || !strings.Contains(string(groups), "/"+b.group()+"/"+id) && !strings.Contains(string(groups), "/"+b.group()+cgroup.IdleSuffix+"/"+id) {
			continue
		}
		status, err := os.ReadFile("/proc/" + e.Name() + "/status")
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(status)) {
			// The last number is the pid in the innermost namespace.
			if f := strings.Fields(line); len(f) > 1 && f[0] == "NSpid:" && f[len(f)-1] == "1" {
				return pid, nil
			}
		}
	}
	return 0, fmt.Errorf("sandbox %s has no first process", id)
}
