package robustness

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/client"
	"dsec/test/bed"
)

// The server is killed at random moments of a collapse. The image then has its old layers or the new
// ones, shows the same with either, and is collapsed in the end; a snapshot that is made on it
// meanwhile is whole.
func TestKilledWhileItCollapses(t *testing.T) {
	t.Parallel()
	random := bed.Random(t)
	b := bed.New(t, bed.Options{})
	ctx := t.Context()
	sb := b.Sandbox(t, b.Client(t), client.Spec{})
	sh := func(id, script string) string {
		t.Helper()
		res, err := b.Client(t).Sandbox(id).Run(ctx, "sh", "-euc", script)
		if err != nil || res.Code != 0 {
			t.Fatalf("%s: %v %+v", script, err, res)
		}
		return string(res.Stdout)
	}
	const look = "cd /d; find . | sort; cat $(find . -type f | sort) | sha256sum"
	const steps = 12
	var want []string // what each snapshot shows
	for n := range steps {
		sh(sb.ID(), fmt.Sprintf("mkdir -p /d/%[1]d; cd /d; for i in 1 2 3 4 5; do head -c 300000 /dev/urandom >%[1]d/$i; done; rm -rf ./$((%[1]d-2)); echo %[1]d >n", n))
		if _, err := sb.Snapshot(ctx, fmt.Sprint("step", n), client.SnapshotOptions{}); err != nil {
			t.Fatal(err)
		}
		want = append(want, sh(sb.ID(), look))
	}
	collapse := func(ctx context.Context, n int, progress func(v1.ImageProgress)) (*client.Image, error) {
		return b.Client(t).CollapseImage(ctx, fmt.Sprint("snap:step", n), client.CollapseOptions{Below: 64 << 20, Progress: progress})
	}
	shows := func(image, want string) {
		t.Helper()
		copied := b.Sandbox(t, b.Client(t), client.Spec{Image: image})
		defer bed.Remove(t, copied)
		if got := sh(copied.ID(), look); got != want {
			t.Errorf("%s shows\n%s\nwant\n%s", image, got, want)
		}
	}
	undone := 0
	for n := steps - 1; n > steps-9; n-- {
		name := fmt.Sprint("snap:step", n)
		before, err := b.Client(t).Image(ctx, name)
		if err != nil || len(before.Layers) < 3 {
			t.Fatalf("%+v, %v", before, err)
		}
		rctx, cancel := context.WithCancel(ctx)
		done, began := make(chan error, 1), make(chan struct{}, 1)
		go func() {
			_, err := collapse(rctx, n, func(v1.ImageProgress) {
				select {
				case began <- struct{}{}:
				default:
				}
			})
			done <- err
		}()
		if n%2 == 0 {
			select {
			case <-began:
			case err := <-done: // told below
				done <- err
			}
		} else {
			time.Sleep(time.Duration(random.IntN(60)) * time.Millisecond)
		}
		b.Kill(t)
		cancel()
		failed := <-done
		if err := b.Up(ctx); err != nil {
			t.Fatal(err)
		}
		img, err := b.Client(t).Image(ctx, name)
		if err != nil || img.Digest != before.Digest {
			t.Fatalf("%+v, %v", img, err)
		}
		switch is := len(img.Layers); {
		case is == 2 && len(img.Made) == len(before.Layers):
		case is == len(before.Layers) && failed != nil:
			undone++
		default:
			t.Errorf("it has %d layers of %d (%v)", is, len(before.Layers), failed)
		}
		shows(name, want[n])
		if _, err := b.Client(t).CollectImages(ctx, 0, func(v1.CollectReport) {}); err != nil {
			t.Fatal(err)
		}
		shows(name, want[n])
		made := b.Sandbox(t, b.Client(t), client.Spec{Image: name})
		snap, err := made.Snapshot(ctx, fmt.Sprint("on", n), client.SnapshotOptions{})
		if err != nil {
			t.Fatal(err)
		}
		bed.Remove(t, made)
		if _, err := collapse(ctx, n, nil); err != nil {
			t.Error(err)
		}
		shows(snap.Name, want[n])
		shows(name, want[n])
	}
	t.Logf("%d of 8 collapses were not done when the server was killed", undone)
	if undone == 0 {
		t.Error("no kill met a collapse")
	}
	if left, err := filepath.Glob(filepath.Join(b.Data, "images", "tmp", "*")); err != nil || len(left) > 0 {
		t.Errorf("work is left: %v, %v", left, err)
	}
}
