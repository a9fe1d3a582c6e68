package container

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dsec/internal/backend"
)

func TestParseKill(t *testing.T) {
	t.Parallel()
	const head = "3,144673,29881961333,-;"
	const tail = " total-vm:33576kB, anon-rss:31360kB, file-rss:1260kB, shmem-rss:4kB, UID:1114112 pgtables:100kB oom_score_adj:300\n"
	for line, want := range map[string]string{
		head + "Memory cgroup out of memory: Killed process 2900997 (tail)" + tail:           "tail 2900997 1114112 33406976 false",
		head + "Out of memory: Killed process 7 (x) total-vm:1k)" + tail:                     "x) total-vm:1k 7 1114112 33406976 true",
		head + "Memory cgroup out of memory: Killed process 7 () UID:5)" + tail + " SUB=x\n": ") UID:5 7 1114112 33406976 false",
		head + "Out of memory (oom_kill_allocating_task): Killed process 7 (a b)" + tail:     "a b 7 1114112 33406976 true",
		head + "Memory cgroup out of memory: Killed process x (tail)" + tail:                 "",
		head + "Memory cgroup out of memory: Killed process 1 (tail) and no more\n":          "",
		head + "Memory cgroup out of memory: Killed process 1 (tail) total-vm:1kB, UID:-1\n": "",
		head + "oom_reaper: reaped process 2900997 (tail), now anon-rss:0kB, file-rss:0kB\n": "",
	} {
		got := ""
		if k, uid, pid, ok := parseKill(line); ok {
			got = fmt.Sprint(k.Command, " ", pid, " ", uid, " ", k.MemoryBytes, " ", k.Node)
		}
		if got != want {
			t.Errorf("%q:\n got %s\nwant %s", line, got, want)
		}
	}
}

// What lines tell of is told by name, at once; what they do not, by a look at all once it is sure.
func TestWatchOOM(t *testing.T) {
	t.Parallel()
	line := func(pid, uid int) string {
		return fmt.Sprintf("Memory cgroup out of memory: Killed process %d (tail) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:%d pgtables:1kB oom_score_adj:300\n", pid, uid)
	}
	for _, c := range []struct {
		name, does, want string // l: a line of ours, o: of another's, k: the machine counts a kill, t: a tick
		log              bool
	}{
		{"lines", "lkltkt", "box box", true},
		{"another node's", "kottkott", "", true},
		{"a line is late", "ktlttt", "box", true},
		{"a line was lost", "kttt", "all", true},
		{"no log", "tktkkt", "all all", false},
		{"nothing", "tttt", "", true},
	} {
		var told []string
		w := &oomWatch{
			told: func(k backend.OOMKill) {
				if k.Sandbox == "" {
					told = append(told, "all")
				} else {
					told = append(told, k.Sandbox)
				}
			},
			owner: func(uid uint32) string {
				if uid == 5 {
					return "box"
				}
				return ""
			},
			inside: func(int, string) int { return 3 },
		}
		if c.log {
			w.lines = make(chan string)
		}
		counted := int64(0)
		for _, what := range c.does {
			switch what {
			case 'k':
				counted++
			case 'l':
				w.line(line(1, 5))
			case 'o':
				w.line(line(1, 6))
			case 't':
				w.compare(counted)
			}
		}
		if got := strings.Join(told, " "); got != c.want {
			t.Errorf("%s: told %q, want %q", c.name, got, c.want)
		}
	}
}

func TestCountOOM(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "vmstat")
	if err := os.WriteFile(file, []byte("numa_hit 3\noom_kill 381\nballoon 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n, err := countOOM(file); n != 381 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if err := os.WriteFile(file, []byte("numa_hit 3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n, err := countOOM(file); err == nil {
		t.Errorf("%d of a kernel that does not count", n)
	}
}

// Records of the log are read one by one; only those of kills are handed on.
func TestReadKernelLog(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	lines := make(chan string)
	go readKernelLog(t.Context(), r, lines)
	var got []string
	for _, s := range []string{"6,1,1,-;eth0 is up\n", "3,2,1,-;Memory cgroup out of memory: Killed process 1 (a)\n"} {
		if _, err := w.WriteString(s); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(s, killedMark) {
			got = append(got, <-lines)
		}
	}
	w.Close()
	for l := range lines {
		got = append(got, l)
	}
	if len(got) != 1 || !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "process 1 (a)") }) {
		t.Errorf("%q", got)
	}
}
