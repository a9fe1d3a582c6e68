package keeper_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/internal/keeper"
)

// The test binary is the keeper and the edge, too.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "keeper-under-test":
			hooks := keeper.Hooks{Abandoned: func(ctx context.Context, held *keeper.Client) error {
				list, err := held.List(ctx)
				if err != nil || !slices.Contains(list, "abandon") {
					return errors.Join(err, errors.New("not mine"))
				}
				return held.Drop(ctx, "abandon")
			}}
			os.Exit(keeper.Main(os.Args[2:], []string{"keeper-under-test"}, hooks))
		case "edge-under-test":
			os.Exit(edge(os.Args[2]))
		}
	}
	os.Exit(m.Run())
}

func config(dir string) keeper.Config {
	return keeper.Config{Dir: dir, Verb: []string{"keeper-under-test"}, Patience: time.Hour, Linger: 300 * time.Millisecond}
}

// edge has a pipe's reading end held and waits.
func edge(dir string) int {
	c, err := keeper.Start(context.Background(), config(dir))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	r, w, _ := os.Pipe()
	w.WriteString("kept")
	if err := c.Put(context.Background(), "pipe", []*os.File{r, w}); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("ready")
	select {}
}

func start(t *testing.T, cfg keeper.Config) *keeper.Client {
	t.Helper()
	c, err := keeper.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// pids are the processes whose arguments name dir.
func pids(dir string) (out []int) {
	list, _ := os.ReadDir("/proc")
	for _, e := range list {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		p, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if strings.Contains(string(p), "keeper-under-test\x00-dir\x00"+dir+"\x00") {
			out = append(out, pid)
		}
	}
	return out
}

// kill ends what a test that failed has left.
func kill(dir string) {
	for range 20 {
		for _, pid := range pids(dir) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: " + what)
		}
	}
}

func noneLeft(t *testing.T, dir string) {
	t.Helper()
	waitFor(t, "no process left", func() bool { return len(pids(dir)) == 0 })
}

func held(t *testing.T, c *keeper.Client) string {
	t.Helper()
	list, err := c.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(list, ",")
}

func TestPutTakeDrop(t *testing.T) {
	dir := t.TempDir()
	t.Cleanup(func() { kill(dir) })
	c := start(t, config(dir))
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := c.Put(t.Context(), "a", []*os.File{w}); err != nil {
		t.Fatal(err)
	}
	for i := range 300 { // more than one packet of names
		if err := c.Put(t.Context(), fmt.Sprintf("%0200d", i), []*os.File{r, w}); err != nil {
			t.Fatal(err)
		}
	}
	if list, err := c.List(t.Context()); err != nil || len(list) != 301 {
		t.Errorf("%d names, %v", len(list), err)
	}
	got, err := c.Take(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	got[0].WriteString("x")
	p := make([]byte, 1)
	if _, err := r.Read(p); err != nil || p[0] != 'x' {
		t.Errorf("%q, %v", p, err)
	}
	got[0].Close()
	for i := range 300 {
		if err := c.Drop(t.Context(), fmt.Sprintf("%0200d", i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Drop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if h := held(t, c); h != "" {
		t.Errorf("held %q", h)
	}
	w.Close()
	if _, err := r.Read(p); err != io.EOF {
		t.Errorf("the keepers still hold it: %v", err)
	}
	if _, err := c.Take(t.Context(), "a"); err == nil {
		t.Error("took what is not held")
	}
	if err := c.Put(t.Context(), strings.Repeat("x", 256), []*os.File{r}); err == nil {
		t.Error("long name")
	}
	if err := c.Put(t.Context(), "x", nil); err == nil {
		t.Error("nothing put")
	}
	if err := c.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	noneLeft(t, dir)
}

func TestOutlivesEdgeAndKeepers(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command("/proc/self/exe", "edge-under-test", dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 6)
	if _, err := io.ReadFull(out, line); err != nil || string(line) != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	t.Cleanup(func() { kill(dir) })
	two := func() bool { return len(pids(dir)) == 2 }
	waitFor(t, "both listen", func() bool { return listening(dir) == 2 && two() })
	first := pids(dir)
	for _, pid := range first {
		p, _ := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
		if mayProtect() && string(p) != "-1000\n" {
			t.Errorf("oom_score_adj %s", p)
		}
		if sid, _ := sid(pid); sid != pid {
			t.Errorf("session %d of keeper %d", sid, pid)
		}
	}
	// SIGTERM to the group ends the edge alone; kill -9 then takes each keeper once.
	syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
	cmd.Wait()
	for _, pid := range first {
		syscall.Kill(pid, syscall.SIGTERM)
		syscall.Kill(pid, syscall.SIGHUP)
	}
	for _, pid := range first {
		waitFor(t, "two keepers", two)
		syscall.Kill(pid, syscall.SIGKILL)
		waitFor(t, "it is gone", func() bool { return !slices.Contains(pids(dir), pid) })
		waitFor(t, "two keepers", two)
		waitFor(t, "both listen", func() bool { return listening(dir) == 2 })
	}
	c := start(t, config(dir))
	files, err := c.Take(t.Context(), "pipe")
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 4)
	if _, err := files[0].Read(p); err != nil || string(p) != "kept" {
		t.Errorf("%q, %v", p, err)
	}
	// With an edge: killed together, they are started and given what it holds.
	for _, pid := range pids(dir) {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	waitFor(t, "both hold it again", func() bool {
		s := c.Status(t.Context())
		return len(s) == 2 && s[0].Files == 2 && s[1].Files == 2 && s[0].Edges == 1
	})
	if err := c.Drop(t.Context(), "pipe"); err != nil {
		t.Error(err)
	}
	for _, f := range files {
		f.Close()
	}
	c.Close()
	noneLeft(t, dir) // nothing held, no edge
}

// An edge that leaves does not stop what it left; an abandoned one is cleared away.
func TestAbandoned(t *testing.T) {
	dir := t.TempDir()
	cfg := config(dir)
	cfg.Patience = 200 * time.Millisecond
	c := start(t, cfg)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if err := c.Put(t.Context(), "abandon", []*os.File{r}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(600 * time.Millisecond)
	if h := held(t, c); h != "abandon" {
		t.Errorf("held %q", h)
	}
	c.Close()
	noneLeft(t, dir)
}

func TestDropWhileKeeperIsDown(t *testing.T) {
	dir := t.TempDir()
	t.Cleanup(func() { kill(dir) })
	c := start(t, config(dir))
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := c.Put(t.Context(), "a", []*os.File{w}); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		for _, s := range c.Status(t.Context()) {
			syscall.Kill(s.PID, syscall.SIGKILL)
			break
		}
		if err := c.Put(t.Context(), "b", []*os.File{w}); err != nil {
			t.Error(err)
		}
		if err := c.Drop(t.Context(), "b"); err != nil {
			t.Error(err)
		}
	}
	waitFor(t, "both hold one", func() bool {
		s := c.Status(t.Context())
		return len(s) == 2 && s[0].Names == 1 && s[1].Names == 1
	})
	c.Stop(t.Context())
	noneLeft(t, dir)
	w.Close()
	if _, err := r.Read(make([]byte, 1)); err != io.EOF {
		t.Error(err)
	}
}

// listening counts the keepers that run and have said so.
func listening(dir string) (n int) {
	for slot := range 2 {
		p, _ := os.ReadFile(fmt.Sprintf("%s/keeper-%d.log", dir, slot))
		for _, pid := range pids(dir) {
			if strings.Contains(string(p), fmt.Sprintf("pid=%d held=", pid)) {
				n++
			}
		}
	}
	return n
}

// mayProtect says whether this process has CAP_SYS_RESOURCE.
func mayProtect() bool {
	p, _ := os.ReadFile("/proc/self/status")
	_, rest, _ := strings.Cut(string(p), "CapEff:\t")
	line, _, _ := strings.Cut(rest, "\n")
	caps, err := strconv.ParseUint(line, 16, 64)
	return err == nil && caps&(1<<24) != 0
}

func sid(pid int) (int, error) {
	p, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	f := strings.Fields(string(p[strings.LastIndexByte(string(p), ')')+1:]))
	return strconv.Atoi(f[3])
}
