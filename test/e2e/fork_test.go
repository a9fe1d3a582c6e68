package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

// stored counts the images of snapshots of a sandbox that the node has, with a name or without.
func stored(t *testing.T, source string) (n int) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(shared.Data, "images", "images", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(strings.ReplaceAll(string(b), `: "`, `:"`), `"source":"`+source+`"`) { // else it went meanwhile
			n++
		}
	}
	return n
}

// Children begin with the source's files and are nobody but themselves; what they share goes
// with the last of them.
func TestFork(t *testing.T) {
	t.Parallel()
	id := begin(t, "--env", "WHO=source", "--hostname", "origin", "--label", "fork=of", "--memory", "300m", "--qos", "be", "--priority", "3", "--idle-ttl", "1h", "--on-idle", "pause", bed.Image)
	sh(t, id, "echo shared >/file; echo secret >/key")
	shared.Must(t, "exec", "--detach", "--tag", "clock", id, "--", "sh", "-c", "while :; do echo x >>/clock; usleep 1000; done")
	sh(t, id, "until test -s /clock; do usleep 1000; done")
	out := shared.Must(t, "fork", "--count", "6", "--json", "--leave-out", "/key", id)
	children := bed.Lines[v1.Sandbox](t, out)
	if len(children) != 6 {
		t.Fatalf("%d children:\n%s", len(children), out)
	}
	if n := stored(t, id); n != 1 {
		t.Errorf("%d images of the fork, want 1", n)
	}
	first := sh(t, id, "wc -c </clock")
	machines := map[string]bool{sh(t, id, "cat /etc/machine-id"): true}
	for _, c := range children {
		if c.ForkOf != id || c.Spec.MemoryBytes != 300<<20 || c.Spec.Labels["fork"] != "of" ||
			c.Spec.QoS != v1.QoSBest || c.Spec.Priority != 3 || c.Spec.IdleTTL != 3600 || c.Spec.OnIdle != v1.OnIdlePause {
			t.Errorf("child %+v", c)
		}
		got := strings.Split(sh(t, c.ID, "cat /etc/machine-id /file; hostname; echo $WHO; ls /key 2>/dev/null || ls /clock"), "\n")
		if want := []string{"shared", c.ID, "source", "/clock"}; machines[got[0]] || !slices.Equal(got[1:5], want) {
			t.Errorf("child %s: %q, want %q", c.ID, got, want)
		}
		machines[got[0]] = true
		sh(t, c.ID, "echo "+c.ID+" >/file")
	}
	if now := sh(t, id, "sleep 0.05; wc -c </clock"); now == first {
		t.Errorf("the source stands still: %q", now)
	}
	if got := sh(t, id, "cat /file /key"); got != "shared\nsecret" {
		t.Errorf("the source has %q", got)
	}
	for _, c := range children {
		if got := sh(t, c.ID, "cat /file"); got != c.ID {
			t.Errorf("child %s has another's file: %q", c.ID, got)
		}
	}

	// A child's snapshot outlives the fork, and needs no more than what is named.
	name := snap(t, children[0].ID, strings.ToLower(t.Name()))
	for i, c := range children {
		if n := stored(t, id); n != 1 {
			t.Errorf("%d images of the fork before the end of child %d, want 1", n, i)
		}
		shared.Must(t, "rm", c.ID)
	}
	if n := stored(t, id); n != 0 {
		t.Errorf("%d images of the fork after the last child's end", n)
	}
	again := begin(t, name)
	if got := sh(t, again, "cat /file; ls /key 2>/dev/null || true"); got != children[0].ID {
		t.Errorf("of a child's snapshot: %q", got)
	}
	shared.Must(t, "rm", again)
	shared.Must(t, "snapshot", "rm", name)

	shared.Fails(t, 2, "", "fork", "--count", "0", id)
	shared.Fails(t, 1, "sandbox_not_found", "fork", "nosuchsandbox")
	hollow := begin(t, "--backend", "hollow")
	shared.Fails(t, 1, "not_supported", "fork", hollow)
	shared.Fails(t, 1, "not_supported", "snapshot", hollow)
}
