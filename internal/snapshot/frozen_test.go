package snapshot_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/internal/image/imagetest"
	"dsec/internal/snapshot"
	"dsec/internal/snapshot/freeze"

	"golang.org/x/sys/unix"
)

// Programs that write one file after the other are caught between two writes: never is the
// second ahead of the first, nor further behind than one, and they run on afterwards.
func TestPackOfAFrozenProgram(t *testing.T) {
	t.Parallel()
	p := newPlain(t)
	home, freezer := "", ""
	for _, h := range [][2]string{{"/sys/fs/cgroup/pids", "/sys/fs/cgroup/freezer"}, {"/sys/fs/cgroup", "/sys/fs/cgroup"}} {
		if _, err := os.Stat(h[0] + "/cgroup.procs"); err == nil {
			home, freezer = h[0], h[1]
			break
		}
	}
	if home == "" {
		t.Skip("no cgroups here")
	}
	name := fmt.Sprintf("packtest-%d", os.Getpid())
	g := freeze.Group{Dir: filepath.Join(freezer, name)}
	home = filepath.Join(home, name)
	p.must(os.Mkdir(home, 0o755))
	if home != g.Dir {
		g.Members = home
	}
	script := `echo 0 > "$1/cgroup.procs" || exit 1
cd "$0"; i=0; while :; do i=$((i+1)); echo $i >> first; echo $i >> second; done`
	cmd := exec.Command("sh", "-c", script, p.dir, home)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.must(cmd.Start())
	defer func() {
		p.must(g.Thaw())
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		p.must(g.Remove(t.Context()))
		for end := time.Now().Add(5 * time.Second); unix.Rmdir(home) == unix.EBUSY && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
	}()
	last := 0
	for range 20 {
		time.Sleep(5 * time.Millisecond)
		f, err := g.Freeze(t.Context(), freeze.Limits{Freeze: 10 * time.Second})
		p.must(err)
		w := &world{tb: t, dir: t.TempDir(), open: map[int]bool{}}
		o := &overlay{w: w, upper: p.fd}
		fd, _, man := o.pack(snapshot.Options{})
		upper := describe(t, p.fd)
		p.must(f.Thaw())
		if d := imagetest.Diff(upper, describe(t, fd)); d != "" || len(man.Notes) > 0 {
			t.Errorf("%s %+v", d, man)
		}
		var n [2]int
		for i, file := range []string{"first", "second"} {
			b, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/%s", fd, file))
			if err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
			n[i] = strings.Count(string(b), "\n")
		}
		unix.Close(fd)
		if d := n[0] - n[1]; d < 0 || d > 1 {
			t.Errorf("the files have %d and %d lines", n[0], n[1])
		}
		if n[0] < last {
			t.Errorf("%d lines after %d", n[0], last)
		}
		last = n[0]
	}
	if last == 0 {
		t.Error("the program wrote nothing")
	}
}
