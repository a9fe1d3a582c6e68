package e2e

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	ggcr "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	v1 "dsec/api/v1"
	"dsec/client"
	"dsec/test/bed"
)

// file is one of a tar: of a name with a slash at its end, a directory.
type file struct {
	name, content string
	mode          int64
}

// ociLayout writes an image of these layers, each a list of files, and returns where it is.
func ociLayout(t *testing.T, config ggcr.Config, layers ...[]file) string {
	t.Helper()
	img := mutate.MediaType(empty.Image, "application/vnd.oci.image.manifest.v1+json")
	for _, files := range layers {
		var buf bytes.Buffer
		tw := tar.NewWriter(&buf)
		for _, f := range files {
			h := &tar.Header{Name: f.name, Size: int64(len(f.content)), Mode: f.mode, Typeflag: tar.TypeReg}
			if h.Mode == 0 {
				h.Mode = 0o755
			}
			if strings.HasSuffix(f.name, "/") {
				h.Typeflag = tar.TypeDir
			}
			if err := tw.WriteHeader(h); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(tw, f.content); err != nil {
				t.Fatal(err)
			}
		}
		if err := tw.Close(); err != nil {
			t.Fatal(err)
		}
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil })
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	img, err := mutate.Config(img, config)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "layout")
	if _, err := layout.Write(dir, mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img})); err != nil {
		t.Fatal(err)
	}
	return dir
}

// shell is a layer with a shell in it.
func shell(t *testing.T) []file {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Skip("needs busybox-static: ", err)
	}
	files := []file{{name: "bin/"}, {name: "proc/"}, {name: "sys/"}, {name: "dev/"}, {name: "etc/"}, {name: "tmp/", mode: 0o1777}}
	return append(files, file{name: "bin/sh", content: string(busybox)}, file{name: "bin/busybox", content: string(busybox)})
}

// What an image has below a path that its configuration calls a volume is there, can be written, and is
// kept by snapshots, builds, exports and compositions: nothing is mounted over it.
func TestVolumePathsAreKept(t *testing.T) {
	t.Parallel()
	name := func(s string) string { return strings.ToLower(t.Name()) + s }
	dir := ociLayout(t, ggcr.Config{Volumes: map[string]struct{}{"/var/data": {}, "/none": {}}, Env: []string{"PATH=/bin"}},
		shell(t), []file{{name: "var/data/"}, {name: "var/data/of-image", content: "image\n"}, {name: "var/data/removed", content: "x"}},
		[]file{{name: "var/data/.wh.removed"}, {name: "var/data/deep/"}, {name: "var/data/deep/later", content: "later\n"}})
	shared.Must(t, "image", "import", name(""), dir)
	volumes := func(image string) []string {
		t.Helper()
		return bed.JSON[v1.Image](t, shared, "image", "inspect", image, "--json").Config.Volumes
	}
	if got := volumes(name("")); !slices.Equal(got, []string{"/none", "/var/data"}) {
		t.Errorf("the image's volumes are %q", got)
	}
	const see = "cd /var/data; busybox find . -type f | busybox sort; busybox cat of-image; busybox grep -c /var/data /proc/mounts || true"
	look := func(id, want string) {
		t.Helper()
		if got := shared.Must(t, "exec", id, "--", "sh", "-euc", see); got != want {
			t.Errorf("%s shows %q, want %q", id, got, want)
		}
	}
	id := begin(t, name(""))
	look(id, "./deep/later\n./of-image\nimage\n0")
	shared.Must(t, "exec", id, "--", "sh", "-euc", "cd /var/data; echo mine >of-image; busybox rm -r deep; echo new >new")
	const want = "./new\n./of-image\nmine\n0"
	look(id, want)
	snapped := snap(t, id, name(""))
	copied := begin(t, snapped)
	look(copied, want)
	if got := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", snapped, "--json").Config.Volumes; len(got) != 2 {
		t.Errorf("the snapshot's volumes are %q", got)
	}

	recipe := filepath.Join(t.TempDir(), "recipe.yaml")
	if err := os.WriteFile(recipe, []byte("from: "+name("")+"\nsteps:\n  - run: echo mine >/var/data/of-image; busybox rm -r /var/data/deep; echo new >/var/data/new\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	shared.Must(t, "image", "build", "--memory", "256m", "-f", recipe, name("-built"))
	built := begin(t, name("-built"))
	look(built, want)
	if got := volumes(name("-built")); len(got) != 2 {
		t.Errorf("the built image's volumes are %q", got)
	}

	archive := filepath.Join(t.TempDir(), "image.tar")
	shared.Must(t, "image", "export", "--format", "oci", name("-built"), archive)
	shared.Must(t, "image", "import", name("-again"), archive)
	again := begin(t, name("-again"))
	look(again, want)
	if got := volumes(name("-again")); len(got) != 2 {
		t.Errorf("the exported image's volumes are %q", got)
	}

	// Over a volume of the base a workspace's files lie as elsewhere.
	shared.Must(t, "image", "import", name("-over"), tree(t, map[string]string{"var/data/over": "workspace"}))
	composed := begin(t, "--image", name(""), "--workspace", name("-over"))
	look(composed, "./deep/later\n./of-image\n./over\nimage\n0")
	for _, id := range []string{composed, again, built, copied, id} {
		shared.Must(t, "rm", id)
	}
	shared.Must(t, "snapshot", "rm", name(""))
	for _, n := range strings.Fields(shared.Must(t, "image", "ls", "-q", "--all")) {
		if strings.HasPrefix(n, "build-step:") && slices.Contains(volumes(n), "/none") {
			shared.Must(t, "image", "rm", n)
		}
	}
	shared.Must(t, "image", "rm", name("-built"), name("-again"), name("-over"), name(""))
}

// An archive of 128 layers is imported with all its whiteouts.
func TestAnArchiveOf128Layers(t *testing.T) {
	t.Parallel()
	layers := [][]file{shell(t)}
	for i := 1; i < 128; i++ {
		files := []file{{name: "d/"}, {name: fmt.Sprintf("d/f%d", i), content: fmt.Sprint(i)}, {name: "common", content: fmt.Sprint(i)}, {name: fmt.Sprintf("o%d/", i)}, {name: fmt.Sprintf("o%d/x", i), content: "x"}}
		if i%2 == 0 {
			files = append(files, file{name: fmt.Sprintf("d/.wh.f%d", i-1)}, file{name: fmt.Sprintf("o%d/.wh..wh..opq", i-1)}, file{name: fmt.Sprintf("o%d/y", i-1), content: "y"})
		}
		layers = append(layers, files)
	}
	name := strings.ToLower(t.Name())
	shared.Must(t, "image", "import", name, ociLayout(t, ggcr.Config{Env: []string{"PATH=/bin"}}, layers...))
	var want []string
	for i := 1; i < 128; i++ {
		if i%2 == 0 || i == 127 {
			want = append(want, fmt.Sprintf("/d/f%d", i), fmt.Sprintf("/o%d/x", i))
		} else {
			want = append(want, fmt.Sprintf("/o%d/y", i))
		}
	}
	slices.Sort(want)
	got := strings.Split(shared.Must(t, "run", name, "--", "sh", "-euc", "cat() { busybox cat \"$@\"; }; cat /common; echo; busybox find /d /o* -type f"), "\n")
	if got[0] != "127" {
		t.Errorf("the common file is %q", got[0])
	}
	if got = got[1:]; !slices.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("it shows %q, want %q", got, want)
	}
	shared.Must(t, "image", "rm", name)
}

// A sandbox of 128 layers: a base, a workspace and toolkits whose images are snapshots of snapshots. What a
// layer removes is removed also from what lies below its own image; all can be written; and a snapshot of it,
// whose chain is flattened, shows the same.
func TestASandboxOf128Layers(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true})
	ctx, c := t.Context(), b.Client(t)
	const parts, layers = 4, 32
	run := func(sb *client.Sandbox, script string) (string, error) {
		res, err := sb.Run(ctx, "sh", "-euc", script)
		if err == nil && res.Code != 0 {
			err = fmt.Errorf("exit code %d: %s", res.Code, res.Stderr)
		}
		if err != nil {
			return "", err
		}
		return string(res.Stdout), nil
	}
	// Part p writes files p-1 … p-31 and removes every other, says last who it is, and removes of the part
	// below, which it has never seen, a file that its own image has too.
	build := func(p int) error {
		image := fmt.Sprintf("part%d", p)
		sb, err := c.Create(ctx, client.Spec{Image: image})
		if err != nil {
			return err
		}
		for i := 1; i < layers; i++ {
			script := fmt.Sprintf("cd /d; echo %[1]d-%[2]d >f%[1]d-%[2]d; echo %[1]d-%[2]d >last; mkdir -p only%[1]d; echo %[2]d >only%[1]d/n", p, i)
			if i%2 == 0 {
				script += fmt.Sprintf("; rm f%d-%d", p, i-1)
			}
			if i == 5 && p > 0 {
				script += fmt.Sprintf("; rm base%d; rm -r tree%d; mkdir tree%d; echo new >tree%d/new", p-1, p-1, p-1, p-1)
			}
			if _, err := run(sb, script); err != nil {
				return err
			}
			if _, err := sb.Snapshot(ctx, fmt.Sprintf("p%d-%d", p, i), client.SnapshotOptions{}); err != nil {
				return err
			}
		}
		return sb.Delete(ctx)
	}
	errs := make([]error, parts)
	var wg sync.WaitGroup
	for p := range parts {
		files := append(shell(t), file{name: "d/"}, file{name: fmt.Sprintf("d/image%d", p)})
		for _, cmd := range []string{"cat", "rm", "mkdir", "find", "sort", "ls", "sha256sum", "xargs"} {
			files = append(files, file{name: "bin/" + cmd, content: "#!/bin/sh\nexec /bin/busybox " + cmd + " \"$@\"\n"})
		}
		for _, q := range []int{p - 1, p} {
			files = append(files, file{name: fmt.Sprintf("d/base%d", q), content: fmt.Sprint(p)}, file{name: fmt.Sprintf("d/tree%d/", q)}, file{name: fmt.Sprintf("d/tree%d/old%d", q, p)})
		}
		b.Must(t, "image", "import", fmt.Sprintf("part%d", p), ociLayout(t, ggcr.Config{Env: []string{"PATH=/bin"}}, files))
		wg.Go(func() { errs[p] = build(p) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	last := func(p int) string { return fmt.Sprintf("snap:p%d-%d", p, layers-1) }
	sb := b.Sandbox(t, c, client.Spec{Image: last(0), Workspace: last(1), Toolkits: []string{last(2), last(3)}})
	if info, err := c.Get(ctx, sb.ID()); err != nil || len(info.Layers) != parts*layers {
		t.Fatalf("it has %d layers, want %d: %v", len(info.Layers), parts*layers, err)
	}
	var want []string
	for p := range parts {
		for i := 1; i < layers; i++ {
			if i%2 == 0 || i == layers-1 {
				want = append(want, fmt.Sprintf("/d/f%d-%d", p, i))
			}
		}
		want = append(want, fmt.Sprintf("/d/image%d", p), fmt.Sprintf("/d/only%d/n", p))
		if p < parts-1 {
			want = append(want, fmt.Sprintf("/d/tree%d/new", p))
		}
	}
	want = append(want, "/d/base-1", "/d/tree-1/old0", "/d/base3", "/d/tree3/old3", "/d/last")
	slices.Sort(want)
	out, err := run(sb, "find /d -type f; cat /d/last")
	got := strings.Fields(out)
	if err != nil || len(got) == 0 || got[len(got)-1] != "3-31" {
		t.Fatalf("%q, %v", got, err)
	}
	if got = slices.Sorted(slices.Values(got[:len(got)-1])); !slices.Equal(got, want) {
		t.Errorf("it shows\n%q\nwant\n%q", got, want)
	}
	const sums = "find /d -type f | sort | xargs sha256sum"
	before, err := run(sb, "cd /d; echo mine >last; rm f2-2 base3; rm -r only1; "+sums)
	if err != nil {
		t.Fatal(err)
	}
	img, err := sb.Snapshot(ctx, "all", client.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("its snapshot has %d layers", len(img.Layers))
	if after, err := run(b.Sandbox(t, c, client.Spec{Image: img.Name}), sums); err != nil || after != before {
		t.Errorf("its snapshot shows\n%s\nwant\n%s%v", after, before, err)
	}
}
