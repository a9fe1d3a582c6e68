package cgroup

import (
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// fakeV2 is a directory that looks like a cgroup v2 root: this machine may not have its controllers.
func fakeV2(t *testing.T, controllers string) (root, self string) {
	t.Helper()
	root = t.TempDir()
	for name, content := range map[string]string{"cgroup.controllers": controllers, "cgroup.subtree_control": "", "self": "0::/somewhere\n"} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root, filepath.Join(root, "self")
}

// fakeV1 is a directory that looks like cgroup v1.
func fakeV1(t *testing.T) (root, self string) {
	t.Helper()
	root = t.TempDir()
	for _, c := range v1Controllers {
		// The parent group of the tests is there already, as a real kernel would fill it.
		if err := os.MkdirAll(filepath.Join(root, c, "dsec"), 0o755); err != nil {
			t.Fatal(err)
		}
		for _, f := range []string{"tasks", "dsec/cgroup.procs"} {
			if err := os.WriteFile(filepath.Join(root, c, f), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return root, "/dev/null"
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestV2Files(t *testing.T) {
	t.Parallel()
	root, self := fakeV2(t, "cpuset cpu io memory pids\n")
	// A real group's files exist; here they are made beforehand.
	dir := filepath.Join(root, "dsec", "box")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{
		"memory.max": "", "cpu.max": "", "pids.max": "", "cgroup.procs": "12\n34\n", "pids.current": "2\n", "pids.events": "max 4\n", "memory.current": "4096\n", "memory.swap.current": "512\n",
		"memory.peak": "8192\n", "cpu.stat": "usage_usec 1500000\nuser_usec 1\n", "memory.events": "low 0\noom 1\noom_kill 3\n",
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h := open(t, root, self, "dsec", map[string]string{"dsec/cpu.weight": "", "dsec/cgroup.procs": ""})
	if !h.V2() {
		t.Error("not taken for v2")
	}
	for _, f := range []string{"cgroup.subtree_control", "dsec/cgroup.subtree_control", "dsec-be/cgroup.subtree_control"} {
		if got := read(t, filepath.Join(root, f)); got != "+cpu +memory +pids" {
			t.Errorf("%s: %q", f, got)
		}
	}
	if err := h.Create("box", Limits{CPUMillis: 1500, MemoryBytes: 1 << 20, PIDs: 7}); err != nil {
		t.Fatal(err)
	}
	for f, want := range map[string]string{"memory.max": "1048576", "cpu.max": "150000 100000", "pids.max": "7"} {
		if got := read(t, filepath.Join(dir, f)); got != want {
			t.Errorf("%s: %q, want %q", f, got, want)
		}
	}
	u, err := h.Usage("box")
	want := Usage{CPU: 1500 * time.Millisecond, MemoryBytes: 4096, PeakMemoryBytes: 8192, SwapBytes: 512, PIDs: 2, OOMKills: 3, PIDsRefused: 4}
	if err != nil || u != want {
		t.Errorf("usage %+v, %v; want %+v", u, err, want)
	}
	if n, err := h.MemoryBytes("box"); err != nil || n != 4096 {
		t.Errorf("memory %d, %v", n, err)
	}
	if pids, err := h.PIDs("box"); err != nil || !slices.Equal(pids, []int{12, 34}) {
		t.Errorf("pids %v, %v", pids, err)
	}
	if names, err := h.List(); err != nil || !slices.Equal(names, []string{"box"}) {
		t.Errorf("list %v, %v", names, err)
	}
	e, err := h.Open("box")
	if err != nil || e.CloneInto < 0 || len(e.JoinFDs) != 0 {
		t.Errorf("entry %+v, %v", e, err)
	}
	e.Close()
}

// open makes the files that the kernel would in the parent group and opens the hierarchy
// twice: the second time it is found again.
func open(t *testing.T, root, self, name string, files map[string]string) *Hierarchy {
	t.Helper()
	files = maps.Clone(files)
	cpu := "cpu/"
	if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err == nil {
		cpu = ""
	}
	if idle := cpu + name + IdleSuffix + "/"; files[idle+"cpu.shares"]+files[idle+"cpu.weight"] == "" { // else a kernel without
		files[idle+idleFile] = "0"
	}
	for path, content := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	saved := filepath.Join(t.TempDir(), "chosen.json")
	if _, err := Open(saved, root, self, name); err != nil {
		t.Fatal(err)
	}
	h, err := Open(saved, root, self, name)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// The node's own daemons, which are in no group of ours, are neither starved nor starve.
func TestAllSandboxesHaveAWeight(t *testing.T) {
	t.Parallel()
	cpus := int64(runtime.NumCPU())
	root, self := fakeV2(t, "cpu memory pids\n")
	open(t, root, self, "dsec", map[string]string{"dsec/cpu.weight": "", "dsec/cgroup.procs": ""})
	if got, want := read(t, filepath.Join(root, "dsec/cpu.weight")), itoa(min(200*cpus, 10000)); got != want {
		t.Errorf("v2: %s, want %s", got, want)
	}
	root, self = fakeV1(t)
	open(t, root, self, "dsec", map[string]string{"cpu/dsec/cpu.shares": "", "memory/dsec/" + socketLimit: ""})
	if got, want := read(t, filepath.Join(root, "cpu/dsec/cpu.shares")), itoa(2048*cpus); got != want {
		t.Errorf("v1: %s, want %s", got, want)
	}
}

// v1 counts the buffers of sockets only where it is told to.
func TestV1CountsSockets(t *testing.T) {
	t.Parallel()
	files := []string{"cpu/dsec/cpu.shares", "memory/dsec/box/memory.limit_in_bytes", "cpu/dsec/box/cpu.cfs_quota_us"}
	for _, counts := range []bool{true, false} { // false: a kernel without
		root, self := fakeV1(t)
		parent, box := filepath.Join(root, "memory/dsec", socketLimit), filepath.Join(root, "memory/dsec/box", socketLimit)
		made := map[string]string{}
		for _, f := range files {
			made[f] = ""
		}
		if counts {
			made["memory/dsec/"+socketLimit], made["memory/dsec/box/"+socketLimit] = "", ""
		}
		h := open(t, root, self, "dsec", made)
		if err := h.Create("box", Limits{MemoryBytes: 64 << 20}); err != nil {
			t.Fatal(err)
		}
		if !counts {
			continue
		}
		if got := read(t, parent); got != "-1" {
			t.Errorf("all sandboxes: %q", got)
		}
		if got := read(t, box); got != itoa(16<<20) {
			t.Errorf("one of 64 MiB: %q", got)
		}
	}
}

// What a sandbox has too much does not go to the machine's swap.
func TestNoSwap(t *testing.T) {
	t.Parallel()
	root, self := fakeV1(t)
	box := filepath.Join(root, "memory/dsec/box")
	h := open(t, root, self, "dsec", map[string]string{
		"cpu/dsec/cpu.shares": "", "memory/dsec/" + swapLimitV1: "", "memory/dsec/box/memory.limit_in_bytes": "", "memory/dsec/box/" + swapLimitV1: "",
	})
	if err := h.Create("box", Limits{MemoryBytes: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	if limit, sum := read(t, filepath.Join(box, "memory.limit_in_bytes")), read(t, filepath.Join(box, swapLimitV1)); limit != itoa(64<<20) || sum != limit {
		t.Errorf("v1: %q, with swap %q", limit, sum)
	}
	root, self = fakeV2(t, "cpu memory pids\n")
	h = open(t, root, self, "dsec", map[string]string{
		"dsec/cgroup.procs": "", "dsec/cpu.weight": "", "dsec/" + swapLimitV2: "", "dsec/box/memory.max": "", "dsec/box/" + swapLimitV2: "",
	})
	if err := h.Create("box", Limits{MemoryBytes: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	if got := read(t, filepath.Join(root, "dsec/box", swapLimitV2)); got != "0" {
		t.Errorf("v2: %q", got)
	}
}

// A pause opens swap and closes it again, and frees what it can, with the files of either version.
func TestPauseFiles(t *testing.T) {
	t.Parallel()
	const stat = "anon 3\ninactive_anon 4096\nactive_anon 8192\nunevictable 1\n"
	root, self := fakeV1(t)
	box := filepath.Join(root, "memory/dsec/box")
	v1 := open(t, root, self, "dsec", map[string]string{
		"cpu/dsec/cpu.shares": "", "memory/dsec/" + swappinessV1: "60", "memory/dsec/" + swapLimitV1: "", "memory/dsec/box/" + swappinessV1: "000",
		"memory/dsec/box/memory.usage_in_bytes": "8192\n", "memory/dsec/box/" + swapUsageV1: "12288\n", "memory/dsec/box/" + kernelUsedV1: "4096\n",
		"memory/dsec/box/memory.stat": stat + "writeback 4096\n", "memory/dsec/box/" + memoryLimitV1: "9", "memory/dsec/box/" + reclaimV1: "",
	})
	if got := read(t, filepath.Join(root, "memory/dsec", swappinessV1)); got[:1] != "0" { // a plain file keeps the rest
		t.Errorf("v1: all groups begin with %q", got)
	}
	root, self = fakeV2(t, "cpu memory pids\n")
	box2 := filepath.Join(root, "dsec/box")
	v2 := open(t, root, self, "dsec", map[string]string{
		"dsec/cgroup.procs": "", "dsec/cpu.weight": "", "dsec/" + swapLimitV2: "", "dsec/box/" + swapLimitV2: "000", "dsec/box/memory.current": "8192\n", "dsec/box/memory.max": "1048576\n",
		"dsec/box/memory.stat": stat + "file_writeback 4096\n", "dsec/box/" + reclaimV2: "",
	})
	for _, c := range []struct {
		h                                      *Hierarchy
		swap, opened, closed, freed, freedWith string
	}{
		{v1, filepath.Join(box, swappinessV1), "100", "0", filepath.Join(box, memoryLimitV1), "0"},
		{v2, filepath.Join(box2, swapLimitV2), "1048576", "0", filepath.Join(box2, reclaimV2), "8192"},
	} {
		if err := c.h.CanSwap(); err != nil {
			t.Error(err)
		}
		if err := c.h.OpenSwap("box"); err != nil {
			t.Fatal(err)
		}
		if got := read(t, c.swap); got != c.opened {
			t.Errorf("%s: %q", c.swap, got)
		}
		if err := c.h.CloseSwap("box"); err != nil {
			t.Fatal(err)
		}
		if got := read(t, c.swap); got[:1] != c.closed {
			t.Errorf("%s: %q", c.swap, got)
		}
		if err := c.h.CloseSwap("gone"); err != nil {
			t.Error(err)
		}
		if err := c.h.OpenSwap("gone"); err == nil {
			t.Error("no error")
		}
		if err := c.h.Reclaim("box"); err != nil {
			t.Fatal(err)
		}
		if got := read(t, c.freed); got != c.freedWith {
			t.Errorf("%s: %q", c.freed, got)
		}
		if m, err := c.h.Memory("box"); err != nil || m != (Memory{Anonymous: 12288, Writing: 4096}) {
			t.Errorf("%+v, %v", m, err)
		}
		if n, err := c.h.MemoryUsed("box"); err != nil || n != 8192 {
			t.Errorf("%d, %v", n, err)
		}
	}
	// Where the kernel does not count its own, a limit might be kept: the group is emptied instead.
	if err := os.WriteFile(filepath.Join(box, kernelUsedV1), []byte("0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := v1.Reclaim("box"); err != nil {
		t.Fatal(err)
	}
	if got := read(t, filepath.Join(box, reclaimV1)); got != "0" {
		t.Errorf("%q", got)
	}
	root, self = fakeV1(t)
	if err := open(t, root, self, "dsec", map[string]string{"cpu/dsec/cpu.shares": ""}).CanSwap(); err == nil || !strings.Contains(err.Error(), "swapaccount") {
		t.Errorf("a kernel that does not count swap: %v", err)
	}
}

func TestV2WithoutAControllerSaysWhich(t *testing.T) {
	t.Parallel()
	root, self := fakeV2(t, "cpu pids\n")
	if _, err := Detect(root, self, "dsec"); err == nil || !strings.Contains(err.Error(), "memory") {
		t.Errorf("got %v", err)
	}
}

func TestV1Usage(t *testing.T) {
	t.Parallel()
	root, self := fakeV1(t)
	files := map[string]string{
		"cpu/dsec/cpu.shares": "", "memory/dsec/" + swapLimitV1: "", "pids/dsec/box/pids.current": "2\n", "pids/dsec/box/pids.events": "max 4\n",
		"cpuacct/dsec/box/cpuacct.usage": "1500000000\n", "memory/dsec/box/memory.usage_in_bytes": "4096\n", "memory/dsec/box/" + swapUsageV1: "4608\n",
		"memory/dsec/box/memory.max_usage_in_bytes": "8192\n", "memory/dsec/box/memory.oom_control": "oom_kill_disable 0\noom_kill 3\n",
	}
	h := open(t, root, self, "dsec", files)
	want := Usage{CPU: 1500 * time.Millisecond, MemoryBytes: 4096, PeakMemoryBytes: 8192, SwapBytes: 512, PIDs: 2, OOMKills: 3, PIDsRefused: 4}
	if u, err := h.Usage("box"); err != nil || u != want {
		t.Errorf("usage %+v, %v; want %+v", u, err, want)
	}
	if n, err := h.MemoryBytes("box"); err != nil || n != 4096 {
		t.Errorf("memory %d, %v", n, err)
	}
	if n, err := h.MemoryBytes("nobody"); err == nil {
		t.Errorf("memory of nobody: %d", n)
	}
}

// On the real kernel, whichever version it has. Needs root.
func TestRealGroup(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "chosen.json")
	h, err := Open(file, "/sys/fs/cgroup", "/proc/self/cgroup", "dsectest"+itoa(int64(os.Getpid()))+"-1")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := h.RemoveAll(); err != nil {
			t.Error(err)
		}
	}()
	// Another process, elsewhere in the tree, finds the same groups.
	again, err := Open(file, "/sys/fs/cgroup", "/dev/null", "another")
	if err != nil || again.dir("memory") != h.dir("memory") || again.dir("pids") != h.dir("pids") {
		t.Errorf("%+v, %v", again, err)
	}
	for range 2 { // idempotent
		if err := h.Create("box", Limits{CPUMillis: 500, MemoryBytes: 32 << 20, PIDs: 10}); err != nil {
			t.Fatal(err)
		}
	}
	if !h.V2() {
		for file, want := range map[string]int64{socketLimit: 8 << 20, swapLimitV1: 32 << 20} {
			if got := strings.TrimSpace(read(t, filepath.Join(h.dir("memory"), "box", file))); got != itoa(want) {
				t.Errorf("%s: %s, want %d", file, got, want)
			}
		}
	}
	if len(h.Paths("box")) == 0 {
		t.Error("no directory")
	}
	if u, err := h.Usage("box"); err != nil || u.PIDs != 0 {
		t.Errorf("usage of an empty group: %+v, %v", u, err)
	}
	if pids, err := h.PIDs("nobody"); err != nil || len(pids) != 0 {
		t.Errorf("pids of a group that is not there: %v, %v", pids, err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for range 2 {
		if err := h.Remove("box", deadline); err != nil {
			t.Error(err)
		}
	}
	if names, err := h.List(); err != nil || len(names) != 0 {
		t.Errorf("left: %v, %v", names, err)
	}
	if err := h.Create("odd", Limits{PIDs: -5}); err != nil { // no limit
		t.Error(err)
	}
	if err := h.CanFreeze(); err != nil { // as far as known, every machine that tests run on can
		t.Error(err)
	}
	if err := h.Remove("odd", deadline); err != nil {
		t.Error(err)
	}
}

// A node that starts from another place of the tree, and whose notes are lost, takes the
// groups that it has already.
func TestV1FindsItsGroupsAgain(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	self := filepath.Join(root, "self")
	for _, c := range append([]string{"freezer"}, v1Controllers...) {
		for _, place := range []string{"one", "two"} {
			if err := os.MkdirAll(filepath.Join(root, c, place), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(root, c, "cgroup.procs"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var dirs []map[string]string
	for _, place := range []string{"one", "two"} {
		if err := os.WriteFile(self, []byte("1:memory:/"+place+"\n2:cpu:/"+place+"\n3:cpuacct:/"+place+"\n4:pids:/"+place+"\n5:freezer:/"+place+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		h, err := Detect(root, self, "dsec-12345678")
		if err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, h.dirs)
		if want := filepath.Join(root, "freezer", "one", "dsec-12345678", "box"); h.Freezer("box").Dir != want {
			t.Errorf("freezes %+v, want %s", h.Freezer("box"), want)
		}
	}
	if want := filepath.Join(root, "memory", "one", "dsec-12345678"); dirs[0]["memory"] != want || !maps.Equal(dirs[0], dirs[1]) {
		t.Errorf("%v, then %v", dirs[0], dirs[1])
	}
	if found, err := Find(root, "dsec-12345678"); err != nil || len(found) != len(v1Controllers)+1 {
		t.Errorf("found %v, %v", found, err)
	}
	if found, err := Find(root, "dsec-00000000"); err != nil || len(found) != 0 {
		t.Errorf("found %v, %v", found, err)
	}
}
