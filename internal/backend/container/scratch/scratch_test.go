package scratch

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Needs root and loop devices.
func TestMountIsMadeOnceAndLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	t.Cleanup(func() {
		if err := Unmount(dir); err != nil {
			t.Error(err)
		}
	})
	point, err := Mount(t.Context(), dir, 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(point, "kept"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := Mount(t.Context(), dir, 64<<20)
	if err != nil || again != point {
		t.Fatalf("%s, %v", again, err)
	}
	f, err := os.Open(filepath.Join(point, "kept"))
	if err != nil {
		t.Fatalf("a mounted scratch was made anew: %v", err)
	}
	if err := Unmount(dir); !errors.Is(err, unix.EBUSY) {
		t.Errorf("unmounted under a user: %v", err)
	}
	f.Close()
	// Full means ENOSPC for the writer, not more disk.
	big := make([]byte, 1<<20)
	w, err := os.Create(filepath.Join(point, "big"))
	if err != nil {
		t.Fatal(err)
	}
	for range 80 {
		if _, err = w.Write(big); err != nil {
			break
		}
	}
	w.Close()
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("writing 80 MiB into 64: %v", err)
	}
	for range 2 { // there may be nothing left to remove
		if err := errors.Join(Unmount(dir), Remove(dir)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "scratch.img")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the image is left: %v", err)
	}
}

// A file system that the kernel made read-only is made anew under those who still use it.
func TestMountMakesAFailedOneAnew(t *testing.T) {
	dir := t.TempDir()
	t.Cleanup(func() {
		if err := Unmount(dir); err != nil {
			t.Error(err)
		}
	})
	point, err := Mount(t.Context(), dir, 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(point, "kept"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	user, err := os.Open(filepath.Join(point, "kept"))
	if err != nil {
		t.Fatal(err)
	}
	defer user.Close()
	if err := unix.Mount("", point, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := Mount(t.Context(), dir, 64<<20); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(point, "new"), 0o700); err != nil {
		t.Errorf("the scratch that failed is still in the way: %v", err)
	}
	if _, err := user.Read(make([]byte, 1)); err != nil {
		t.Errorf("who used the old one lost it: %v", err)
	}
	entries, err := os.ReadDir(point)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != "new" && e.Name() != "lost+found" {
			t.Errorf("left: %s", e.Name())
		}
	}
}
