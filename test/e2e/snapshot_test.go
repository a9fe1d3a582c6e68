package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
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
	shared.Fails(t, 2, "", "image", "import", "snap:x", t.TempDir())
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

// look tells of a tree what a sandbox's own tools see: names, types, modes, owners, times, sizes, targets and
// contents. Not link counts, of which an overlay shows those of a layer, nor sizes of directories.
const look = `cd "$1"; find . | sort | while read -r f; do
	stat -c '%n %F %a %u:%g %Y' "$f"; [ -d "$f" ] || stat -c %s "$f"; if [ -L "$f" ]; then readlink "$f"; elif [ -f "$f" ]; then sha256sum "$f"; fi; done`

func seen(t *testing.T, id, dir string) string {
	t.Helper()
	return shared.Must(t, "exec", id, "--", "sh", "-euc", look, "sh", dir)
}

// Whatever kinds of files and changes there are, a copy shows what the source shows.
func TestASnapshotKeepsEveryKindOfFile(t *testing.T) {
	t.Parallel()
	base := strings.ToLower(t.Name())
	files := map[string]string{}
	for _, n := range []string{"dir/a", "dir/b", "dir/sub/c", "hidden/x", "hidden/y", "gone/z", "moved/file", "moved/deep/er", "keep", "edit", "mode"} {
		files["tree/"+n] = "base " + n
	}
	shared.Must(t, "image", "import", base, tree(t, files))
	id := begin(t, "--image", bed.Image, "--workspace", base)
	sh(t, id, `cd /tree; rm dir/a; rm -r hidden; mkdir hidden; echo new >hidden/new; rm -r gone; mv moved renamed; echo more >>renamed/file; rm renamed/deep/er
echo x >>edit; chmod 4711 mode; chown 1000:2000 keep; ln edit hard; ln -s ../nowhere sym; mkfifo fifo
dd if=/dev/zero of=sparse bs=1 count=1 seek=50000000 2>/dev/null; mkdir -p "odd name/$(printf 'tab\there')"; echo q >"odd name/ü\"'"
i=0; while [ $i -lt 300 ]; do echo $i >dir/n$i; i=$((i+1)); done; touch -d '2001-02-03 04:05:06' dir/n7; mkdir empty; chmod 1777 empty`)
	// A socket needs a program that listens.
	shared.Must(t, "exec", "--detach", id, "--", "sh", "-c", "nc -l -U /tree/socket || nc -lU /tree/socket")
	want := seen(t, id, "/tree")
	name := snap(t, id, base)
	copied := begin(t, name)
	if got := seen(t, copied, "/tree"); got != want {
		t.Errorf("the copy shows\n%s\nthe source\n%s", got, want)
	}
	if got := sh(t, copied, "stat -c '%h %i' /tree/edit /tree/hard | sort -u"); !strings.HasPrefix(got, "2 ") || strings.Contains(got, "\n") {
		t.Errorf("the names of one file are %q", got)
	}
	img := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", name, "--json")
	if l := img.Layers[len(img.Layers)-1]; l.DataBytes > 1<<20 {
		t.Errorf("the sparse file takes space: %+v", l)
	}
	// And once more, in layers on layers.
	sh(t, copied, "cd /tree; rm hard; mv renamed again; rm -r dir; mkdir dir; echo z >dir/z; echo back >gone")
	second := snap(t, copied, base+"-2")
	want = seen(t, copied, "/tree")
	third := begin(t, second)
	if got := seen(t, third, "/tree"); got != want {
		t.Errorf("the copy's copy shows\n%s\nits source\n%s", got, want)
	}
	for _, id := range []string{third, copied, id} {
		shared.Must(t, "rm", id)
	}
	shared.Must(t, "snapshot", "rm", second, name)
}

// A snapshot of a sandbox whose programs write is of one moment: of two files that are written one after the
// other, the second is never ahead, nor more than one behind.
func TestASnapshotIsOfOneMoment(t *testing.T) {
	t.Parallel()
	id := begin(t, bed.Image)
	shared.Must(t, "exec", "--detach", id, "--", "sh", "-c", "mkdir /w; i=0; while :; do i=$((i+1)); echo $i >>/w/first; echo $i >>/w/second; done")
	sh(t, id, "until test -s /w/second; do usleep 1000; done; mkdir /many; i=0; while [ $i -lt 500 ]; do echo $i >/many/$i; i=$((i+1)); done")
	var made []string
	last := 0
	for i := range 6 {
		name := snap(t, id, fmt.Sprintf("%s-%d", strings.ToLower(t.Name()), i))
		made = append(made, name)
		f := strings.Fields(shared.Must(t, "run", name, "--", "sh", "-c", "wc -l </w/first; wc -l </w/second; tail -n 1 /w/first; ls /many | wc -l"))
		first, err1 := strconv.Atoi(f[0])
		second, err2 := strconv.Atoi(f[1])
		if err1 != nil || err2 != nil || second > first || second < first-1 || f[2] != f[0] || first <= last || f[3] != "500" {
			t.Errorf("snapshot %d has %q", i, f)
		}
		last = first
	}
	shared.Must(t, "rm", id)
	for i := len(made) - 1; i >= 0; i-- {
		shared.Must(t, "snapshot", "rm", made[i])
	}
}

// A large snapshot is read while the sandbox runs, but for what changes meanwhile; it is of one moment
// all the same, and its layer has the one state.
func TestALargeSnapshotIsReadAhead(t *testing.T) {
	t.Parallel()
	id := begin(t, bed.Image)
	sh(t, id, "mkdir /w /big; for i in 1 2 3 4; do head -c 16000000 /dev/urandom >/big/$i; done; sha256sum /big/* >/sums; sleep 0.1")
	shared.Must(t, "exec", "--detach", id, "--", "sh", "-c", `g=0; while :; do g=$((g+1)); i=0
while [ $i -lt 20 ]; do i=$((i+1)); case $i in *[05]) rm -f /w/$i;; *[27]) mv /w/$i /w/tmp; mv /w/tmp /w/$i;; esac; echo $g >/w/$i; done; done`)
	sh(t, id, "until test -s /w/20; do usleep 1000; done; sleep 0.1")
	var made []string
	for i := range 3 {
		name := fmt.Sprintf("snap:%s-%d", strings.ToLower(t.Name()), i)
		made = append(made, name)
		p := bed.JSON[v1.Image](t, shared, "snapshot", "--json", id, strings.TrimPrefix(name, "snap:")).Pack
		if p == nil || p.FrozenMS <= 0 || p.ReadAheadMS > 0 != (i == 0) {
			t.Errorf("snapshot %d: %+v", i, p)
		}
		got := shared.Must(t, "run", name, "--", "sh", "-c", "sha256sum -c /sums >/dev/null && echo same; i=0; while [ $i -lt 20 ]; do i=$((i+1)); echo \"$(cat /w/$i 2>/dev/null)\"; done")
		f := strings.Split(got, "\n")
		first, err := strconv.Atoi(f[1])
		if f[0] != "same" || len(f) < 21 || err != nil {
			t.Fatalf("snapshot %d has %q", i, got)
		}
		was := first
		for n, line := range f[2:21] {
			if line == "" { // removed or emptied just then: the only one
				line = strconv.Itoa(was - 1)
				if n > 0 && was < first {
					line = f[1+n]
				}
			}
			if g, err := strconv.Atoi(line); err != nil || g > was || g < first-1 {
				t.Errorf("snapshot %d is of no single moment: %q", i, f)
				break
			} else {
				was = g
			}
		}
	}
	shared.Must(t, "rm", id)
	for i := len(made) - 1; i >= 0; i-- {
		shared.Must(t, "snapshot", "rm", made[i])
	}
}

// Fifty snapshots, each of a sandbox made of the last: every one shows what its sandbox did, also at the
// end, and their chain stays short.
func TestAChainOfSnapshots(t *testing.T) {
	t.Parallel()
	steps := 50
	if testing.Short() {
		steps = 6
	}
	name := strings.ToLower(t.Name())
	from := bed.Image
	var names, wants []string
	layers, flattened := 0, false
	for i := range steps {
		id := begin(t, from)
		sh(t, id, fmt.Sprintf(`mkdir -p /c; cd /c; n=%d; echo $n >now; head -c 5000 /dev/urandom >f$n; mkdir d$n; echo $n >d$n/in
if [ $n -gt 2 ]; then rm f$((n-2)); mv d$((n-1)) e$((n-1)); rm -r e$((n-2)) 2>/dev/null || true; fi
if [ $((n%%5)) -eq 4 ]; then rm -r d$n; mkdir d$n; echo again >d$n/again; ln f$n link$n; fi`, i))
		wants = append(wants, seen(t, id, "/c"))
		from = snap(t, id, fmt.Sprintf("%s-%d", name, i))
		names = append(names, from)
		shared.Must(t, "rm", id)
		img := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", from, "--json")
		if len(img.Layers) > 33 {
			t.Errorf("snapshot %d has %d layers", i, len(img.Layers))
		}
		flattened = flattened || len(img.Layers) < layers
		layers = len(img.Layers)
	}
	if !flattened && steps > 33 {
		t.Errorf("%d snapshots were made and none was flattened", steps)
	}
	for i, n := range names {
		if got := shared.Must(t, "run", n, "--", "sh", "-euc", look, "sh", "/c"); got != wants[i] {
			t.Errorf("snapshot %d shows\n%s\nits source\n%s", i, got, wants[i])
		}
	}
	for i := len(names) - 1; i >= 0; i-- {
		shared.Must(t, "snapshot", "rm", names[i])
	}
}

// A snapshot that is removed while sandboxes are made of it, and while others are made on it, is used whole or
// not found.
func TestSnapshotsAreUsedAndRemovedAtOnce(t *testing.T) {
	t.Parallel()
	c := shared.Client(t)
	ctx := t.Context()
	source := shared.Sandbox(t, c, client.Spec{Image: bed.Image})
	if err := source.WriteFile(ctx, "/content", []byte("whole"), 0o644); err != nil {
		t.Fatal(err)
	}
	for round := range 8 {
		name := fmt.Sprintf("%s-%d", strings.ToLower(t.Name()), round)
		if _, err := source.Snapshot(ctx, name, client.SnapshotOptions{}); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for n := range 4 {
			wg.Go(func() {
				sb, err := c.Create(ctx, client.Spec{Image: v1.SnapshotPrefix + name})
				if err != nil {
					if !errors.Is(err, errs.ImageNotFound) {
						t.Errorf("create: %v", err)
					}
					return
				}
				if b, err := sb.ReadFile(ctx, "/content"); err != nil || string(b) != "whole" {
					t.Errorf("it has %q, %v", b, err)
				}
				if n == 0 { // a snapshot on it
					img, err := sb.Snapshot(ctx, name+"-on", client.SnapshotOptions{})
					if err != nil {
						t.Errorf("snapshot: %v", err)
					} else if err := errors.Join(sb.Delete(ctx), c.DeleteSnapshot(ctx, img.Name)); err != nil {
						t.Error(err)
					}
					return
				}
				if err := sb.Delete(ctx); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Go(func() {
			for {
				err := c.DeleteSnapshot(ctx, name)
				if err == nil {
					return
				}
				if !errors.Is(err, errs.ImageInUse) {
					t.Errorf("remove: %v", err)
					return
				}
			}
		})
		wg.Wait()
	}
	// A sandbox that is removed while it is packed ends its pack.
	big := shared.Sandbox(t, c, client.Spec{Image: bed.Image})
	if res, err := big.Run(ctx, "sh", "-c", "head -c 30000000 /dev/urandom >/big"); err != nil || res.Code != 0 {
		t.Fatal(err, res)
	}
	packed := make(chan error)
	go func() {
		_, err := big.Snapshot(ctx, strings.ToLower(t.Name())+"-gone", client.SnapshotOptions{})
		packed <- err
	}()
	if err := big.Delete(ctx); err != nil {
		t.Error(err)
	}
	if err := <-packed; err == nil {
		shared.Must(t, "snapshot", "rm", strings.ToLower(t.Name())+"-gone") // it was faster
	}
}

// A snapshot for which there is no room fails as such, leaves nothing, and the sandbox runs on.
func TestASnapshotOnAFullDisk(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{Prepare: small(512 << 20), Flags: []string{"--reserve-disk", "0"}})
	c := b.Client(t)
	sb := b.Sandbox(t, c, client.Spec{})
	res, err := sb.Run(t.Context(), "sh", "-c", "head -c 70000000 /dev/urandom >/big; sha256sum /big >/sum")
	if err != nil || res.Code != 0 {
		t.Fatal(err, res)
	}
	// What says which data is durable is written now and then.
	images := func() map[string]int64 {
		all := files(t, filepath.Join(b.Data, "images"))
		maps.DeleteFunc(all, func(name string, _ int64) bool { return filepath.Base(name) == "safe" })
		return all
	}
	stored := images()
	free := fill(t, b.Data)
	// With room for the layer, but not for all that goes into the object store.
	filler := filepath.Join(b.Data, "filler")
	if st, err := os.Stat(filler); err != nil || os.Truncate(filler, st.Size()-122<<20) != nil {
		t.Fatal(err)
	}
	store := filepath.Join(b.Data, "store")
	objects := files(t, store)
	if _, err := sb.Snapshot(t.Context(), "almost", client.SnapshotOptions{}); !errors.Is(err, errs.DiskFull) {
		t.Errorf("got %v, want disk_full", err)
	}
	bed.Eventually(t, "what was stored in vain is gone", func() error {
		for name := range files(t, store) {
			if _, was := objects[name]; !was && !strings.Contains(name, "/condemned/") {
				return errors.New(name)
			}
		}
		return nil
	})
	free()
	free = fill(t, b.Data)
	if _, err := sb.Snapshot(t.Context(), "full", client.SnapshotOptions{}); !errors.Is(err, errs.DiskFull) {
		t.Errorf("got %v, want disk_full", err)
	}
	for child, err := range sb.Fork(t.Context(), 2, client.ForkOptions{}) {
		if !errors.Is(err, errs.DiskFull) {
			t.Errorf("fork: %v, %v, want disk_full", child, err)
		}
	}
	if now := images(); !maps.Equal(now, stored) {
		t.Errorf("left %v, there was %v", now, stored)
	}
	if res, err := sb.Run(t.Context(), "sha256sum", "-c", "/sum"); err != nil || res.Code != 0 {
		t.Errorf("the sandbox: %v %+v", err, res)
	}
	free()
	img, err := sb.Snapshot(t.Context(), "full", client.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	again := b.Sandbox(t, c, client.Spec{Image: img.Name})
	if res, err := again.Run(t.Context(), "sha256sum", "-c", "/sum"); err != nil || res.Code != 0 {
		t.Errorf("with room again: %v %+v", err, res)
	}
	bed.Remove(t, again)
	bed.Remove(t, sb)
}

// mapper maps a file to write to, and writes through its memory once more when it is told to: the
// file's times do not change by that.
const mapper = `package main

import (
	"os"
	"syscall"
	"time"
)

func main() {
	f, err := os.OpenFile("/mapped", os.O_RDWR, 0)
	if err != nil {
		panic(err)
	}
	b, err := syscall.Mmap(int(f.Fd()), 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	copy(b, "first ")
	os.WriteFile("/ready", nil, 0o600)
	for {
		if _, err := os.Stat("/go"); err == nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	copy(b, "second")
	os.WriteFile("/done", nil, 0o600)
	time.Sleep(time.Hour)
}
`

// What a program writes through a mapping between two snapshots is in the second, though the file looks
// the same.
func TestWritesThroughAMappingAreInTheNextSnapshot(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(mapper), 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "mapper"), filepath.Join(dir, "main.go"))
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	id := begin(t, bed.Image)
	shared.Must(t, "cp", filepath.Join(dir, "mapper"), id+":/mapper")
	sh(t, id, "head -c 4096 /dev/zero >/mapped; head -c 1000000 /dev/urandom >/other")
	shared.Must(t, "exec", "--detach", id, "--", "/mapper")
	sh(t, id, "until test -e /ready; do usleep 1000; done; sleep 0.2")
	name := strings.ToLower(t.Name())
	snap(t, id, name+"-1")
	before := sh(t, id, "stat -c '%y %z' /mapped")
	sh(t, id, "touch /go; until test -e /done; do usleep 1000; done")
	if after := sh(t, id, "stat -c '%y %z' /mapped"); after != before {
		t.Logf("the file's times changed from %s to %s", before, after) // then it is no test of much, on this file system
	}
	snap(t, id, name+"-2")
	if s := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", name+"-2", "--json").Snapshot; s.Bytes > 500000 {
		t.Errorf("the second has all again: %+v", s)
	}
	for n, want := range map[string]string{"-1": "first ", "-2": "second"} {
		if got := shared.Must(t, "run", "snap:"+name+n, "--", "head", "-c", "6", "/mapped"); got != want {
			t.Errorf("snapshot %s has %q, want %q", n, got, want)
		}
	}
	shared.Must(t, "rm", id)
	shared.Must(t, "snapshot", "rm", name+"-2", name+"-1")
}
