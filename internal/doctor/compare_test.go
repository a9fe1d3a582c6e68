package doctor

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestCompare(t *testing.T) {
	t.Parallel()
	before := &Audit{Owners: map[Owner]map[string]int{OfServer: {"process": 2, "fd socket": 9}, Leak: {}}}
	file := filepath.Join(t.TempDir(), "before.json")
	if err := before.Save(file); err != nil {
		t.Fatal(err)
	}
	before, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	now := &Audit{Owners: map[Owner]map[string]int{
		OfServer: {"process": 2, "fd socket": 7}, OfOthers: {"process": 70}, Leak: {"mount": 1},
		OfSandboxes: {"process": 1, "cgroup": 3},
	}}
	want := []Growth{{Leak, "mount", 0, 1}, {OfSandboxes, "cgroup", 0, 3}, {OfSandboxes, "process", 0, 1}}
	if got := now.Compare(before); !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
	if got := before.Compare(before); len(got) != 0 {
		t.Errorf("against itself: %+v", got)
	}
	if err := os.WriteFile(file, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(file); err == nil {
		t.Error("a file without counts was taken for an audit")
	}
}
