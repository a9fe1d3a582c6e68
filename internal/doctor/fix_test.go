package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFixRaisesAndNeverLowers(t *testing.T) {
	t.Parallel()
	dir := settings(t, 10)
	high, gone := Settings()[0], Settings()[2]
	if err := os.WriteFile(high.Path(dir), []byte("99999999999\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(gone.Path(dir)); err != nil {
		t.Fatal(err)
	}
	refused := Settings()[1]
	if err := os.Remove(refused.Path(dir)); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/proc/sys/kernel/ngroups_max", refused.Path(dir)); err != nil { // read-only, 65536
		t.Fatal(err)
	}
	if dry := Fix(dir, true); len(dry) != len(Settings())-2 {
		t.Errorf("a dry run tells of %d changes", len(dry))
	}
	last := Settings()[len(Settings())-1]
	if n, err := last.Value(dir); err != nil || n != 10 {
		t.Fatalf("a dry run left %d, %v", n, err)
	}
	for _, c := range Fix(dir, false) {
		if (c.Error != "") != (c.Name == refused.Name) || c.Error == "" && (c.Old != 10 || !strings.HasPrefix(c.Line, c.Name+" = ")) {
			t.Errorf("%+v", c)
		}
	}
	if n, err := last.Value(dir); err != nil || n != last.Want {
		t.Errorf("%s is %d, %v", last.Name, n, err)
	}
	if n, err := high.Value(dir); err != nil || n != 99999999999 {
		t.Errorf("%s was lowered to %d, %v", high.Name, n, err)
	}
	if _, err := os.Stat(gone.Path(dir)); !os.IsNotExist(err) {
		t.Errorf("a setting that the kernel lacks was made: %v", err)
	}
	if again := Fix(dir, false); len(again) != 1 || again[0].Name != refused.Name {
		t.Errorf("the second time: %+v", again)
	}
}

func TestPersist(t *testing.T) {
	t.Parallel()
	dir, file := settings(t, 10), filepath.Join(t.TempDir(), "sysctl.d", "90-dsec.conf")
	if changed, err := Persist(dir, file, true); err != nil || !changed {
		t.Fatalf("dry: %v, %v", changed, err)
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Fatalf("a dry run wrote: %v", err)
	}
	for i, want := range []bool{true, false} {
		if changed, err := Persist(dir, file, false); err != nil || changed != want {
			t.Fatalf("time %d: %v, %v", i, changed, err)
		}
	}
	if err := os.WriteFile(file, []byte("vm.swappiness = 5\nvm.max_map_count = 99999999\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Persist(dir, file, false); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	for _, line := range []string{"vm.swappiness = 5\n", "vm.max_map_count = 99999999\n", "kernel.pid_max = 4194304\n"} {
		if strings.Count(string(b), line) != 1 {
			t.Errorf("%v: no %q once in\n%s", err, line, b)
		}
	}
}
