package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// settings is a directory like /proc/sys with one value in each file.
func settings(t *testing.T, value int64) string {
	t.Helper()
	dir := t.TempDir()
	for _, s := range Settings() {
		if err := os.MkdirAll(filepath.Dir(s.Path(dir)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(s.Path(dir), fmt.Appendln(nil, value), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestSettings(t *testing.T) {
	t.Parallel()
	find := func(checks []Check, name string) Check {
		i := slices.IndexFunc(checks, func(c Check) bool { return c.Name == name })
		if i < 0 {
			return Check{}
		}
		return checks[i]
	}
	enough := settings(t, 1<<40)
	if err := os.Remove(filepath.Join(enough, "kernel/pty/max")); err != nil { // a kernel without it
		t.Fatal(err)
	}
	checks := checkSettings(enough, 4000)
	if len(checks) != len(Settings())-1 {
		t.Errorf("%d checks of %d settings, one of which is not there", len(checks), len(Settings()))
	}
	for _, c := range checks {
		if c.Status != OK {
			t.Errorf("enough: %+v", c)
		}
	}
	low := settings(t, 10)
	if c := find(checkSettings(low, 4000), "kernel.pid_max"); c.Status != OK || !strings.Contains(c.Detail, "raises it to 4194304") {
		t.Errorf("low, and up can raise it: %+v", c)
	}
	// Root may write any ordinary file, but not every one of the kernel.
	path := filepath.Join(low, "kernel/pid_max")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/proc/sys/kernel/ngroups_max", path); err != nil { // read-only, 65536
		t.Fatal(err)
	}
	if c := find(checkSettings(low, 4000), "kernel.pid_max"); c.Status != OK || !strings.Contains(c.Detail, "cannot be raised") {
		t.Errorf("enough for 4000, and cannot be raised: %+v", c)
	}
	if c := find(checkSettings(low, 40_000), "kernel.pid_max"); c.Status != Warn || c.Fix == "" {
		t.Errorf("too low for 40,000, and cannot be raised: %+v", c)
	}
}

func TestCorePattern(t *testing.T) {
	t.Parallel()
	for pattern, want := range map[string]Status{"core\n": OK, "/var/core.%p\n": OK, "|/usr/lib/collect %P\n": Warn, "@/run/core.socket\n": Warn} {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "kernel"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "kernel/core_pattern"), []byte(pattern), 0o600); err != nil {
			t.Fatal(err)
		}
		if c := checkCorePattern(dir); c.Status != want {
			t.Errorf("%q: %+v", pattern, c)
		}
	}
}

func TestSettingsAreDocumented(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range Settings() {
		if line := fmt.Sprintf("| `%s` | %d | %s |", s.Name, s.Want, s.Why); !strings.Contains(string(doc), line) {
			t.Errorf("docs/operations.md has no line %s", line)
		}
	}
}
