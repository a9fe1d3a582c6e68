package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/internal/backend/container/cgroup"
	"dsec/test/bed"
)

// The example of a recipe with steps does what it says.
func TestRecipeWithSteps(t *testing.T) {
	t.Parallel()
	shared.Must(t, "image", "build", "with-steps", "-f", "../../images/with-steps/recipe.yaml")
	defer shared.Must(t, "image", "rm", "with-steps")
	if out := shared.Must(t, "run", "with-steps", "--", "greet"); out != "hello from the recipe" {
		t.Errorf("%q", out)
	}
	if out := shared.Must(t, "run", "with-steps", "--", "sh", "-c", "id -un; pwd; ls -ln greeting"); !strings.HasPrefix(out, "agent\n/srv/data\n-rw-r--r--    1 1000     1000 ") {
		t.Errorf("%q", out)
	}
	bad := filepath.Join(t.TempDir(), "recipe.yaml")
	for text, code := range map[string]string{
		"from: scratch\nfrum: x\n": "bad_request", "from: busybox\nsteps: [{run: ls /none}]\n": "build_failed", "from: no-such-image\n": "image_not_found", "from: with-steps\npackages: [git]\n": "bad_request",
	} {
		if err := os.WriteFile(bad, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		shared.Fails(t, 1, code, "image", "build", "bad", "-f", bad)
	}
}

// A recipe may build upon any image: what it says stays unless the recipe says otherwise,
// and so do owners, modes, links and attributes.
func TestRecipeUponAnImage(t *testing.T) {
	t.Parallel()
	recipe := func(text string) string {
		file := filepath.Join(t.TempDir(), "recipe.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	shared.Must(t, "image", "build", "--steps", "host", "upon/base:1", "-f", recipe(`
from: busybox
steps:
  - run: mkdir -p /data && echo one > /data/f && ln /data/f /data/hard && ln -s f /data/soft && chown 12:34 /data/f && chmod 4711 /data/f && mknod /data/null c 1 3
env: {A: base, B: base}
user: "12"
workdir: /data
labels: {of: base}
`))
	defer shared.Must(t, "image", "rm", "upon/base:1")
	digest := bed.JSON[v1.Image](t, shared, "image", "inspect", "--json", "upon/base:1").Digest
	for i, from := range []string{"upon/base:1", digest} {
		name := fmt.Sprintf("upon/%d", i)
		img := bed.JSON[v1.Image](t, shared, "image", "build", "--json", name, "-f", recipe("from: "+from+"\nsteps: [{run: 'echo $A > /data/two'}]\nenv: {B: mine}\n"))
		defer shared.Must(t, "image", "rm", name)
		if !slices.Equal(img.Config.Env, []string{"A=base", "B=mine"}) || img.Config.User != "12" || img.Config.WorkDir != "/data" || img.Config.Labels["of"] != "base" {
			t.Errorf("%+v", img.Config)
		}
		out := shared.Must(t, "run", name, "--", "sh", "-c", "cat two f; id -u; stat -c '%u:%g %a %h' f; readlink soft; stat -c %F null; echo $A $B")
		if out != "base\none\n12\n12:34 4711 2\nf\ncharacter special file\nbase mine" {
			t.Errorf("from %s: %q", from, out)
		}
	}
	// The files alone.
	out := filepath.Join(t.TempDir(), "files.tar")
	shared.Must(t, "image", "export", "upon/base:1", "-o", out)
	list, err := exec.Command("tar", "tf", out).Output()
	if err != nil || !strings.Contains(string(list), "data/hard\n") {
		t.Errorf("the export: %v, %d bytes", err, len(list))
	}
	if r := shared.CLI(t, "image", "export", "upon/base:1"); r.Code != 0 || len(r.Stdout) < 1<<20 {
		t.Errorf("to stdout: exit code %d, %d bytes, %s", r.Code, len(r.Stdout), r.Stderr)
	}
	shared.Fails(t, 1, "image_not_found", "image", "export", "none", "-o", out+".none")
	if _, err := os.Stat(out + ".none"); err == nil {
		t.Error("an export that failed left a file")
	}
}

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
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// A server that cannot start leaves nothing in a new data directory.
func TestRefusedUpLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{nil, {"--detach"}} {
		dir := t.TempDir()
		shared.Fails(t, 1, "address_in_use", append([]string{"up", "--data", dir + "/new", "--listen", "unix:" + shared.Sock}, flags...)...)
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("up %v left %v, %v", flags, left, err)
		}
	}
	old := t.TempDir()
	if err := os.WriteFile(old+"/mine", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	shared.Fails(t, 1, "address_in_use", "up", "--data", old, "--listen", "unix:"+shared.Sock)
	if left, err := os.ReadDir(old); err != nil || len(left) != 1 || left[0].Name() != "mine" {
		t.Errorf("left %v, %v", left, err)
	}
}

// Without --data, the verbs of this machine are about the server that all others use.
func TestDownAndDoctorFollowTheContext(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	file := filepath.Join(b.Dir, "config", "dsec", "context.json")
	id := b.Must(t, "create", bed.Image)
	var report struct {
		Items []struct{ Kind, Sandbox, Owner string }
	}
	r := b.CLI(t, "doctor", "--audit", "--json")
	if err := json.Unmarshal([]byte(r.Stdout), &report); err != nil {
		t.Fatalf("%v: %s%s", err, r.Stdout, r.Stderr)
	}
	known := false
	for _, i := range report.Items {
		known = known || i.Kind == "process" && i.Sandbox == id && i.Owner == "sandboxes"
	}
	if !known {
		t.Errorf("the audit does not know the server's sandbox: %s", r.Stdout)
	}
	if out := b.Must(t, "doctor", "--json"); !strings.Contains(out, "file system of "+b.Data) {
		t.Errorf("doctor: %s", out)
	}
	b.Kill(t)
	r = b.CLI(t, "doctor", "--audit")
	for _, next := range []string{"'dsec up --data " + b.Data + "' adopts", "'dsec down --data " + b.Data + "' removes"} {
		if r.Code != 1 || !strings.Contains(r.Stderr, next) {
			t.Errorf("the audit of a dead server does not say %q: %s", next, r.Stderr)
		}
	}
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	out := b.Must(t, "down")
	if out != "stopped the server of "+b.Data+"; removed 1 sandbox" {
		t.Errorf("%s", out)
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("the context file still names a server that is no more: %v", err)
	}
	// What the file says of another server stays, and is not guessed to be the default's.
	other := filepath.Join(t.TempDir(), "context.json")
	if err := os.WriteFile(other, []byte(`{"url":"http://127.0.0.1:1","token":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := b.Fails(t, 2, "", "down", "--context", other); !strings.Contains(r.Stderr, "--data DIR") {
		t.Errorf("%s", r.Stderr)
	}
	b.Must(t, "down", "--context", other, "--data", b.Data)
	if _, err := os.Stat(other); err != nil {
		t.Error(err)
	}
}

// Whoever is not root is told so, by every way to run a node.
func TestNodeNeedsRoot(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(filepath.Dir(dir), 0o755)); err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "dsec")
	// By a process of its own: had this one the file open to write, a command that another test starts just then
	// would have it too, and nothing could execute it.
	if out, err := exec.CommandContext(t.Context(), "install", "-m", "755", shared.Bin, bin).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, args := range [][]string{{"up"}, {"up", "--detach"}, {"down"}} {
		cmd := exec.CommandContext(t.Context(), bin, append(args, "--data", dir+"/data")...)
		cmd.Env, cmd.Dir = []string{"HOME=/nonexistent"}, "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "next:  run this as root") {
			t.Errorf("%v: %v: %s", args, err, out)
		}
	}
}

// A context file that cannot be used says why and what to do.
func TestBadContextFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "context.json")
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, path + ".none", t.TempDir()} {
		if r := shared.Fails(t, 1, "local_file", "ls", "--context", p); !strings.Contains(r.Stderr, p) || !strings.Contains(r.Stderr, "next: ") {
			t.Errorf("%s", r.Stderr)
		}
	}
}

// A server on every address says so, and names one that can be used.
func TestUpOnTheNetworkWithoutTLS(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true, Flags: []string{"--listen", "0.0.0.0:0", "--insecure"}})
	if !strings.Contains(b.Log(), "WARNING: 0.0.0.0:0 is open to the network") {
		t.Errorf("no warning: %s", b.Log())
	}
	v := bed.JSON[struct{ URL string }](t, b, "version", "--json")
	if !strings.HasPrefix(v.URL, "http://127.0.0.1:") {
		t.Errorf("it answers at %s", v.URL)
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
			ours := strings.HasPrefix(i.Sandbox, id[:1+v1.NodeIDLen]) || strings.Contains(i.Name, b.Data+"/") || strings.HasPrefix(filepath.Base(i.Name), cgroup.NameOf(b.Data))
			return !ours
		})
		return rep
	}
	// What the kernel still takes down is no leak: a loop device goes with the last copy of
	// its mount, which a sandbox that another node makes may have for a moment.
	none := func(when, data string) {
		t.Helper()
		for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(50 * time.Millisecond) {
			leaks := audit(data).Leaks
			if len(leaks) == 0 {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("%s: leaks: %+v", when, leaks)
				return
			}
		}
	}
	elsewhere := filepath.Join(t.TempDir(), "context.json")
	if err := os.WriteFile(elsewhere, []byte(`{"url":"http://127.0.0.1:1","token":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	idle := audit(b.Data)
	if own := idle.Owners["server"]; own["cgroup"] == 0 || own["process"] != 3 || len(idle.Owners["sandboxes"]) != 0 || len(idle.Leaks) != 0 {
		t.Errorf("an idle server, which has two keepers: %+v", idle)
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
	if len(busy.Leaks) != 0 {
		t.Errorf("leaks: %+v", busy.Leaks)
	}
	none("asked by another node", shared.Data)
	b.Must(t, "rm", id)
	lasting := func(r report) map[string]int { // threads and descriptors come and go with the work
		own := maps.Clone(r.Owners["server"])
		maps.DeleteFunc(own, func(kind string, _ int) bool { return kind == "thread" || strings.HasPrefix(kind, "fd ") })
		return own
	}
	if now := audit(b.Data); !maps.Equal(lasting(now), lasting(idle)) || len(now.Owners["sandboxes"]) != 0 {
		t.Errorf("after the removal: %+v, before: %+v", now, idle)
	}
	text := b.CLI(t, "doctor", "--audit", "--data", b.Data).Stdout
	if !strings.HasPrefix(text, "KIND ") || !regexp.MustCompile(`(?m)^process +3 +0 `).MatchString(text) || !strings.Contains(text, "OTHERS") {
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
	none("after 'dsec down'", b.Data)
}
