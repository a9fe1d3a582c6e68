package e2e

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

// small puts the data directory on a file system of its own.
func small(size int64) func(data string) (func() error, error) {
	return func(data string) (func() error, error) {
		image := data + ".img"
		f, err := os.Create(image)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
			return nil, err
		}
		for _, args := range [][]string{{"mkfs.ext4", "-q", "-F", "-m", "0", image}, {"mount", "-o", "loop", image, data}} {
			if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
				return nil, fmt.Errorf("%s: %w: %s", args[0], err, out)
			}
		}
		return func() error { return unix.Unmount(data, 0) }, nil
	}
}

// fill takes all the space that is left, and returns how to give it back.
func fill(t *testing.T, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for n := 1 << 20; n > 0; {
		if _, err := f.Write(make([]byte, n)); errors.Is(err, unix.ENOSPC) {
			n /= 2
		} else if err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAFullDiskIsSaidClearlyAndLeavesNothing(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{Prepare: small(256 << 20), Flags: []string{"--reserve-disk", "0"}})
	c := b.Client(t)
	sb := b.Sandbox(t, c, client.Spec{})
	stored := files(t, filepath.Join(b.Data, "images"))
	held, err := b.Held()
	if err != nil {
		t.Fatal(err)
	}
	// Noise does not compress.
	noise := func(n int64) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{1}), n) }

	// An import larger than the disk.
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "big"))
	if err == nil {
		_, err = io.Copy(f, noise(200<<20))
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.ImportPath(t.Context(), "big", dir, client.ImportOptions{}); !errors.Is(err, errs.DiskFull) {
		t.Errorf("import: %v, want disk_full", err)
	}
	if now := files(t, filepath.Join(b.Data, "images")); !maps.Equal(now, stored) {
		t.Errorf("the import left %v", now)
	}

	// A write inside a sandbox: by the file service, and by a command.
	if err := sb.Files().WriteFrom(t.Context(), "/big", noise(200<<20), client.WriteOptions{}); !errors.Is(err, errs.DiskFull) {
		t.Errorf("write a file: %v, want disk_full", err)
	}
	if err := sb.Files().Remove(t.Context(), "/big"); err != nil {
		t.Error(err)
	}

	free := fill(t, b.Data)
	res, err := sb.Run(t.Context(), "dd", "if=/dev/zero", "of=/x", "bs=1M", "count=1")
	if err != nil || res.Code == 0 {
		t.Errorf("dd on a full disk: %+v, %v", res, err)
	}
	// What works without space still works.
	if res, err := sb.Run(t.Context(), "echo", "alive"); err != nil || string(res.Stdout) != "alive\n" {
		t.Errorf("exec on a full disk: %v", err)
	}
	for range 3 {
		_, err := c.Create(t.Context(), client.Spec{Image: bed.Image})
		if e := client.ErrorOf(err); e == nil || e.Code != errs.DiskFull || !e.Infra || !e.Retryable {
			t.Errorf("create: %v, want disk_full", err)
		}
	}
	b.Fails(t, 125, "disk_full", "run", bed.Image, "--", "true")
	bed.Eventually(t, "nothing of the failed creates is left", func() error {
		now, err := b.Held()
		if err == nil && !maps.Equal(now, held) {
			err = fmt.Errorf("%v, before: %v", now, held)
		}
		return err
	})
	free()
	b.Must(t, "run", bed.Image, "--", "true")

	// A removal needs no space.
	full := b.Sandbox(t, c, client.Spec{})
	free = fill(t, b.Data)
	if err := full.Delete(t.Context()); err != nil {
		t.Errorf("remove on a full disk: %v", err)
	}
	free()
	if list, err := c.List(t.Context(), client.ListOptions{}); err != nil || len(list.Items) != 1 {
		t.Errorf("%d sandboxes, %v", len(list.Items), err)
	}
}

// Whoever filled it, a full disk must not make the next server forget what runs.
func TestARestartOnAFullDiskKeepsSandboxes(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{Prepare: small(256 << 20), Flags: []string{"--reserve-disk", "0"}})
	sb := b.Sandbox(t, b.Client(t), client.Spec{})
	if _, err := sb.Run(t.Context(), "dd", "if=/dev/zero", "of=/x", "bs=1M"); err != nil {
		t.Fatal(err)
	}
	fill(t, b.Data) // the last bytes
	b.Kill(t)
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	sb = b.Client(t).Sandbox(sb.ID())
	if res, err := sb.Run(t.Context(), "echo", "alive"); err != nil || string(res.Stdout) != "alive\n" {
		t.Errorf("after a restart on a full disk: %v, %v", res, err)
	}
	if err := sb.Delete(t.Context()); err != nil {
		t.Error(err)
	}
}

// Admission keeps the reserve: the error names the resource before anything fails.
func TestTheDiskReserveIsKept(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{Prepare: small(256 << 20), Flags: []string{"--reserve-disk", "1GiB"}})
	_, err := b.Client(t).Create(t.Context(), client.Spec{Image: bed.Image})
	if e := client.ErrorOf(err); e == nil || e.Code != errs.NodeFull || e.Details["resource"] != "free_disk" {
		t.Errorf("create: %v", err)
	}
}

// As soon as 'dsec down' is done, the disk of the data directory can be taken away. Not parallel: another
// node that makes a sandbox has a copy of all mounts for a moment.
func TestTheDiskCanBeUnmountedAfterDown(t *testing.T) {
	for range 5 {
		t.Run("", func(t *testing.T) {
			b := bed.New(t, bed.Options{Prepare: small(512 << 20), Flags: []string{"--reserve-disk", "0"}})
			c := b.Client(t)
			var last *client.Sandbox
			for range 4 {
				var err error
				if last, err = c.Create(t.Context(), client.Spec{Image: bed.Image}); err != nil {
					t.Fatal(err)
				}
				if res, err := last.Run(t.Context(), "sh", "-c", "while :; do echo x >>/x; done >/dev/null 2>&1 &"); err != nil || res.Code != 0 {
					t.Fatal(err, res)
				}
			}
			if _, err := last.Snapshot(t.Context(), "kept", client.SnapshotOptions{}); err != nil {
				t.Fatal(err)
			}
			b.Must(t, "down", "--data", b.Data)
			// The first such call only says whether it could: EAGAIN is yes.
			if err := unix.Unmount(b.Data, unix.MNT_EXPIRE); err != unix.EAGAIN {
				t.Errorf("after down: %v", err)
			}
		})
	}
}
