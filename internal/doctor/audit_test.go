package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

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
	nodes, err := running(nil)
	if err != nil {
		t.Fatal(err)
	}
	group := "/sys/fs/cgroup/cpu/somewhere/" + cgroup.NameOf(data)
	test := fmt.Sprintf("/proc/%d", os.Getpid())
	for where, want := range map[string]string{
		group: data, group + "/saaaaaaaaaaaaaaaaaaaaa": data, filepath.Join(data, "scratch"): data, filepath.Join(data, "scratch.img"): data,
		filepath.Dir(data): "", data + "x/scratch": "", "": "", "/sys/fs/cgroup/cpu/dsec-00000000/s": "",
		fmt.Sprintf("/sys/fs/cgroup/pids/dsectest%d-1/s", os.Getpid()): test, "/sys/fs/cgroup/pids/dsectest99999999-1/s": "",
	} {
		if got := nodes.of(where); got != want {
			t.Errorf("%q is of %q, want %q", where, got, want)
		}
	}
	a := &Audit{Items: []Item{{Kind: "mount", Name: "a", Node: data}, {Kind: "mount", Name: "b"}}}
	if left := a.Left(); len(left) != 1 || left[0].Name != "b" {
		t.Errorf("left %v", left)
	}
	a.ours = []string{data}
	if left := a.Left(); len(left) != 2 || a.Empty() == nil {
		t.Errorf("left of a node that was asked about: %v", left)
	}
}
