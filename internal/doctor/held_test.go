package doctor

import (
	"os"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func TestKindsOfDescriptors(t *testing.T) {
	t.Parallel()
	for what, want := range map[string]string{
		"/var/lib/x": "fd file", "/dev/null": "fd file", "socket:[1]": "fd socket", "pipe:[2]": "fd pipe",
		"anon_inode:[pidfd]": "fd pidfd", "pidfd:[3]": "fd pidfd", "anon_inode:[eventfd]": "fd eventfd",
		"anon_inode:[eventpoll]": "fd epoll", "anon_inode:bpf-prog": "fd bpf", "anon_inode:bpf_link": "fd bpf",
		"anon_inode:bpf-map": "fd bpf", "anon_inode:[fanotify]": "fd other",
	} {
		if got := kindOf(what); got != want || !slices.Contains(Kinds, got) {
			t.Errorf("%s is a %s, want %s", what, got, want)
		}
	}
	self := strconv.Itoa(os.Getpid())
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if kinds := kindsOf(self); kinds["fd pidfd"] < 1 || threads(self) < 1 {
		t.Errorf("of this process: %v, %d threads", kinds, threads(self))
	}
}

func TestSwapFiles(t *testing.T) {
	t.Parallel()
	list := "Filename\tType\tSize\tUsed\tPriority\n" +
		"/dev/zram0      partition 100 0 100\n/srv/a\\040b/swap/dsec.swap     file 100 0 10\n/srv/c/dsec.swap\\040(deleted) file 1 0 1\n"
	if got, want := swapFiles(list), []string{"/srv/a b/swap/dsec.swap", "/srv/c/dsec.swap"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
