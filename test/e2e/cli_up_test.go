package e2e

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Images cannot be mounted from tmpfs, which must be said before anything is created.
func TestDataDirectoryOnTmpfsIsRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	data := dir + "/data"
	for _, flags := range [][]string{nil, {"--detach"}} {
		r := shared.Fails(t, 1, "data_unsuitable", append([]string{"up", "--data", data, "--listen", "unix:" + dir + "/api.sock"}, flags...)...)
		if !strings.Contains(r.Stderr, data+" is on tmpfs") {
			t.Errorf("up %v: %s", flags, r.Stderr)
		}
	}
	r := shared.CLI(t, "doctor", "--json", "--data", data)
	var doctor struct {
		OK       bool
		Checks   []struct{ Name, Status, Detail, Fix string }
		Backends []backendInfo
	}
	if err := json.Unmarshal([]byte(r.Stdout), &doctor); err != nil || r.Code != 1 || doctor.OK {
		t.Fatalf("%v, exit code %d: %s", err, r.Code, r.Stdout)
	}
	for _, c := range doctor.Checks {
		if bad := c.Name == "file system of "+data; bad != (c.Status == "fail") || bad && (!strings.Contains(c.Detail, "tmpfs") || c.Fix == "") {
			t.Errorf("%+v", c)
		}
	}
	for _, b := range doctor.Backends {
		if b.Name == "container" && (b.Usable || !strings.Contains(b.Detail, "tmpfs")) {
			t.Errorf("%+v", b)
		}
	}
	if left, err := os.ReadDir(data); err != nil || len(left) > 2 { // its lock and the log
		t.Errorf("left in the data directory: %v, %v", left, err)
	}
}
