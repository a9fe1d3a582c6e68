package freeze_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/snapshot/freeze"

	"golang.org/x/sys/unix"
)

const helperEnv = "FREEZE_TEST_GROUP"

// TestMain also is an edge that freezes a group and is killed.
func TestMain(m *testing.M) {
	if raw := os.Getenv(helperEnv); raw != "" {
		var g freeze.Group
		if err := json.Unmarshal([]byte(raw), &g); err != nil {
			panic(err)
		}
		if _, err := g.Freeze(context.Background(), freeze.Limits{}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("frozen")
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	os.Exit(m.Run())
}

// box is a group with programs that fork all the time and count in a file.
type box struct {
	t     *testing.T
	group freeze.Group
	count string
	stop  func()
}

// versions are the hierarchies of this machine that freeze.
func versions(t *testing.T, run func(t *testing.T, hierarchy string)) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	found := false
	for _, h := range []string{"/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if h == "/sys/fs/cgroup" {
			if _, err := os.Stat(h + "/cgroup.controllers"); err != nil {
				continue
			}
		}
		if _, err := os.Stat(h + "/cgroup.procs"); err != nil {
			continue
		}
		found = true
		t.Run(filepath.Base(h), func(t *testing.T) { t.Parallel(); run(t, h) })
	}
	if !found {
		t.Skip("no freezer here")
	}
}

func newBox(t *testing.T, hierarchy string, forkers int) *box {
	t.Helper()
	name := fmt.Sprintf("freezetest-%d-%d", os.Getpid(), time.Now().UnixNano())
	b := &box{t: t, group: freeze.Group{Dir: filepath.Join(hierarchy, name)}, count: filepath.Join(t.TempDir(), "count")}
	home := b.group.Dir
	if pids := "/sys/fs/cgroup/pids"; exists(pids) { // version 1: the sandbox is in another hierarchy
		home = filepath.Join(pids, name)
		b.group.Members = home
	}
	if err := os.Mkdir(home, 0o755); err != nil {
		t.Fatal(err)
	}
	script := `echo 0 > "$1/cgroup.procs" || exit 1
i=0; while [ $i -lt $2 ]; do (while :; do (echo x >> "$0"; /bin/true); done) & i=$((i+1)); done; wait`
	cmd := exec.Command("sh", "-c", script, b.count, home, strconv.Itoa(forkers))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b.stop = sync.OnceFunc(func() {
		if err := b.group.Thaw(); err != nil {
			t.Error(err)
		}
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		_ = cmd.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := b.group.Remove(ctx); err != nil {
			t.Error(err)
		}
		if err := (freeze.Group{Dir: home, Members: "x"}).Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(b.stop)
	b.runs()
	return b
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

func (b *box) size() int64 {
	st, err := os.Stat(b.count)
	if err != nil {
		return 0
	}
	return st.Size()
}

func (b *box) runs() {
	b.t.Helper()
	for was, end := b.size(), time.Now().Add(10*time.Second); b.size() == was; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			b.t.Fatal("it does not run")
		}
	}
}

func (b *box) stands() {
	b.t.Helper()
	was := b.size()
	time.Sleep(30 * time.Millisecond)
	if now := b.size(); now != was {
		b.t.Fatalf("it runs: %d, then %d", was, now)
	}
}

func TestForkersStandStillAndRunOn(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, h string) {
		b := newBox(t, h, 8)
		for range 5 {
			start := time.Now()
			f, err := b.group.Freeze(t.Context(), freeze.Limits{Freeze: 10 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("frozen in %v", time.Since(start))
			b.stands()
			if !b.group.IsFrozen() {
				t.Error("not said to be frozen")
			}
			for range 2 {
				if err := f.Thaw(); err != nil {
					t.Error(err)
				}
			}
			if b.group.IsFrozen() {
				t.Error("said to be frozen")
			}
			b.runs()
		}
	})
}

// Freezing outlives the process that froze: adopting thaws.
func TestThawAfterTheFreezerWasKilled(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, h string) {
		b := newBox(t, h, 2)
		raw, err := json.Marshal(b.group)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), helperEnv+"="+string(raw))
		out, err := cmd.Output()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || !bytes.Equal(out, []byte("frozen\n")) {
			t.Fatalf("%v: %s", err, out)
		}
		b.stands()
		for range 2 {
			if err := b.group.Thaw(); err != nil {
				t.Error(err)
			}
		}
		b.runs()
	})
}

// A holder that hangs does not hold for ever, and hears of it.
func TestTheHoldEnds(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, h string) {
		b := newBox(t, h, 2)
		f, err := b.group.Freeze(t.Context(), freeze.Limits{Freeze: 10 * time.Second, Hold: 50 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
		b.runs()
		if err := f.Thaw(); !errors.Is(err, errs.StateConflict) {
			t.Errorf("got %v", err)
		}
	})
}

// A process that waits for the child of its vfork, when it is frozen for the first time, keeps nobody.
func TestFreezeInVfork(t *testing.T) {
	t.Parallel()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("needs gcc")
	}
	dir := t.TempDir()
	source, program := filepath.Join(dir, "v.c"), filepath.Join(dir, "v")
	const code = "#include <unistd.h>\nint main(void) { if (vfork() == 0) for (;;) pause(); return 0; }\n"
	if err := os.WriteFile(source, []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(gcc, "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	versions(t, func(t *testing.T, h string) {
		b := newBox(t, h, 1)
		home := b.group.Dir
		if b.group.Members != "" {
			home = b.group.Members
		}
		cmd := exec.Command("sh", "-c", `echo 0 > "$1/cgroup.procs" && exec "$0"`, program, home)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = b.group.Thaw()
			_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
			_ = cmd.Wait()
			b.stop()
		})
		waits := filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "stat")
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			stat, err := os.ReadFile(waits)
			if err == nil && strings.Contains(string(stat), "(v) D ") {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("it does not wait for a child: %s, %v", stat, err)
			}
		}
		f, err := b.group.Freeze(t.Context(), freeze.Limits{Freeze: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Thaw(); err != nil {
			t.Error(err)
		}
		b.runs()
	})
}

// Without a hold nothing runs until it is thawed, by whoever does.
func TestAHoldWithoutEnd(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, h string) {
		b := newBox(t, h, 2)
		f, err := b.group.Freeze(t.Context(), freeze.Limits{Freeze: 10 * time.Second, Hold: -1})
		if err != nil {
			t.Fatal(err)
		}
		b.stands()
		if err := b.group.Thaw(); err != nil {
			t.Error(err)
		}
		b.runs()
		if err := f.Thaw(); err != nil {
			t.Errorf("after another thawed: %v", err)
		}
	})
}

func TestWhatCannotBeFrozenRunsOn(t *testing.T) {
	t.Parallel()
	versions(t, func(t *testing.T, h string) {
		b := newBox(t, h, 2)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := b.group.Freeze(ctx, freeze.Limits{}); err != nil && !errors.Is(err, errs.RequestCanceled) {
			t.Errorf("canceled: %v", err)
		}
		b.runs()
		if _, err := b.group.Freeze(t.Context(), freeze.Limits{Freeze: 1}); err != nil && !errors.Is(err, errs.StateConflict) {
			t.Errorf("too short: %v", err)
		}
		_ = b.group.Thaw() // it may have been fast enough
		b.runs()
	})
}

func TestNoFreezer(t *testing.T) {
	t.Parallel()
	g := freeze.Group{Dir: filepath.Join(t.TempDir(), "none")}
	if _, err := g.Freeze(t.Context(), freeze.Limits{}); !errors.Is(err, errs.NotSupported) {
		t.Errorf("got %v", err)
	}
	if err := g.Thaw(); err != nil {
		t.Error(err)
	}
	if err := g.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	if g.IsFrozen() {
		t.Error("frozen")
	}
}

// The thaw writes nothing where there is nothing to thaw, and the right word where there is.
func TestThawFiles(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ file, was, want string }{
		{"freezer.state", "FROZEN\n", "THAWED\n"}, {"freezer.state", "FREEZING", "THAWEDNG"}, {"freezer.state", "THAWED\n", "THAWED\n"},
		{"cgroup.freeze", "1\n", "0\n"}, {"cgroup.freeze", "0\n", "0\n"},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, c.file)
		if err := os.WriteFile(path, []byte(c.was), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := (freeze.Group{Dir: dir}).Thaw(); err != nil {
			t.Error(err)
		}
		if got, _ := os.ReadFile(path); string(got) != c.want { // a plain file keeps the rest
			t.Errorf("%s %q: now %q", c.file, strings.TrimSpace(c.was), got)
		}
	}
}
