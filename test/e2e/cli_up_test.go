package e2e

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"dsec/test/bed"
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

// The audit tells the server's own from what belongs to sandboxes and from leaks.
func TestAuditTellsWhoseThingsAre(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	type report struct {
		Owners map[string]map[string]int
		Leaks  []struct{ Kind, Name, Sandbox, Owner string }
	}
	audit := func(code int) report {
		t.Helper()
		r := b.CLI(t, "doctor", "--audit", "--json", "--data", b.Data)
		var rep report
		if err := json.Unmarshal([]byte(r.Stdout), &rep); err != nil || r.Code != code {
			t.Fatalf("%v, exit code %d: %s%s", err, r.Code, r.Stdout, r.Stderr)
		}
		return rep
	}
	elsewhere := filepath.Join(t.TempDir(), "context.json")
	if err := os.WriteFile(elsewhere, []byte(`{"url":"http://127.0.0.1:1","token":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	idle := audit(0)
	if own := idle.Owners["server"]; own["cgroup"] == 0 || own["process"] != 0 || len(idle.Owners["sandboxes"]) != 0 {
		t.Errorf("an idle server: %+v", idle)
	}
	id := b.Must(t, "create", bed.Image)
	// Whatever server the context file names, the data directory's own is asked.
	b.Must(t, "doctor", "--audit", "--data", b.Data, "--context", elsewhere)
	for kind, n := range map[string]int{"process": 1, "socket": 1, "directory": 1, "namespace": 7} {
		if got := audit(0).Owners["sandboxes"][kind]; got != n {
			t.Errorf("%d %s of a sandbox, want %d", got, kind, n)
		}
	}
	b.Must(t, "rm", id)
	if busy := audit(0); !maps.Equal(busy.Owners["server"], idle.Owners["server"]) || len(busy.Owners["sandboxes"]) != 0 {
		t.Errorf("after the removal: %+v, before: %+v", busy, idle)
	}
	text := b.Must(t, "doctor", "--audit", "--data", b.Data)
	if !strings.HasPrefix(text, "KIND ") || !regexp.MustCompile(`(?m)^process +0 +0 +0`).MatchString(text) {
		t.Errorf("%s", text)
	}
	// A directory of a sandbox that the server removed long ago.
	stray := filepath.Join(b.Data, "hollow", id)
	if err := os.WriteFile(stray, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if leaks := audit(1).Leaks; len(leaks) != 1 || leaks[0].Name != stray || leaks[0].Owner != "leaks" {
		t.Errorf("%+v", leaks)
	}
	if err := os.Remove(stray); err != nil {
		t.Fatal(err)
	}
}
