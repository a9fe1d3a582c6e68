package e2e

import (
	"context"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

// begin creates a sandbox that is removed with the test.
func begin(t *testing.T, args ...string) string {
	t.Helper()
	id := strings.TrimSpace(shared.Must(t, append([]string{"create"}, args...)...))
	t.Cleanup(func() { shared.Run(context.Background(), nil, "rm", id) })
	return id
}

// sh runs a script in a sandbox, which must succeed.
func sh(t *testing.T, id, script string) string {
	t.Helper()
	return shared.Must(t, "exec", id, "--", "sh", "-euc", script)
}

func snap(t *testing.T, args ...string) string {
	t.Helper()
	return shared.Must(t, append([]string{"snapshot"}, args...)...)
}

// What a sandbox changed is there again in another one that is made of its snapshot, which
// runs programs as the first did and is nobody but itself.
func TestASnapshotIsAnImage(t *testing.T) {
	t.Parallel()
	label := "of=" + strings.ToLower(t.Name())
	id := begin(t, "--env", "GREETING=hello there", "--workdir", "/etc", "--label", label, bed.Image)
	sh(t, id, `mkdir -p /srv/app /srv/secret; echo one >/srv/app/a; ln /srv/app/a /srv/app/b; ln -s a /srv/app/link; chmod 640 /srv/app/a
mkfifo /srv/app/pipe; rm -rf /etc/passwd; echo key >/srv/secret/app.key; echo key >/srv/other.key; echo mine >>/etc/hosts
head -c 300000 /dev/urandom >/srv/app/big; sha256sum /srv/app/big >/srv/app/sum`)
	name := strings.ToLower(t.Name())
	if got := snap(t, "--leave-out", "*.key", id, name); got != "snap:"+name {
		t.Fatalf("printed %q", got)
	}
	if got := sh(t, id, "cat /srv/secret/app.key"); got != "key" {
		t.Errorf("the source lost what was left out: %q", got)
	}
	copied := begin(t, "--image", "snap:"+name)
	want := "/etc\nhello there\none\n640 2\na\nfifo\nremoved\n/srv/app/big: OK\n0\nmine"
	if got := sh(t, copied, `pwd; echo "$GREETING"; cd /srv; cat app/b; stat -c '%a %h' app/a; readlink app/link; test -p app/pipe && echo fifo
test -e /etc/passwd || echo removed; sha256sum -c app/sum; find /srv -name '*.key' | wc -l; grep mine /etc/hosts`); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	who := func(id string) string { return sh(t, id, "hostname; cat /etc/hostname /etc/machine-id") }
	a, b := strings.Split(who(id), "\n"), strings.Split(who(copied), "\n")
	if a[0] != id || b[0] != copied || b[1] != copied || a[2] == b[2] || len(b[2]) != 32 {
		t.Errorf("the source is %q, its copy %q", a, b)
	}
	sb := bed.JSON[v1.Sandbox](t, shared, "inspect", copied, "--json")
	if k, v, _ := strings.Cut(label, "="); sb.Spec.Labels[k] != v {
		t.Errorf("labels %v, want %s", sb.Spec.Labels, label)
	}
	img := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", name, "--json")
	if s := img.Snapshot; s == nil || s.Source != id || s.Omitted != 2 || len(img.Layers) != 2 || img.Layers[1].Kind != v1.KindDiff || img.Layers[1].View == "" {
		t.Errorf("%+v", img)
	}
	if strings.Contains(shared.Must(t, "image", "ls", "-q"), "snap:"+name) {
		t.Error("'image ls' shows snapshots")
	}

	// A copy's copy; and nothing that is needed can be removed.
	sh(t, copied, "echo two >/srv/app/a; rm /srv/app/pipe")
	second := snap(t, copied)
	if r := shared.Fails(t, 1, "image_in_use", "snapshot", "rm", name); !strings.Contains(r.Stderr, second) {
		t.Errorf("does not say what needs it: %s", r.Stderr)
	}
	shared.Must(t, "rm", copied)
	shared.Fails(t, 1, "image_in_use", "snapshot", "rm", name)
	shared.Fails(t, 1, "image_in_use", "image", "rm", bed.Image)
	third := begin(t, second)
	if got := sh(t, third, "cat /srv/app/a; ls /srv/app/pipe 2>/dev/null || echo gone"); got != "two\ngone" {
		t.Errorf("of a snapshot's snapshot: %q", got)
	}
	if r := shared.Fails(t, 1, "image_in_use", "snapshot", "rm", second); !strings.Contains(r.Stderr, third) {
		t.Errorf("does not say what needs it: %s", r.Stderr)
	}
	tree := shared.Must(t, "snapshot", "ls")
	at := strings.Index(tree, "─ snap:"+name)
	if at < 0 || !strings.Contains(strings.SplitN(tree[at:], "\n", 3)[1], "└─ "+second) {
		t.Errorf("the tree:\n%s", tree)
	}
	shared.Fails(t, 1, "name_in_use", "snapshot", id, name)
	shared.Fails(t, 1, "image_not_found", "snapshot", "inspect", "none-such")
	shared.Fails(t, 1, "sandbox_not_found", "snapshot", "nosuchsandbox")
	shared.Fails(t, 1, "bad_request", "snapshot", "--leave-out", "/", id)
	shared.Fails(t, 1, "bad_request", "image", "import", "snap:x", t.TempDir())
	shared.Must(t, "rm", third)
	shared.Must(t, "snapshot", "rm", second, name)
}

// A second snapshot of a sandbox is made on the first and has only what changed since; whatever
// was removed is gone, and nothing that was left out comes in by it.
func TestASecondSnapshotHasWhatChanged(t *testing.T) {
	t.Parallel()
	id := begin(t, bed.Image)
	sh(t, id, "mkdir /d; head -c 20000000 /dev/urandom >/d/big; sha256sum /d/big >/d/sum; echo old >/d/old; echo s >/d/x.key; sleep 0.1")
	name := func(s string) string { return strings.ToLower(t.Name()) + s }
	snap(t, id, name("1"), "--leave-out", "*.key")
	sh(t, id, "echo new >/d/new; rm /d/old; mv /d/new /d/newer; echo s >/d/y.key")
	snap(t, id, name("2"), "--leave-out", "*.key")
	one, two := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", name("1"), "--json"), bed.JSON[v1.Image](t, shared, "snapshot", "inspect", name("2"), "--json")
	if s := two.Snapshot; s.Parents[0] != one.Digest || s.Bytes > 1000 || len(two.Layers) != len(one.Layers)+1 {
		t.Errorf("the first is %+v, the second %+v", one, two)
	}
	snap(t, id, name("3"), "--leave-out", "x.key") // other patterns: on its own
	if s := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", name("3"), "--json").Snapshot; s.Parents[0] == two.Digest || s.Bytes < 20000000 {
		t.Errorf("with other patterns: %+v", s)
	}
	for n, want := range map[string]string{"1": "big old sum", "2": "big newer sum", "3": "big newer sum y.key"} {
		if got := shared.Must(t, "run", "snap:"+name(n), "--", "sh", "-ec", "cd /d; echo *; sha256sum -c sum"); got != want+"\n/d/big: OK" {
			t.Errorf("snapshot %s: %q, want %q", n, got, want)
		}
	}
	// Without the first's image the next has all again.
	shared.Must(t, "snapshot", "rm", name("3"))
	snap(t, id, name("4"))
	if s := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", name("4"), "--json").Snapshot; s.Bytes < 20000000 {
		t.Errorf("after the removal of the last: %+v", s)
	}
	shared.Must(t, "snapshot", "rm", name("4"), name("2"), name("1"))
}
