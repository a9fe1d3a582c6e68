package e2e

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/internal/backend/container/cgroup"
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

// The audit tells the server's own from what belongs to sandboxes, to other nodes that run
// and to nobody. Other tests may leave nodes dead for a while, whose things are not looked at.
func TestAuditTellsWhoseThingsAre(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	id := b.Must(t, "create", bed.Image)
	b.Must(t, "rm", id)
	type item struct{ Kind, Name, Sandbox, Node, Owner string }
	type report struct {
		Owners map[string]map[string]int
		Leaks  []item
	}
	audit := func(data string, more ...string) report {
		t.Helper()
		r := b.CLI(t, append([]string{"doctor", "--audit", "--json", "--data", data}, more...)...)
		var rep report
		if err := json.Unmarshal([]byte(r.Stdout), &rep); err != nil || (r.Code == 1) != (len(rep.Leaks) > 0) || r.Code > 1 {
			t.Fatalf("%v, exit code %d: %s%s", err, r.Code, r.Stdout, r.Stderr)
		}
		rep.Leaks = slices.DeleteFunc(rep.Leaks, func(i item) bool {
			ours := strings.HasPrefix(i.Sandbox, id[:1+v1.NodeIDLen]) || strings.Contains(i.Name, b.Data+"/") || filepath.Base(i.Name) == cgroup.NameOf(b.Data)
			return !ours
		})
		return rep
	}
	elsewhere := filepath.Join(t.TempDir(), "context.json")
	if err := os.WriteFile(elsewhere, []byte(`{"url":"http://127.0.0.1:1","token":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	idle := audit(b.Data)
	if own := idle.Owners["server"]; own["cgroup"] == 0 || own["process"] != 0 || len(idle.Owners["sandboxes"]) != 0 || len(idle.Leaks) != 0 {
		t.Errorf("an idle server: %+v", idle)
	}
	if idle.Owners["others"]["cgroup"] == 0 { // the one that the other tests share
		t.Errorf("no other node was seen: %+v", idle)
	}
	id = b.Must(t, "create", bed.Image)
	// Whatever server the context file names, the data directory's own is asked.
	busy := audit(b.Data, "--context", elsewhere)
	for kind, n := range map[string]int{"process": 1, "socket": 1, "directory": 1, "namespace": 7} {
		if got := busy.Owners["sandboxes"][kind]; got != n {
			t.Errorf("%d %s of a sandbox, want %d", got, kind, n)
		}
	}
	if leaks := audit(shared.Data).Leaks; len(busy.Leaks)+len(leaks) != 0 {
		t.Errorf("leaks: %+v; asked by another node: %+v", busy.Leaks, leaks)
	}
	b.Must(t, "rm", id)
	if now := audit(b.Data); !maps.Equal(now.Owners["server"], idle.Owners["server"]) || len(now.Owners["sandboxes"]) != 0 {
		t.Errorf("after the removal: %+v, before: %+v", now, idle)
	}
	text := b.CLI(t, "doctor", "--audit", "--data", b.Data).Stdout
	if !strings.HasPrefix(text, "KIND ") || !regexp.MustCompile(`(?m)^process +0 +0 `).MatchString(text) || !strings.Contains(text, "OTHERS") {
		t.Errorf("%s", text)
	}
	// A directory of a sandbox that the server removed long ago.
	stray := filepath.Join(b.Data, "hollow", id)
	if err := os.WriteFile(stray, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if leaks := audit(b.Data).Leaks; len(leaks) != 1 || leaks[0].Name != stray || leaks[0].Owner != "leaks" {
		t.Errorf("%+v", leaks)
	}
	if err := os.Remove(stray); err != nil {
		t.Fatal(err)
	}
	// What a node leaves that does not run any more is a leak, whoever asks.
	id = b.Must(t, "create", bed.Image)
	b.Kill(t)
	for _, data := range []string{b.Data, shared.Data} {
		if leaks := audit(data).Leaks; !slices.ContainsFunc(leaks, func(i item) bool { return i.Kind == "process" && i.Sandbox == id }) {
			t.Errorf("of a dead node, asked on %s: %+v", data, leaks)
		}
	}
	b.Must(t, "down", "--data", b.Data)
	if leaks := audit(b.Data).Leaks; len(leaks) != 0 {
		t.Errorf("after 'dsec down': %+v", leaks)
	}
}
