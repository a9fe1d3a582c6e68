package cgroup

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// What runs best effort is weighed beside all others, by the kernel's idle class or the least weight it has.
func TestIdleGroupsHaveAParentOfTheirOwn(t *testing.T) {
	t.Parallel()
	root, self := fakeV2(t, "cpu memory pids\n")
	h := open(t, root, self, "dsec", map[string]string{"dsec/cpu.weight": "", "dsec/cgroup.procs": ""})
	if got := read(t, filepath.Join(root, "dsec-be/cpu.idle")); got != "1" || !h.IdleClass() {
		t.Errorf("v2: %q", got)
	}
	root, self = fakeV2(t, "cpu memory pids\n")
	h = open(t, root, self, "dsec", map[string]string{"dsec/cpu.weight": "", "dsec/cgroup.procs": "", "dsec-be/cpu.weight": "9"})
	if got := read(t, filepath.Join(root, "dsec-be/cpu.weight")); got != "1" || h.IdleClass() {
		t.Errorf("v2 without the class: %q", got)
	}
	root, self = fakeV1(t)
	open(t, root, self, "dsec", map[string]string{"cpu/dsec/cpu.shares": "", "cpu/dsec-be/cpu.shares": "9"})
	if got := read(t, filepath.Join(root, "cpu/dsec-be/cpu.shares")); got != "2" {
		t.Errorf("v1 without the class: %q", got)
	}
}

// Whatever is asked of a group by its name finds it in either parent.
func TestIdleGroupsAreFoundByName(t *testing.T) {
	t.Parallel()
	for _, v2 := range []bool{true, false} {
		var h *Hierarchy
		var cpu, pids string
		if v2 {
			root, self := fakeV2(t, "cpu memory pids\n")
			cpu = filepath.Join(root, "dsec-be/box")
			pids = cpu
			h = open(t, root, self, "dsec", map[string]string{
				"dsec/cpu.weight": "", "dsec/cgroup.procs": "", "dsec-be/box/cpu.max": "", "dsec-be/box/cgroup.procs": "7\n",
				"dsec-be/box/memory.events": "oom_kill 2\n",
			})
		} else {
			root, self := fakeV1(t)
			cpu, pids = filepath.Join(root, "cpu/dsec-be/box"), filepath.Join(root, "pids/dsec/box")
			h = open(t, root, self, "dsec", map[string]string{
				"cpu/dsec/cpu.shares": "", "cpu/dsec-be/box/cpu.cfs_quota_us": "", "cpu/dsec-be/box/tasks": "", "memory/dsec/box/tasks": "",
				"cpuacct/dsec/box/tasks": "", "pids/dsec/box/tasks": "", "pids/dsec/box/cgroup.procs": "7\n", "memory/dsec/box/memory.oom_control": "oom_kill 2\n",
			})
		}
		if err := errors.Join(h.Create("box", Limits{Idle: true}), h.LimitCPU("box", 500)); err != nil {
			t.Fatal(err)
		}
		quota := map[bool]string{true: "cpu.max", false: "cpu.cfs_quota_us"}[v2]
		if got := read(t, filepath.Join(cpu, quota)); !strings.HasPrefix(got, "50000") {
			t.Errorf("v2 %t: quota %q", v2, got)
		}
		if _, err := os.Stat(filepath.Join(h.dir("cpu"), "box")); err == nil {
			t.Errorf("v2 %t: it has a group of the usual class too", v2)
		}
		if got, err := h.PIDs("box"); err != nil || !slices.Equal(got, []int{7}) {
			t.Errorf("v2 %t: processes %v, %v", v2, got, err)
		}
		if n, err := h.OOMKills("box"); err != nil || n != 2 {
			t.Errorf("v2 %t: %d OOM kills, %v", v2, n, err)
		}
		e, err := h.Open("box")
		if err != nil || (e.CloneInto >= 0) != v2 || !v2 && len(e.JoinFDs) != len(v1Controllers) {
			t.Errorf("v2 %t: entry %+v, %v", v2, e, err)
		}
		e.Close()
		if got := h.Freezer("box"); got.Dir != pids && got.Members != pids {
			t.Errorf("v2 %t: freezes %+v", v2, got)
		}
		if names, err := h.List(); err != nil || !slices.Equal(names, []string{"box"}) {
			t.Errorf("v2 %t: list %v, %v", v2, names, err)
		}
		if !slices.Contains(h.Paths("box"), cpu) {
			t.Errorf("v2 %t: %v lacks %s", v2, h.Paths("box"), cpu)
		}
	}
}

// A group in a hurry has the processors for as long as any is.
func TestHurry(t *testing.T) {
	t.Parallel()
	for _, v2 := range []bool{true, false} {
		var h *Hierarchy
		var parent, file string
		if v2 {
			root, self := fakeV2(t, "cpu memory pids\n")
			parent, file = filepath.Join(root, "dsec-be"), "cpu.weight"
			h = open(t, root, self, "dsec", map[string]string{
				"dsec/cpu.weight": "", "dsec/cgroup.procs": "", "dsec-be/cpu.weight": "", "dsec-be/one/cpu.weight": "00000", "dsec-be/two/cpu.weight": "00000",
			})
		} else {
			root, self := fakeV1(t)
			parent, file = filepath.Join(root, "cpu/dsec-be"), "cpu.shares"
			h = open(t, root, self, "dsec", map[string]string{
				"cpu/dsec/cpu.shares": "", "cpu/dsec-be/cpu.shares": "", "cpu/dsec-be/one/cpu.shares": "000000", "cpu/dsec-be/two/cpu.shares": "000000",
			})
		}
		are := func(when, idle, all, one, two string) {
			t.Helper()
			got := []string{read(t, filepath.Join(parent, "cpu.idle")), read(t, filepath.Join(parent, file)), read(t, filepath.Join(parent, "one", file)), read(t, filepath.Join(parent, "two", file))}
			for i, want := range []string{idle, all, one, two} {
				if !strings.HasPrefix(got[i], want) { // these files are longer than what the last write made of them
					t.Errorf("v2 %t, %s: %q, want %q", v2, when, got, []string{idle, all, one, two})
					return
				}
			}
		}
		if !h.Idle("one") || h.Idle("three") {
			t.Errorf("v2 %t: idle are %t and %t", v2, h.Idle("one"), h.Idle("three"))
		}
		most, usual, all := "262144", "1024", "512"
		if v2 {
			most, usual, all = "10000", "100", "50"
		}
		one := h.Hurry("one")
		are("one", "0", all, most, usual)
		two := h.Hurry("two")
		one()
		are("the other", "0", all, usual, most)
		two()
		are("none", "1", all, usual, usual)
		h.Hurry("gone")()
		are("one that has ended", "1", all, usual, usual)
	}
}

// On the real kernel. Needs root.
func TestRealIdleGroup(t *testing.T) {
	t.Parallel()
	h, err := Open(filepath.Join(t.TempDir(), "chosen.json"), "/sys/fs/cgroup", "/proc/self/cgroup", "dsectest"+itoa(int64(os.Getpid()))+"-2")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := h.RemoveAll(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(h.idleParent()); err == nil {
			t.Error("the parent of idle groups is left")
		}
	}()
	if got := strings.TrimSpace(read(t, filepath.Join(h.idleParent(), idleFile))); got != "1" || !h.IdleClass() {
		t.Errorf("cpu.idle is %q", got)
	}
	for range 2 { // idempotent
		if err := errors.Join(h.Create("box", Limits{MemoryBytes: 32 << 20, PIDs: 10, Idle: true}), h.LimitCPU("box", 500)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.Usage("box"); err != nil {
		t.Error(err)
	}
	calm := h.Hurry("box")
	files := func() (out [3]string) {
		file := map[bool]string{true: "cpu.weight", false: "cpu.shares"}[h.V2()]
		for i, f := range []string{filepath.Join(h.idleParent(), idleFile), filepath.Join(h.idleParent(), file), filepath.Join(h.idleParent(), "box", file)} {
			out[i] = strings.TrimSpace(read(t, f))
		}
		return out
	}
	if got := files(); got != [3]string{"0", "512", "262144"} && got != [3]string{"0", "50", "10000"} {
		t.Errorf("in a hurry: %v", got)
	}
	calm()
	if got := files(); got[0] != "1" || got[2] != "1024" && got[2] != "100" {
		t.Errorf("no longer: %v", got)
	}
	if dir := h.group("cpu", "box"); filepath.Dir(dir) != h.idleParent() {
		t.Errorf("it is %s", dir)
	}
	if err := h.Remove("box", time.Now().Add(10*time.Second)); err != nil {
		t.Error(err)
	}
	if names, err := h.List(); err != nil || len(names) != 0 {
		t.Errorf("left: %v, %v", names, err)
	}
}
