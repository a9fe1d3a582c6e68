package rmtree

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// chain makes a directory depth levels deep below dir, each with the files given.
func chain(t *testing.T, dir string, depth int, name string, files ...string) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for i := 0; i < depth && err == nil; i++ {
		if err = unix.Mkdirat(fd, name, 0o700); err != nil {
			break
		}
		for _, f := range files {
			var file int
			if file, err = unix.Openat(fd, f, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600); err == nil {
				unix.Close(file)
			}
		}
		next, oerr := unix.Openat(fd, name, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		unix.Close(fd)
		fd, err = next, errors.Join(err, oerr)
	}
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
}

func gone(t *testing.T, path string) {
	t.Helper()
	if err := Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("still there: %v", err)
	}
}

func TestDeepAndWide(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "x")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		sub := filepath.Join(dir, strconv.Itoa(i))
		if err := os.Mkdir(sub, 0o700); err != nil {
			t.Fatal(err)
		}
		chain(t, sub, 600, strings.Repeat("d", 200), "f", ".lifted-1") // some have the names that we use
	}
	chain(t, dir, 300, ".lifted-1")
	wide := filepath.Join(dir, "wide")
	for i := range 200 {
		if err := os.MkdirAll(filepath.Join(wide, strconv.Itoa(i), "a"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	// One descriptor a level would not do.
	few := limit
	few.Cur = 256
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Error(err)
		}
	}()
	gone(t, dir)
}

func TestOnlyTheTreeGoes(t *testing.T) {
	base := t.TempDir()
	dir, outside := filepath.Join(base, "x"), filepath.Join(base, "outside")
	for _, d := range []string{dir, outside, filepath.Join(dir, "mode0")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	keep := filepath.Join(outside, "keep")
	err := os.WriteFile(keep, nil, 0o600)
	for _, link := range []string{"l", "mode0/l"} {
		err = errors.Join(err, os.Symlink(outside, filepath.Join(dir, link)))
	}
	err = errors.Join(err, unix.Mkfifo(filepath.Join(dir, "fifo"), 0), os.Chmod(filepath.Join(dir, "mode0"), 0))
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(base, "link")
	if err := os.Symlink(outside, link); err != nil {
		t.Fatal(err)
	}
	gone(t, link)
	gone(t, dir)
	gone(t, filepath.Join(base, "never", "was"))
	if _, err := os.Lstat(keep); err != nil {
		t.Errorf("followed a link: %v", err)
	}
}

func TestAMountIsNotEntered(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	base := t.TempDir()
	outside, dir := filepath.Join(base, "outside"), filepath.Join(base, "x")
	at := filepath.Join(dir, "a", "mnt")
	if err := errors.Join(os.Mkdir(outside, 0o700), os.MkdirAll(at, 0o700)); err != nil {
		t.Fatal(err)
	}
	keep, other := filepath.Join(outside, "keep"), filepath.Join(dir, "zzz")
	if err := errors.Join(os.WriteFile(keep, nil, 0o600), os.WriteFile(other, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(outside, at, "", unix.MS_BIND, ""); err != nil { // the same device
		t.Fatal(err)
	}
	err := Remove(dir)
	if uerr := unix.Unmount(at, 0); uerr != nil {
		t.Fatal(uerr)
	}
	if err == nil || len(err.Error()) > 500 {
		t.Errorf("a tree with a mount: %v", err)
	}
	if _, err := os.Lstat(keep); err != nil {
		t.Errorf("entered a mount: %v", err)
	}
	if _, err := os.Lstat(other); err == nil {
		t.Error("the mount kept the rest")
	}
	gone(t, dir)
}
