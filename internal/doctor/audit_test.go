package doctor

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dsec/internal/backend/container/cgroup"
)

// Things of a node that runs are told apart from what is left of one that does not.
func TestRunningNodesAreFound(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	lock, err := os.Create(filepath.Join(data, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if nodes, err := running(nil); err != nil || nodes.of(data) != "" {
		t.Errorf("a lock that nobody holds: %v, %v", nodes, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	nodes, err := running(nil)
	if err != nil {
		t.Fatal(err)
	}
	group := "/sys/fs/cgroup/cpu/somewhere/" + cgroup.NameOf(data)
	test := fmt.Sprintf("/proc/%d", os.Getpid())
	for where, want := range map[string]string{
		group: data, group + "/saaaaaaaaaaaaaaaaaaaaa": data, group + cgroup.IdleSuffix + "/saaaaaaaaaaaaaaaaaaaaa": data, filepath.Join(data, "scratch"): data, filepath.Join(data, "scratch.img"): data,
		filepath.Dir(data): "", data + "x/scratch": "", "": "", "/sys/fs/cgroup/cpu/dsec-00000000/s": "",
		fmt.Sprintf("/sys/fs/cgroup/pids/dsectest%d-1/s", os.Getpid()): test, "/sys/fs/cgroup/pids/dsectest99999999-1/s": "",
	} {
		if got := nodes.of(where); got != want {
			t.Errorf("%q is of %q, want %q", where, got, want)
		}
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(data, link); err != nil {
		t.Fatal(err)
	}
	if cgroup.NameOf(link) != cgroup.NameOf(data) || cgroup.NameOf(link+"/gone") != cgroup.NameOf(data+"/gone") {
		t.Error("one data directory has two names")
	}
}

// A guest's socket that is on its way to its guest, or goes after it, is no leak, also where
// that takes long; one that stays is.
func TestSocketsWithoutAGuest(t *testing.T) {
	t.Parallel()
	listen := func() (l net.Listener, name string) {
		dir, err := os.MkdirTemp("", "audit") // a path that fits a socket
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		if l, err = net.Listen("unix", filepath.Join(dir, "guest.sock")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		raw, err := l.(*net.UnixListener).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if cerr := raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		return l, fmt.Sprintf("inode %d", st.Ino)
	}
	short, going := listen()
	_, stays := listen()
	time.AfterFunc(500*time.Millisecond, func() { short.Close() })
	found := map[string]string{}
	if err := sockets(func(_, name, sandbox, _ string) { found[name] = sandbox }); err != nil {
		t.Fatal(err)
	}
	if _, ok := found[going]; ok {
		t.Error("a socket that goes within half a second is a leak")
	}
	if found[stays] != "unknown" {
		t.Errorf("a socket that nobody has is not found: %q", found[stays])
	}
}

func TestOwners(t *testing.T) {
	t.Parallel()
	known := func(id string) bool { return id == "known" }
	for _, c := range []struct {
		node          Node
		sandbox, home string // of the item
		want          Owner
	}{
		{Node{Data: "/d", Known: known}, "", "/d", OfServer},
		{Node{Data: "/d", Known: known}, "known", "/d", OfSandboxes},
		{Node{Data: "/d", Known: known}, "stray", "/d", Leak},
		{Node{Data: "/d", Known: known}, "stray", "/e", OfOthers},
		{Node{Data: "/d", Known: known}, "", "/e", OfOthers},
		{Node{Data: "/d", Known: known}, "", "", Leak},
		{Node{Data: "/d", Known: known}, "unknown", "", Leak},
		{Node{Data: "/d"}, "known", "", Leak},
		{Node{}, "known", "/d", OfOthers},
		{Node{}, "known", "", Leak},
	} {
		if got := c.node.ownerOf(Item{Kind: "cgroup", Sandbox: c.sandbox, Node: c.home}); got != c.want {
			t.Errorf("%q in %q is of %s for the node of %q, want %s", c.sandbox, c.home, got, c.node.Data, c.want)
		}
	}
}
