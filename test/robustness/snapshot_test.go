package robustness

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/client"
	"dsec/test/bed"
)

// frozen tells whether a sandbox stands still.
func frozen(t *testing.T, id string) bool {
	t.Helper()
	for _, pattern := range []string{"/sys/fs/cgroup/freezer/", "/sys/fs/cgroup/"} {
		var state []byte
		_ = filepath.WalkDir(pattern, func(path string, d os.DirEntry, err error) error { // groups end while we look
			if err == nil && d.IsDir() && d.Name() == id && state == nil {
				for _, file := range []string{"freezer.state", "cgroup.freeze"} {
					if b, err := os.ReadFile(filepath.Join(path, file)); err == nil {
						state = b
					}
				}
			}
			return nil
		})
		if state != nil {
			s := strings.TrimSpace(string(state))
			return s != "THAWED" && s != "0"
		}
	}
	return false
}

// The server is killed at random moments of snapshots, some while the sandbox is frozen. The next
// one has all sandboxes running, the snapshots that were reported whole, and no others half; and
// nothing is left of those that were not.
func TestKilledWhileItMakesSnapshots(t *testing.T) {
	t.Parallel()
	random := bed.Random(t)
	b := bed.New(t, bed.Options{})
	sb := b.Sandbox(t, b.Client(t), client.Spec{})
	ctx := t.Context()
	must := func(script string) string {
		t.Helper()
		res, err := b.Client(t).Sandbox(sb.ID()).Run(ctx, "sh", "-euc", script)
		if err != nil || res.Code != 0 {
			t.Fatalf("%s: %v %+v", script, err, res)
		}
		return strings.TrimSpace(string(res.Stdout))
	}
	must("mkdir /d; head -c 8000000 /dev/urandom >/d/big")
	want := must("sha256sum </d/big")
	if _, err := sb.StartDetached(ctx, client.Cmd{Path: "sh", Args: []string{"-c", counter}}); err != nil {
		t.Fatal(err)
	}
	wasFrozen, reported := 0, map[string]string{}
	for round := range 8 {
		c := b.Client(t)
		rctx, cancel := context.WithCancel(ctx)
		var wg sync.WaitGroup
		var mu sync.Mutex
		wg.Go(func() {
			for n := 0; rctx.Err() == nil; n++ {
				name := fmt.Sprintf("r%d-%d", round, n)
				// Another choice of what to leave out makes each a whole one, and long.
				img, err := c.Sandbox(sb.ID()).Snapshot(rctx, name, client.SnapshotOptions{LeaveOut: []string{"/none" + name}})
				if err != nil {
					return
				}
				mu.Lock()
				reported[img.Name] = img.Digest
				mu.Unlock()
			}
		})
		wait := time.Duration(random.Int64N(int64(2 * time.Second)))
		if round%2 == 0 { // for sure while it stands still
			for end := time.Now().Add(bed.Patience); !frozen(t, sb.ID()) && time.Now().Before(end); {
				time.Sleep(100 * time.Microsecond)
			}
			wait = 0
		}
		time.Sleep(wait)
		b.Kill(t)
		cancel()
		wg.Wait()
		if frozen(t, sb.ID()) {
			wasFrozen++
		}
		if err := b.Up(ctx); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if frozen(t, sb.ID()) {
			t.Fatalf("round %d: the sandbox stands still after the restart", round)
		}
		first := must("cat /count")
		bed.Eventually(t, "its processes run on", func() error {
			if now := must("cat /count"); now == first {
				return fmt.Errorf("the count is still %s", now)
			}
			return nil
		})
		if left, err := filepath.Glob(filepath.Join(b.Data, "images", "tmp", "*")); err != nil || len(left) > 0 {
			t.Errorf("round %d: work is left: %v, %v", round, left, err)
		}
		if r := b.CLI(t, "doctor", "--audit", "--data", b.Data); r.Code != 0 && strings.Contains(r.Stdout+r.Stderr, b.Data) {
			t.Errorf("round %d: audit: %s%s", round, r.Stdout, r.Stderr)
		}
	}
	if wasFrozen == 0 {
		t.Error("no kill met a frozen sandbox")
	}
	t.Logf("%d of 8 kills met a frozen sandbox; %d snapshots were reported", wasFrozen, len(reported))
	c := b.Client(t)
	there, err := c.Snapshots(ctx)
	if err != nil {
		t.Fatal(err)
	}
	has := map[string]string{}
	for _, s := range there {
		has[s.Name] = s.Digest
	}
	for name, digest := range reported {
		if has[name] != digest {
			t.Errorf("%s was reported as %s and is %q", name, digest, has[name])
		}
	}
	for n, s := range there { // also those that nobody was told of are whole
		if n > 0 && n < len(there)-1 && n%4 != 0 {
			continue
		}
		copied := b.Sandbox(t, c, client.Spec{Image: s.Name})
		res, err := copied.Run(ctx, "sha256sum", "/d/big")
		if err != nil || !strings.HasPrefix(string(res.Stdout), strings.Fields(want)[0]) {
			t.Errorf("%s: %v %+v, want %s", s.Name, err, res, want)
		}
		if err := copied.Delete(ctx); err != nil {
			t.Error(err)
		}
	}
	if err := sb.Delete(ctx); err != nil {
		t.Error(err)
	}
}

// Children of a fork whose server is killed are there or not, and its image goes with them.
func TestKilledWhileItForks(t *testing.T) {
	t.Parallel()
	random := bed.Random(t)
	b := bed.New(t, bed.Options{})
	sb := b.Sandbox(t, b.Client(t), client.Spec{})
	ctx := t.Context()
	if res, err := sb.Run(ctx, "sh", "-c", "head -c 3000000 /dev/urandom >/big"); err != nil || res.Code != 0 {
		t.Fatal(err, res)
	}
	for round := range 5 {
		c := b.Client(t)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for _, err := range c.Sandbox(sb.ID()).Fork(ctx, 12, client.ForkOptions{}) {
				_ = err // of those that the kill met
			}
		}()
		time.Sleep(time.Duration(random.Int64N(int64(400 * time.Millisecond))))
		b.Kill(t)
		<-done
		if err := b.Up(ctx); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		c = b.Client(t)
		for child, err := range c.All(ctx, client.ListOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			if child.ForkOf == "" {
				continue
			}
			if res, err := c.Sandbox(child.ID).Run(ctx, "test", "-s", "/big"); err != nil || res.Code != 0 {
				t.Errorf("round %d: child %s: %v %+v", round, child.ID, err, res)
			}
			if err := c.Delete(ctx, child.ID); err != nil {
				t.Error(err)
			}
		}
		bed.Eventually(t, "the fork's image goes", func() error {
			found, err := filepath.Glob(filepath.Join(b.Data, "images", "images", "*.json"))
			if err != nil {
				return err
			}
			for _, f := range found {
				if raw, err := os.ReadFile(f); err == nil && strings.Contains(string(raw), `"temporary"`) {
					return fmt.Errorf("%s is there", f)
				}
			}
			return nil
		})
	}
	if err := sb.Delete(ctx); err != nil {
		t.Error(err)
	}
}
