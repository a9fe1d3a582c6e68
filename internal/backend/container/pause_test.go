package container

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/swap"
)

// roomy gives a sandbox memory for what the tests put there.
func roomy(s *backend.Spec) { s.Sandbox.MemoryBytes = 512 << 20 }

// fill starts a program that has that many MiB of memory of a kind, and returns a function that tells
// whether all of it is as it was.
func (b *box) fill(kind string, mib int) (check func()) {
	b.t.Helper()
	file := "/tmp/" + kind
	b.sh(fmt.Sprintf("setsid memory %s %d %s >/dev/null 2>&1 & n=0; until [ -e %s ] || [ $n -gt 50 ]; do sleep 0.1; n=$((n+1)); done", kind, mib, file, file))
	if out, _ := b.sh("cat " + file); out != "ok" {
		b.t.Fatalf("%d MiB of %s: %q", mib, kind, out)
	}
	round := 0
	return func() {
		b.t.Helper()
		round++
		said := file + "." + strconv.Itoa(round)
		out, _ := b.sh(fmt.Sprintf("killall -USR1 memory; n=0; until [ -e %s ] || [ $n -gt 50 ]; do sleep 0.1; n=$((n+1)); done; cat %s", said, said))
		if out != "ok" {
			b.t.Errorf("%s after a pause: %q", kind, out)
		}
	}
}

func (b *box) instance() *instance { return b.Instance.(*instance) }

func (b *box) pause() backend.Paused {
	b.t.Helper()
	p, err := b.instance().Pause(b.t.Context())
	if err != nil {
		b.t.Fatalf("pause: %v %v", err, errs.Of(err).Facts())
	}
	return p
}

func (b *box) resume() {
	b.t.Helper()
	if err := b.instance().Resume(b.t.Context(), time.Second); err != nil {
		b.t.Fatalf("resume: %v", err)
	}
}

func (b *box) used() int64 {
	b.t.Helper()
	u, err := b.Usage(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return u.MemoryBytes
}

// alive says something in the sandbox.
func (b *box) alive() {
	b.t.Helper()
	if out, _ := b.sh("echo alive"); out != "alive" {
		b.t.Errorf("it says %q", out)
	}
}

// The memory of a paused sandbox is free, whatever kind it is, and has what it had after the resume.
func TestPauseFreesMemory(t *testing.T) {
	t.Parallel()
	b := newNode(t).open(t)
	t.Cleanup(func() { b.Close() })
	for _, c := range []struct {
		kind  string
		mib   int
		stays int64 // MiB at most
	}{{"anon", 64, 4}, {"memfd", 64, 4}, {"forked", 64, 4}, {"locked", 6, 9}} {
		t.Run(c.kind, func(t *testing.T) {
			x := boxOn(t, b, roomy)
			check := x.fill(c.kind, c.mib)
			for range 3 {
				before := x.used()
				p := x.pause()
				after := x.used()
				if after > max(c.stays<<20, before/10) { // a busy device may not be done with all
					t.Errorf("%d bytes are in use, of %d", after, before)
				}
				u, err := x.Usage(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if c.kind != "locked" && (p.FreedBytes < before*9/10 || p.SwapBytes < int64(c.mib)<<20/2 || u.SwapBytes < int64(c.mib)<<20*9/10) {
					t.Errorf("of %d: %+v; usage says %d are in swap", before, p, u.SwapBytes)
				}
				x.resume()
				check()
			}
		})
	}
}

// Files that are only memory go to swap too, though no process has them mapped.
func TestPauseOfFilesInMemory(t *testing.T) {
	t.Parallel()
	x := newBox(t, roomy)
	was, code := x.sh("head -c 33554432 /dev/urandom >/dev/shm/f && sha256sum /dev/shm/f")
	if code != 0 {
		t.Fatal(was)
	}
	x.pause()
	if used := x.used(); used > 4<<20 {
		t.Errorf("%d bytes are in use", used)
	}
	x.resume()
	if now, _ := x.sh("sha256sum /dev/shm/f"); now != was {
		t.Errorf("%s, was %s", now, was)
	}
}

// Processes that are stopped, traced, ended, or wait for a child that has their memory stand still like others.
func TestPauseOfOddProcesses(t *testing.T) {
	t.Parallel()
	x := newBox(t, roomy)
	x.fill("odd", 0)
	before, _ := x.sh("pidof memory | wc -w")
	for range 3 {
		x.pause()
		x.resume()
	}
	x.alive()
	if after, _ := x.sh("pidof memory | wc -w"); after != before || before == "0" {
		t.Errorf("%s processes, %s before", after, before)
	}
}

// What runs is not swapped: not by the machine, and not by the sandbox's own limit.
func TestOnlyThePausedAreSwapped(t *testing.T) {
	t.Parallel()
	x := newBox(t, roomy)
	check := x.fill("anon", 16)
	x.pause()
	x.resume()
	check() // all of it is back
	if err := x.instance().b.cgroups.Reclaim(x.ID()); err != nil {
		t.Fatal(err)
	}
	if used := x.used(); used < 16<<20 {
		t.Errorf("a running sandbox's memory went: %d are left", used)
	}
}

// A pause that ends anywhere leaves what it began with.
func TestPauseCutShort(t *testing.T) {
	t.Parallel()
	x := newBox(t, roomy)
	check := x.fill("anon", 64)
	x.pause() // from here on the swap is there
	x.resume()
	check()
	for after := time.Millisecond; after < 64*time.Millisecond; after *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		_, err := x.instance().Pause(ctx)
		cancel()
		if err == nil {
			x.resume()
		}
		if x.instance().b.cgroups.Freezer(x.ID()).IsFrozen() {
			t.Fatalf("cut after %v, it stands still: %v", after, err)
		}
		check()
	}
}

func TestPauseWithoutRoom(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	small, err := swap.New(swap.Config{Dir: filepath.Join(n.dir, "small"), Option: swap.Option{Kind: swap.None}})
	if err != nil {
		t.Fatal(err)
	}
	b := n.open(t)
	t.Cleanup(func() { b.Close() })
	x := boxOn(t, b, roomy)
	check := x.fill("anon", 32)
	for _, c := range []struct {
		swap Swap
		want error
	}{{nil, errs.NotSupported}, {small, errs.NotSupported}, {full{}, errs.SwapFull}} {
		b.cfg.Swap = c.swap
		if _, err := x.instance().Pause(t.Context()); !errors.Is(err, c.want) {
			t.Errorf("%v, want %v", err, c.want)
		}
		check()
	}
}

// full is swap with nothing free.
type full struct{}

func (full) Take(_ context.Context, bytes int64) (func(), error) {
	if bytes < 32<<20 {
		return nil, fmt.Errorf("asked for %d", bytes)
	}
	return nil, errs.New(errs.SwapFull, "test", "full")
}

// Address spaces in very many parts are paused in bounded time, and removed.
func TestPauseOfManyRanges(t *testing.T) {
	t.Parallel()
	x := newBox(t, func(s *backend.Spec) { s.Sandbox.MemoryBytes = 1 << 30 })
	x.sh("setsid memory ranges 60 /tmp/r >/dev/null 2>&1 &")
	for start := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if out, _ := x.sh("ls /tmp/r.* | grep -vc new"); out == "8" {
			break
		} else if time.Since(start) > 90*time.Second {
			t.Fatalf("%s are ready", out)
		}
	}
	start := time.Now()
	x.pause()
	t.Logf("480,000 ranges: %v", time.Since(start))
	x.resume()
	x.alive()
	x.pause()
}

func TestPauseOfManyAtOnce(t *testing.T) {
	t.Parallel()
	b := newNode(t).open(t)
	t.Cleanup(func() { b.Close() })
	boxes := make([]*box, 16)
	checks := make([]func(), len(boxes))
	for n := range boxes {
		boxes[n] = boxOn(t, b, nil)
		checks[n] = boxes[n].fill("anon", 16)
	}
	for range 2 {
		var wg sync.WaitGroup
		for _, x := range boxes {
			wg.Go(func() {
				if _, err := x.instance().Pause(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for _, x := range boxes {
			if used := x.used(); used > 8<<20 { // of 18; all wait for one device
				t.Errorf("%d bytes are in use", used)
			}
			wg.Go(func() {
				if err := x.instance().Resume(t.Context(), 0); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for _, check := range checks {
			check()
		}
	}
}

// A removal needs no resume: what is in swap goes without coming back.
func TestRemovalOfThePaused(t *testing.T) {
	t.Parallel()
	b := newNode(t).open(t)
	t.Cleanup(func() { b.Close() })
	x := boxOn(t, b, roomy)
	x.fill("anon", 256)
	x.pause()
	start := time.Now()
	if err := b.Delete(t.Context(), x.ID()); err != nil {
		t.Fatal(err)
	}
	t.Logf("removed in %v", time.Since(start))
	select {
	case <-x.Instance.Done():
	default:
		t.Error("not done")
	}
	if left, err := b.Audit(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// One that is killed while it is paused ends: at once where the kernel lets the frozen die, else as it is resumed.
func TestKilledWhilePaused(t *testing.T) {
	t.Parallel()
	x := newBox(t, nil)
	x.pause()
	if err := unix.Kill(x.instance().handle.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := x.Usage(t.Context()); err != nil {
		t.Error(err)
	}
	if err := x.instance().Resume(t.Context(), 0); err != nil {
		t.Error(err)
	}
	select {
	case <-x.Instance.Done():
	case <-time.After(20 * time.Second):
		t.Error("its end is not noticed")
	}
}

// A snapshot of what is paused lets nothing run.
func TestPackOfThePaused(t *testing.T) {
	t.Parallel()
	x := newBox(t, nil)
	x.sh("echo kept >/root/file; (while :; do echo x >>/root/count; done) >/dev/null 2>&1 &")
	x.pause()
	pack := func() int64 {
		t.Helper()
		data, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer data.Close()
		var times backend.PackTimes
		if _, _, err := x.instance().Pack(t.Context(), backend.PackOptions{Data: data, Meta: io.Discard, Times: &times}); err != nil {
			t.Fatal(err)
		}
		if times.Frozen != 0 || times.Ahead != 0 {
			t.Errorf("%+v", times)
		}
		st, err := os.Stat(filepath.Join(x.instance().b.dir.Name(), x.ID(), "upper/root/count"))
		if err != nil {
			t.Fatal(err)
		}
		return st.Size()
	}
	was := pack()
	if !x.instance().b.cgroups.Freezer(x.ID()).IsFrozen() {
		t.Fatal("it runs after the snapshot")
	}
	if now := pack(); now != was {
		t.Errorf("it ran: %d, then %d", was, now)
	}
	x.resume()
	if out, _ := x.sh("cat /root/file"); out != "kept" {
		t.Errorf("%q", out)
	}
}

const pauserEnv = "CONTAINER_TEST_PAUSE"

// pausing is what another process needs to pause a sandbox.
type pausing struct {
	Dir, Writable, Group, Swap string
	Spec                       backend.Spec
	Handle                     json.RawMessage
}

// TestMain also is an edge that pauses a sandbox.
func TestMain(m *testing.M) {
	if raw := os.Getenv(pauserEnv); raw != "" {
		if err := pauseAsOther([]byte(raw)); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		select {} // until it is killed
	}
	os.Exit(m.Run())
}

func pauseAsOther(raw []byte) error {
	var p pausing
	if err := json.Unmarshal(raw, &p); err != nil {
		return err
	}
	space, err := swap.New(swap.Config{Dir: p.Swap, Option: swap.Option{Kind: swap.File, Bytes: swapBytes}})
	if err != nil {
		return err
	}
	b, err := New(Config{Dir: p.Dir, Writable: p.Writable, CgroupRoot: "/sys/fs/cgroup", CgroupName: p.Group, FirstID: 1 << 20, Swap: space})
	if err != nil {
		return err
	}
	i, err := b.Adopt(context.Background(), p.Spec, p.Handle)
	if err != nil {
		return err
	}
	fmt.Println("pausing")
	_, err = i.(backend.Pauser).Pause(context.Background())
	return err
}

// other starts a process that pauses a sandbox, and returns as that begins.
func (n *node) other(t *testing.T, s backend.Spec, handle json.RawMessage) *exec.Cmd {
	t.Helper()
	s.Paused = false
	raw, err := json.Marshal(pausing{n.dir, n.writable, n.group, n.swapDir, s, handle})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), pauserEnv+"="+string(raw))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "pausing\n" {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		t.Fatalf("%q, %v", line, err)
	}
	return cmd
}

// An edge that is killed in the middle of a pause leaves what the next one can let run, or pause.
func TestPauseOfAKilledEdge(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	b := n.open(t)
	x := boxOn(t, b, roomy)
	check := x.fill("anon", 48)
	x.pause()
	x.resume()
	check()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	s := x.instance().spec
	for round := range 12 {
		cmd := n.other(t, s, x.Handle())
		time.Sleep(time.Duration(random.Int64N(int64(80 * time.Millisecond)))) // which part of the pause is hit is chance
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		next := n.open(t)
		s.Paused = round%2 == 1
		i, err := next.Adopt(t.Context(), s, x.Handle())
		if err != nil {
			t.Fatal(err)
		}
		if frozen := next.cgroups.Freezer(s.ID).IsFrozen(); frozen != s.Paused {
			t.Errorf("round %d: frozen %v, want %v", round, frozen, s.Paused)
		}
		if err := i.(backend.Pauser).Resume(t.Context(), 0); err != nil {
			t.Error(err)
		}
		check()
		if err := next.Close(); err != nil {
			t.Error(err)
		}
	}
}
