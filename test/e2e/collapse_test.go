package e2e

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

// changes is a script of random changes below /tree, of all the kinds that leave marks in a layer.
func changes(r *rand.Rand, n int) string {
	var b strings.Builder
	b.WriteString("mkdir -p /tree; cd /tree\n")
	dir := func() string { return "d" + fmt.Sprint(r.IntN(4)) }
	file := func() string { return dir() + "/f" + fmt.Sprint(r.IntN(4)) }
	for range n {
		switch r.IntN(8) {
		case 0:
			fmt.Fprintf(&b, "rm -rf %s; mkdir %[1]s; echo opaque >%[1]s/f0\n", dir())
		case 1:
			fmt.Fprintf(&b, "[ ! -d %[1]s ] || [ -e moved ] || mv %[1]s moved; mkdir -p %[2]s\n", dir(), dir())
		case 2:
			fmt.Fprintf(&b, "[ ! -e moved ] || [ -e %[1]s ] || mv moved %[1]s\n", dir())
		case 3:
			fmt.Fprintf(&b, "rm -rf %s\n", file())
		case 4:
			fmt.Fprintf(&b, "mkdir -p %s; ln -sf nowhere %[1]s/link; rm -f %[1]s/pipe; mkfifo -m 600 %[1]s/pipe\n", dir())
		case 5:
			fmt.Fprintf(&b, "[ ! -f %[1]s ] || chmod %[2]o %[1]s\n", file(), 0o600+r.IntN(64))
		default:
			f := file()
			fmt.Fprintf(&b, "mkdir -p %s; [ -d %s ] || head -c %d /dev/urandom >%[2]s\n", filepath.Dir(f), f, r.IntN(20000))
		}
	}
	return b.String()
}

// An image of many small layers shows after a collapse what it did before, and so does what was made on
// it before and after; its name, digest and lineage stay, and sandboxes that run notice nothing.
func TestACollapsedImageShowsTheSame(t *testing.T) {
	t.Parallel()
	r := bed.Random(t)
	name := func(s any) string { return fmt.Sprintf("%s-%v", strings.ToLower(t.Name()), s) }
	id := begin(t, bed.Image)
	const steps = 12
	var want string
	for n := range steps {
		sh(t, id, changes(r, 8))
		want = seen(t, id, "/tree")
		snap(t, id, name(n))
		if n%3 == 2 { // each a sandbox of the last: what is removed then is of layers below
			id = begin(t, "snap:"+name(n))
		}
	}
	top := "snap:" + name(steps-1)
	before := begin(t, top)
	sh(t, before, "rm -rf /tree/d0; mkdir /tree/d0; echo before >/tree/d0/new")
	wantBefore := seen(t, before, "/tree")
	onBefore := snap(t, before, name("before"))

	old := bed.JSON[v1.Image](t, shared, "image", "inspect", top, "--json")
	merged := bed.JSON[v1.Image](t, shared, "image", "collapse", top, "--json")
	if merged.Digest != old.Digest || merged.Name != old.Name || len(merged.Layers) != 2 || len(merged.Made) != len(old.Layers) ||
		merged.Layers[1].View != old.Layers[len(old.Layers)-1].View || merged.Layers[0] != old.Layers[0] {
		t.Errorf("it was %+v and is %+v", old, merged)
	}
	if got := bed.JSON[v1.Image](t, shared, "image", "inspect", top, "--json"); len(got.Layers) != 2 {
		t.Errorf("the catalogue has %+v", got)
	}
	if got := shared.Must(t, "image", "collapse", "--below", "64KiB", top); !strings.Contains(got, fmt.Sprintf("2 layers, made of %d", len(old.Layers))) {
		t.Errorf("again: %q", got)
	}
	shared.Fails(t, 2, "", "image", "collapse", "--below", "0", top)
	shared.Fails(t, 1, "image_not_found", "image", "collapse", "snap:none-such")

	after := begin(t, top)
	if got := seen(t, after, "/tree"); got != want {
		t.Errorf("it shows\n%s\nand did\n%s", got, want)
	}
	if got := seen(t, before, "/tree"); got != wantBefore {
		t.Errorf("a sandbox that ran shows\n%s\nand did\n%s", got, wantBefore)
	}
	// What was made on it before, what a sandbox on the old layers and one on the new ones make now.
	if got := seen(t, begin(t, onBefore), "/tree"); got != wantBefore {
		t.Errorf("a snapshot that was made on it shows\n%s\nand did\n%s", got, wantBefore)
	}
	sh(t, before, changes(r, 5))
	sh(t, after, changes(r, 5))
	for _, sb := range []string{before, after} {
		want := seen(t, sb, "/tree")
		made := snap(t, sb)
		if got := seen(t, begin(t, made), "/tree"); got != want {
			t.Errorf("a snapshot of %s shows\n%s\nthe sandbox\n%s", sb, got, want)
		}
		if img := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", made, "--json"); sb == after && (len(img.Layers) != 3 || img.Layers[2].Parent != merged.Layers[1].View || img.Snapshot.Parents[0] != old.Digest) {
			t.Errorf("made on the merged layer: %+v", img)
		}
	}
	// The parts of the digest travel along: the same snapshot comes of its archive.
	file := filepath.Join(t.TempDir(), "archive")
	shared.Must(t, "snapshot", "export", top, file)
	shared.Must(t, "snapshot", "import", file, name("again"))
	if got := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", name("again"), "--json"); got.Digest != old.Digest || len(got.Layers) != 2 {
		t.Errorf("imported: %+v", got)
	}
	shared.Must(t, "image", "gc", "--grace", "0")
	if got := seen(t, begin(t, top), "/tree"); got != want {
		t.Errorf("after a collection it shows\n%s\nand did\n%s", got, want)
	}
}
