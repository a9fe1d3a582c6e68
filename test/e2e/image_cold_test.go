package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/client"
	"dsec/internal/keeper"
	"dsec/test/bed"
)

// noisy imports busybox with files of noise and returns their SHA-256 sums as sha256sum
// prints them, by name.
func noisy(t *testing.T, b *bed.Bed, name string, files, size int) map[string]string {
	t.Helper()
	root := t.TempDir()
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Skip("needs busybox-static: ", err)
	}
	put := func(name string, p []byte, mode os.FileMode) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, p, mode), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	put("bin/busybox", busybox, 0o755)
	for _, d := range []string{"proc", "sys", "dev", "tmp", "etc"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []string{"sh", "sha256sum", "cat", "ls", "dd", "sleep", "true"} {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", c)); err != nil {
			t.Fatal(err)
		}
	}
	sums := map[string]string{}
	noise := rand.NewChaCha8(sha256.Sum256([]byte(name)))
	for i := range files {
		p := make([]byte, size)
		_, _ = noise.Read(p)
		sum := sha256.Sum256(p)
		name := fmt.Sprintf("/data/%02d", i)
		put(name, p, 0o644)
		sums[name] = hex.EncodeToString(sum[:])
	}
	b.Must(t, "image", "import", name, root)
	return sums
}

// forgetImages takes away all that the node has of images, which must not run.
func forgetImages(t *testing.T, b *bed.Bed) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(b.Data, "images")); err != nil {
		t.Fatal(err)
	}
}

// filled is how many bytes of data blobs the node has.
func filled(t *testing.T, b *bed.Bed) (bytes int64) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(b.Data, "images", "data", "blobs"), func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Name() == "data" {
			var st syscall.Stat_t
			err = syscall.Stat(p, &st)
			bytes += st.Blocks * 512
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

func checkSums(t *testing.T, sb *client.Sandbox, sums map[string]string) {
	t.Helper()
	res, err := sb.Run(t.Context(), "sh", "-c", "sha256sum /data/*")
	if err != nil || res.Code != 0 {
		t.Errorf("%+v, %v", res, err)
		return
	}
	lines := strings.Split(strings.TrimSpace(string(res.Stdout)), "\n")
	if len(lines) != len(sums) {
		t.Errorf("%d sums of %d files", len(lines), len(sums))
	}
	for _, line := range lines {
		if sum, name, _ := strings.Cut(line, "  "); sums[name] != sum {
			t.Errorf("wrong content: %s", line)
		}
	}
}

// A node that knows of an image only what the catalogue says starts it at once, and
// fetches what is read and little more.
func TestAnImageStartsFromItsCatalogueEntryAlone(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true})
	sums := noisy(t, b, "cold", 16, 2<<20)
	b.Must(t, "down", "--data", b.Data, "--keep")
	forgetImages(t, b)
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := b.Client(t)
	sb := b.Sandbox(t, c, client.Spec{Image: "cold"})
	if res, err := sb.Run(t.Context(), "ls", "/data"); err != nil || len(strings.Fields(string(res.Stdout))) != len(sums) {
		t.Fatalf("%+v, %v", res, err)
	}
	if n := filled(t, b); n > 6<<20 {
		t.Errorf("%d bytes were fetched for one command of 2 MiB", n)
	}
	checkSums(t, sb, sums)
	// All is here now, so that the object store is not needed any more.
	store := filepath.Join(b.Data, "store")
	if err := os.Rename(store, store+".away"); err != nil {
		t.Fatal(err)
	}
	defer os.Rename(store+".away", store)
	checkSums(t, b.Sandbox(t, c, client.Spec{Image: "cold"}), sums)
}

// Two images whose chunks lie at equal offsets never show each other's: read at once from nothing, with a cache
// that holds little of either, and again after each was dropped.
func TestImagesOfOneShapeDoNotMix(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true, Flags: []string{"--image-cache", "6MiB"}})
	names := []string{"left", "right"}
	sums := map[string]map[string]string{}
	for _, n := range names {
		sums[n] = noisy(t, b, n, 6, 1<<20)
	}
	layer := func(n string) v1.Layer {
		l := bed.JSON[v1.Image](t, b, "image", "inspect", n, "--json").Layers
		return l[len(l)-1]
	}
	if l, r := layer("left"), layer("right"); l.DataBytes != r.DataBytes || l.DataDigest == r.DataDigest {
		t.Fatalf("not of one shape: %+v, %+v", l, r)
	}
	c := b.Client(t)
	for range 3 {
		b.Must(t, "image", "evict", "left")
		b.Must(t, "image", "evict", "right")
		var all sync.WaitGroup
		for i := range 4 {
			sb := b.Sandbox(t, c, client.Spec{Image: names[i%2]})
			all.Go(func() { checkSums(t, sb, sums[names[i%2]]) })
		}
		all.Wait()
		for s, err := range c.All(t.Context(), client.ListOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			bed.Remove(t, c.Sandbox(s.ID))
		}
	}
}

// When the object store is gone, reads of what is not here fail: they never give zeros.
func TestAReadFromALostStoreFails(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true})
	sums := noisy(t, b, "lost", 16, 1<<20)
	b.Must(t, "down", "--data", b.Data, "--keep")
	forgetImages(t, b)
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	sb := b.Sandbox(t, b.Client(t), client.Spec{Image: "lost"})
	if _, err := sb.Run(t.Context(), "true"); err != nil {
		t.Fatal(err)
	}
	packs := filepath.Join(b.Data, "store", "pack")
	if err := os.Rename(packs, packs+".away"); err != nil {
		t.Fatal(err)
	}
	res, err := sb.Run(t.Context(), "cat", "/data/15")
	if err != nil || res.Code == 0 || len(res.Stdout) > 0 || !strings.Contains(string(res.Stderr), "Input/output error") {
		t.Errorf("code %d, %d bytes, %q, %v", res.Code, len(res.Stdout), res.Stderr, err)
	}
	if err := os.Rename(packs+".away", packs); err != nil {
		t.Fatal(err)
	}
	checkSums(t, sb, sums)
}

// The server is killed while sandboxes read what is still being fetched, and so is each
// keeper: readers wait for the next server, and see every byte as it is.
func TestReadersOutliveTheServerAndAKeeper(t *testing.T) {
	t.Parallel()
	readersOutlive(t, "--store-rate", fmt.Sprint(8<<20))
}

// The same where the kernel has no pre-content events; and the next server may use another way, while
// readers go on by the old one.
func TestReadersOutliveTheServerByFUSE(t *testing.T) {
	t.Parallel()
	rate := []string{"--store-rate", fmt.Sprint(8 << 20)}
	b, sb, sums := readersOutlive(t, append(rate, "--image-loading", "fuse")...)
	said := func(mode, why string) {
		t.Helper()
		if u := bed.JSON[v1.ImageUsage](t, b, "image", "du", "--json"); len(u.Nodes) != 1 || u.Nodes[0].Mode != mode {
			t.Errorf("images are loaded by %+v, want %s", u.Nodes, mode)
		}
		if r := b.CLI(t, "doctor", "--data", b.Data); !strings.Contains(r.Stdout, "images on demand by "+mode+": "+why) {
			t.Errorf("doctor says\n%s%s", r.Stdout, r.Stderr)
		}
	}
	said("fuse", "--image-loading asks for it")
	b.Fails(t, 2, "", "up", "--data", b.Data, "--image-loading", "nfs")

	lateSums := noisy(t, b, "late", 6, 1<<20)
	b.Must(t, "image", "evict", "late")
	late := b.Sandbox(t, b.Client(t), client.Spec{Image: "late"}) // little of it is here yet
	b.Must(t, "down", "--data", b.Data, "--keep")
	b.SetFlags(rate...)
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := b.Client(t)
	mode := "fuse"
	if u := bed.JSON[v1.ImageUsage](t, b, "image", "du", "--json"); u.Nodes[0].Mode == "fanotify" { // a newer kernel
		mode = "fanotify"
	}
	said(mode, "the first that works here")
	checkSums(t, c.Sandbox(sb.ID()), sums)
	checkSums(t, c.Sandbox(late.ID()), lateSums)
	checkSums(t, b.Sandbox(t, c, client.Spec{Image: "load"}), sums)
}

// readersOutlive kills a server with these flags while a sandbox reads.
func readersOutlive(t *testing.T, flags ...string) (*bed.Bed, *client.Sandbox, map[string]string) {
	t.Helper()
	b := bed.New(t, bed.Options{NoImage: true, Flags: flags})
	sums := noisy(t, b, "load", 12, 2<<20)
	b.Must(t, "down", "--data", b.Data, "--keep")
	forgetImages(t, b)
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	sb := b.Sandbox(t, b.Client(t), client.Spec{Image: "load"})
	// It writes its sums into the sandbox: the connection ends with the server.
	if res, err := sb.Run(t.Context(), "sh", "-c", "(sha256sum /data/* >/tmp/sums; echo $? >/tmp/code) </dev/null >/dev/null 2>&1 &"); err != nil || res.Code != 0 {
		t.Fatal(res, err)
	}
	for n := range 4 {
		before := filled(t, b)
		bed.Eventually(t, "something is fetched", func() error {
			if filled(t, b) <= before {
				return fmt.Errorf("%d bytes", before)
			}
			return nil
		})
		killKeeper(t, b, n%2)
		b.Kill(t)
		if err := b.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	sb = b.Client(t).Sandbox(sb.ID())
	bed.Eventually(t, "the sums are made", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		res, err := sb.Run(ctx, "cat", "/tmp/code")
		if err != nil || res.Code != 0 {
			return fmt.Errorf("%+v, %w", res, err)
		}
		if code := strings.TrimSpace(string(res.Stdout)); code != "0" {
			t.Fatalf("sha256sum ended with %s", code)
		}
		return nil
	})
	res, err := sb.Run(t.Context(), "cat", "/tmp/sums")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(res.Stdout)) {
		if sum, name, _ := strings.Cut(strings.TrimSpace(line), "  "); sums[name] != sum {
			t.Errorf("wrong content: %s", line)
		}
	}
	checkSums(t, sb, sums)
	return b, sb, sums
}

// killKeeper kills one of the node's keepers.
func killKeeper(t *testing.T, b *bed.Bed, slot int) {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if keeper.DirOf(e.Name()) != filepath.Join(b.Data, "keeper") {
			continue
		}
		args, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err != nil || !strings.Contains(string(args), fmt.Sprintf("-slot\x00%d\x00", slot)) {
			continue
		}
		var pid int
		if _, err := fmt.Sscan(e.Name(), &pid); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && err != syscall.ESRCH {
			t.Fatal(err)
		}
		return
	}
	t.Errorf("no keeper %d runs", slot)
}

// Without read-ahead nothing is fetched that nobody asked for; with it, a file's rest is.
func TestReadAheadIsAdjustable(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{nil, {"--image-read-ahead", "0"}} {
		b := bed.New(t, bed.Options{NoImage: true, Flags: flags})
		noisy(t, b, "ahead", 4, 400<<10)
		b.Must(t, "image", "evict", "ahead")
		c := b.Client(t)
		if res, err := b.Sandbox(t, c, client.Spec{Image: "ahead"}).Run(t.Context(), "dd", "if=/data/02", "of=/dev/null", "bs=4096", "count=1"); err != nil || res.Code != 0 {
			t.Fatalf("%+v, %v", res, err)
		}
		if n := bed.Metrics(t, c)["dsec_image_cache_ahead_bytes_total"]; n > 0 != (flags == nil) {
			t.Errorf("%v: %v bytes were fetched ahead", flags, n)
		}
	}
}
