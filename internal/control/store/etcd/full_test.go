package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
)

// startFull is the other process of TestStartOnAFullDisk: etcd's goroutines are left in one
// where it failed to start.
func startFull(dir string) {
	_, err := StartServer(context.Background(), dir, slog.New(slog.DiscardHandler))
	fmt.Printf("full: %v, %v\n", errors.Is(err, errs.DiskFull), err)
}

// hollowOut gives back the space that etcd's log took ahead, as a start does for a moment
// before it takes it anew.
func hollowOut(t *testing.T, wal string) {
	logs, err := filepath.Glob(filepath.Join(wal, "*.wal"))
	if err != nil || len(logs) == 0 {
		t.Fatal(logs, err)
	}
	for _, l := range logs {
		b, err := os.ReadFile(l)
		if err != nil {
			t.Fatal(err)
		}
		used := len(bytes.TrimRight(b, "\x00"))
		for _, size := range []int{used, len(b)} {
			if err := os.Truncate(l, int64(size)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Needs root: it mounts a small file system.
func TestStartOnAFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=200m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	srv, err := StartServer(t.Context(), dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	srv.Close()
	hollowOut(t, filepath.Join(dir, "etcd", "member", "wal"))
	filler, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer filler.Close()
	for block := make([]byte, 1<<20); err == nil; _, err = filler.Write(block) {
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "DSEC_TEST_FULL="+dir)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "full: true") {
		t.Errorf("%v: %s", err, out)
	}
	// And it starts when there is space again.
	if err := filler.Truncate(0); err != nil {
		t.Fatal(err)
	}
	srv, err = StartServer(t.Context(), dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	srv.Close()
}
