package proc

import (
	"os"
	"testing"
)

func TestOOMKills(t *testing.T) {
	t.Parallel()
	for content, want := range map[string]int64{
		"oom_kill_disable 0\nunder_oom 0\noom_kill 12\n":              12,
		"low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 1\n": 2,
		"oom_kill_disable 1\n":                                        0, "": 0, "oom_kill": 0, "\noom_kill 3": 3,
	} {
		if got := oomKills([]byte(content)); got != want {
			t.Errorf("%q: %d, want %d", content, got, want)
		}
	}
}

// What the memory limit killed is told from what a timeout, a client or a script killed.
func TestWhoKilled(t *testing.T) {
	t.Parallel()
	counter, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer counter.Close()
	tab := newTable(t, func(c *Config) { c.Memory = Memory{Limit: 64 << 20, Events: int(counter.Fd())} })
	set := func(s string) {
		if _, err := counter.WriteAt([]byte(s), 0); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name, script, before, after string
		kill                        bool
		want                        OOM
	}{
		{"itself", "read x; kill -9 $$", "1", "2", false, OOM{true, 1, 64 << 20}},
		{"the last command of a shell", "read x; exit 137", "2", "3", false, OOM{true, 1, 64 << 20}},
		{"a child that it survived", "read x; exit 2", "3", "5", false, OOM{false, 2, 64 << 20}},
		{"nothing", "read x; kill -9 $$", "5", "5", false, OOM{}},
		{"a client, too", "read x; sleep 1000", "5", "6", true, OOM{false, 1, 64 << 20}},
	} {
		set("oom_kill " + c.before + "\n")
		spec := sh(c.script)
		spec.Stdin = true
		p := start(t, tab, spec)
		set("oom_kill " + c.after + "\n")
		if c.kill {
			p.Signal(9, false)
		} else if err := p.Write(t.Context(), []byte("\n")); err != nil {
			t.Fatal(err)
		}
		if e := wait(t, p); e.OOM != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, e.OOM, c.want)
		}
	}
}
