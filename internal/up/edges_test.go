package up

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/internal/guest/bin"
)

// The test binary is the keepers, too.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == keeperVerb {
		os.Exit(Keeper(os.Args[2:]))
	}
	os.Exit(m.Run())
}

// site is where nodes of one cluster lie that share nothing but an object store.
type site struct {
	t     *testing.T
	dir   string
	guest []byte
}

func newSite(t *testing.T) *site {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it runs real sandboxes")
	}
	guest, err := bin.Guest()
	if err != nil {
		t.Fatal(err)
	}
	// Not t.TempDir: a socket's name has room for 107 bytes.
	dir, err := os.MkdirTemp("", "dsec-up-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return &site{t: t, dir: dir, guest: guest}
}

// node is one that is ended, with all that it held, after its test's sandboxes.
func (s *site) node(name string, slots int64) *node {
	data := filepath.Join(s.dir, name)
	n := &node{metrics: prometheus.NewRegistry(), opts: Options{
		Data: data, Listen: "unix:" + filepath.Join(s.dir, "api.sock"), Guest: s.guest, Version: "test", Log: slog.New(slog.DiscardHandler),
		Slots: slots, CPUOvercommit: 100, MemoryOvercommit: 100, Objects: Objects{Store: filepath.Join(s.dir, "store")},
	}}
	if err := os.Mkdir(data, 0o700); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*stopTime)
		defer cancel()
		if err := n.stop(ctx); err != nil {
			s.t.Error(err)
		}
		if removed, err := RemoveSandboxes(ctx, data); err != nil || removed != 0 {
			s.t.Errorf("%d sandboxes were left on %s, %v", removed, name, err)
		}
	})
	return n
}

// join starts n as one more edge of to's cluster: what a server does, without a control plane of its own.
func (s *site) join(n, to *node) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*stopTime)
	defer cancel()
	var err error
	if n.lock, err = takeOver(ctx, n.opts.Data); err != nil {
		s.t.Fatal(err)
	}
	if n.objects, err = n.opts.Objects.open(ctx, n.opts.Data); err != nil {
		s.t.Fatal(err)
	}
	if err := n.startEdge(context.WithoutCancel(ctx), to.control.Store()); err != nil {
		s.t.Fatal(err)
	}
	if err := to.control.WaitEdge(ctx, 2); err != nil {
		s.t.Fatal(err)
	}
}

// remove removes a sandbox, also after the test's end; one that is gone is fine.
func (s *site) remove(sb *client.Sandbox) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := sb.Delete(ctx); err != nil && !errors.Is(err, client.ErrGone) {
		s.t.Error(err)
	}
}

// base is a directory of a base image: busybox and two files.
func base(t *testing.T) string {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Skip("needs busybox-static: ", err)
	}
	root := t.TempDir()
	for _, d := range []string{"bin", "proc", "sys", "dev", "tmp", "etc", "base"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, p := range map[string][]byte{"bin/busybox": busybox, "base/kept": []byte("kept"), "base/gone": []byte("gone")} {
		if err := os.WriteFile(filepath.Join(root, name), p, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"sh", "find", "sort", "stat", "sha256sum", "xargs", "head", "ln", "mkdir", "mv", "rm", "chown", "chmod", "mkfifo"} {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// A snapshot of a sandbox on one edge is what sandboxes on another begin with, which has nothing of it
// but the object store that both share; forks and snapshots are made of these, and restored on the first edge.
func TestASnapshotIsRestoredOnAnotherEdge(t *testing.T) {
	s := newSite(t)
	ctx := t.Context()
	first := s.node("first", 1)
	token, err := first.start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(client.Options{URL: url(first.control.Addr(), nil), Token: token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	create := func(image string, on *node) *client.Sandbox {
		t.Helper()
		sb, err := c.Create(ctx, client.Spec{Image: image})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.remove(sb) })
		if got := sb.Info().Node; got != on.edge.ID() {
			t.Fatalf("%s of %s runs on node %s, want %s", sb.ID(), image, got, on.edge.ID())
		}
		return sb
	}
	run := func(sb *client.Sandbox, script string) string {
		t.Helper()
		res, err := sb.Run(ctx, "sh", "-euc", script)
		if err != nil || res.Code != 0 {
			t.Fatalf("%s: %v %+v", script, err, res)
		}
		return string(res.Stdout)
	}
	const look = "cd /; find w base ! -type d | sort | xargs stat -c '%n %F %a %u:%g %Y %s'; find w base -type d | sort | xargs stat -c '%n %a'; find w base -type f | sort | xargs sha256sum"
	same := func(sb *client.Sandbox, want string) {
		t.Helper()
		if got := run(sb, look); got != want {
			t.Errorf("%s shows\n%s\nwant\n%s", sb.ID(), got, want)
		}
	}

	if _, err := c.ImportPath(ctx, "base", base(t), client.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	source := create("base", first)
	run(source, `mkdir -p /w/deep; head -c 3000000 /dev/urandom >/w/big; echo x >/w/file; ln /w/file /w/deep/link; mkfifo /w/pipe
chmod 4751 /w/big; chown 7:8 /w/file; rm /base/gone; mv /base/kept /base/renamed; echo key >/secret`)
	want := run(source, look)
	one, err := source.Snapshot(ctx, "one", client.SnapshotOptions{LeaveOut: []string{"/secret"}})
	if err != nil {
		t.Fatal(err)
	}

	// Full is the first edge, and the second new.
	second := s.node("second", 3)
	s.join(second, first)
	restored := create(one.Name, second)
	same(restored, want)
	if res, err := restored.Run(ctx, "sh", "-c", "test -e /secret"); err != nil || res.Code != 1 {
		t.Errorf("what was left out is there: %+v, %v", res, err)
	}
	info, err := restored.Get(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var fetched int64
	for i, l := range info.Layers {
		if l.MetaDigest != one.Layers[i].MetaDigest {
			t.Errorf("layer %d is %s there, %s in the snapshot", i, l.MetaDigest, one.Layers[i].MetaDigest)
		}
		fetched += l.FetchedBytes
	}
	if len(info.Layers) != len(one.Layers) || fetched < 3000000 {
		t.Errorf("%d bytes were fetched of %+v", fetched, info.Layers)
	}

	run(restored, "echo more >/w/more; rm /w/pipe")
	want = run(restored, look)
	var children []*client.Sandbox
	for child, err := range restored.Fork(ctx, 2, client.ForkOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.remove(child) })
		if got := child.Info().Node; got != second.edge.ID() {
			t.Errorf("the child is on %s", got)
		}
		same(child, want)
		children = append(children, child)
	}
	if len(children) != 2 {
		t.Fatalf("%d children", len(children))
	}
	two, err := restored.Snapshot(ctx, "two", client.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}

	// Whatever edge needs it, it is known.
	err = c.DeleteSnapshot(ctx, "one")
	if !errors.Is(err, errs.ImageInUse) || !strings.Contains(err.Error(), two.Name) {
		t.Errorf("the removal of what is needed: %v", err)
	}
	s.remove(source)
	if _, err := c.CollectImages(ctx, 0, nil); err != nil {
		t.Error(err)
	}
	// Now the second is full, and the first has never seen the second snapshot.
	same(create(two.Name, first), want)
	err = c.DeleteSnapshot(ctx, "two")
	if !errors.Is(err, errs.ImageInUse) {
		t.Errorf("the removal of what a sandbox on the other edge has: %v", err)
	}
}
