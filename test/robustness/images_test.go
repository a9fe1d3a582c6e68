package robustness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

// content makes a directory of an image: busybox and a file that says n over and over.
func content(t *testing.T, n int) string {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Skip("needs busybox-static: ", err)
	}
	root := t.TempDir()
	for _, d := range []string{"bin", "proc", "sys", "dev", "tmp", "etc"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, p := range map[string][]byte{"bin/busybox": busybox, "bin/sh": busybox, "data": bytes.Repeat(fmt.Appendf(nil, "%07d\n", n), 50_000)} {
		if err := os.WriteFile(filepath.Join(root, name), p, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// Images are imported, replaced, removed, evicted and used, snapshots made and removed, and garbage is collected, all
// at once. Whatever a sandbox begins with is whole, refusals are those of images that are gone or in use, and at
// the end what the catalogue has can be had from the object store alone.
func TestImagesAreUsedRemovedAndCollectedAtOnce(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	const versions, long = 4, 6 * time.Second
	var dirs []string
	for n := range versions {
		dirs = append(dirs, content(t, n))
	}
	if _, err := c.ImportPath(t.Context(), "kept", content(t, versions), client.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	source := b.Sandbox(t, c, client.Spec{Image: "kept"})
	end := time.Now().Add(long)
	var all sync.WaitGroup
	loop := func(what string, most int, f func(ctx context.Context, n int) error, fine ...error) {
		all.Go(func() {
			done := 0
			more := func() bool { // on a busy machine, until it was done once
				return time.Now().Before(end) || done == 0 && time.Now().Before(end.Add(bed.Patience))
			}
			for n := 0; n < most && more() && !t.Failed(); n++ {
				ctx, cancel := context.WithTimeout(t.Context(), bed.Patience)
				err := f(ctx, n)
				cancel()
				ok := err == nil
				for _, e := range fine {
					ok = ok || errors.Is(err, e)
				}
				if err == nil {
					done++
				}
				if !ok {
					t.Errorf("%s: %v", what, err)
				}
			}
			t.Logf("%s: %d times", what, done)
			if done == 0 {
				t.Errorf("%s: not once", what)
			}
		})
	}
	// whole reads a sandbox's file, which is of one version, and removes the sandbox.
	whole := func(ctx context.Context, image string) error {
		sb, err := c.Create(ctx, client.Spec{Image: image})
		if err != nil {
			return err
		}
		p, err := sb.ReadFile(ctx, "/data")
		if err == nil && (len(p) != 8*50_000 || len(bytes.ReplaceAll(p, p[:8], nil)) != 0) {
			err = fmt.Errorf("a sandbox of %s has %d bytes that begin with %q", image, len(p), p[:min(8, len(p))])
		}
		if err != nil { // not one of those that are fine
			err = fmt.Errorf("read: %v", err)
		}
		return errors.Join(err, sb.Delete(ctx))
	}
	for range 2 {
		loop("create", 1000, func(ctx context.Context, _ int) error { return whole(ctx, "changing") }, errs.ImageNotFound)
	}
	loop("import", 1000, func(ctx context.Context, n int) error {
		_, err := c.ImportPath(ctx, "changing", dirs[n%versions], client.ImportOptions{})
		return err
	})
	loop("remove", 1000, func(ctx context.Context, _ int) error {
		time.Sleep(10 * time.Millisecond) // else it is hardly ever there
		return c.DeleteImage(ctx, "changing")
	}, errs.ImageNotFound, errs.ImageInUse)
	loop("evict", 1000, func(ctx context.Context, _ int) error {
		time.Sleep(20 * time.Millisecond)
		_, err := c.EvictImage(ctx, "changing", "")
		return err
	}, errs.ImageNotFound)
	loop("collect", 1000, func(ctx context.Context, _ int) error {
		_, err := c.CollectImages(ctx, 0, nil)
		return err
	})
	sums := map[string]string{}
	loop("snapshot", 30, func(ctx context.Context, n int) error {
		// Changed as a whole, so that every snapshot has chunks of its own.
		res, err := source.Run(ctx, "sh", "-euc", "busybox head -c 300000 /dev/urandom >/new; busybox sha256sum /new")
		if err != nil || res.Code != 0 {
			return fmt.Errorf("write: %+v, %v", res, err)
		}
		name := fmt.Sprintf("kept-%d", n)
		if _, err := source.Snapshot(ctx, name, client.SnapshotOptions{}); err != nil {
			return err
		}
		sums["snap:"+name] = string(res.Stdout)
		return whole(ctx, "snap:"+name)
	})
	all.Wait()
	if t.Failed() {
		return
	}
	bed.Remove(t, source)
	// Nothing is on the node, and nothing was deleted that is needed.
	b.Must(t, "image", "gc", "--grace", "0")
	b.Must(t, "down", "--data", b.Data, "--keep")
	if err := os.RemoveAll(filepath.Join(b.Data, "images")); err != nil {
		t.Fatal(err)
	}
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	c = b.Client(t)
	for name, sum := range sums {
		sb := b.Sandbox(t, c, client.Spec{Image: name})
		if res, err := sb.Run(t.Context(), "busybox", "sha256sum", "/new"); err != nil || string(res.Stdout) != sum {
			t.Errorf("%s has %+v, want %s, %v", name, res, sum, err)
		}
		bed.Remove(t, sb)
	}
	images, err := c.Images(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, img := range images {
		if img.Name == "changing" {
			if err := whole(t.Context(), img.Name); err != nil {
				t.Error(err)
			}
		}
	}
	if len(sums) == 0 || strings.TrimSpace(b.Must(t, "snapshot", "ls", "-q")) == "" {
		t.Error("no snapshots were left")
	}
}
