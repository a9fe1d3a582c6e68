package e2e

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

// packBytes is what the object store has of data.
func packBytes(t *testing.T, b *bed.Bed) (bytes int64) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(b.Data, "store", "pack"), func(_ string, d fs.DirEntry, err error) error {
		if os.IsNotExist(err) {
			return nil
		}
		if err == nil && !d.IsDir() {
			fi, ierr := d.Info()
			if err = ierr; err == nil {
				bytes += fi.Size()
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

func usage(t *testing.T, b *bed.Bed, name string) v1.ImageUse {
	t.Helper()
	var u v1.ImageUsage
	if err := json.Unmarshal([]byte(b.Must(t, "image", "du", "--json")), &u); err != nil {
		t.Fatal(err)
	}
	for _, i := range u.Items {
		if i.Name == name {
			return i
		}
	}
	t.Fatalf("no image %s in %+v", name, u)
	return v1.ImageUse{}
}

func cachedBytes(u v1.ImageUse) (n int64) {
	for _, c := range u.Cached {
		n += c
	}
	return n
}

// What is removed is refused while it is needed, and gone from store and node when it is not.
func TestAnImageIsCollectedWhenNothingNeedsIt(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true})
	c := b.Client(t)
	sums := noisy(t, b, "kept", 4, 1<<20)
	noisy(t, b, "going", 4, 1<<20)
	before := packBytes(t, b)
	if u := usage(t, b, "going"); u.OwnStored < 4<<20 || u.SharedStored < 100<<10 || cachedBytes(u) < 4<<20 {
		t.Errorf("%+v", u)
	}
	sb := b.Sandbox(t, c, client.Spec{Image: "going"})
	if r := b.Fails(t, 1, string(errs.ImageInUse), "image", "rm", "going"); !strings.Contains(r.Stderr, sb.ID()) {
		t.Errorf("it is not said what needs the image: %s", r.Stderr)
	}
	// Replaced, so that only the sandbox has it.
	small := t.TempDir()
	if err := os.WriteFile(filepath.Join(small, "file"), []byte("small"), 0o644); err != nil {
		t.Fatal(err)
	}
	b.Must(t, "image", "import", "going", small)
	b.Must(t, "image", "gc", "--grace", "0")
	if res, err := sb.Run(t.Context(), "sh", "-c", "cat /data/* >/dev/null"); err != nil || res.Code != 0 {
		t.Errorf("a collection took what a sandbox reads: %+v, %v", res, err)
	}
	bed.Remove(t, sb)
	ageOwn(t, b)
	var passes int
	last, err := c.CollectImages(t.Context(), 0, func(v1.CollectReport) { passes++ })
	if err != nil || !last.Done || passes != 3 {
		t.Fatalf("%d passes, %+v, %v", passes, last, err)
	}
	b.Must(t, "image", "gc", "--grace", "0") // packs that were copied go one after the other
	if after := packBytes(t, b); after > before-3<<20 {
		t.Errorf("%d bytes of packs, %d before", after, before)
	}
	b.Must(t, "image", "evict", "kept")
	if u := usage(t, b, "kept"); cachedBytes(u) != 0 {
		t.Errorf("after evicting: %+v", u)
	}
	checkSums(t, b.Sandbox(t, c, client.Spec{Image: "kept"}), sums)
}

// ageOwn makes the next server take images that were made on the node for older than an
// hour: the catalogue has had the time to know them.
func ageOwn(t *testing.T, b *bed.Bed) {
	t.Helper()
	b.Must(t, "down", "--data", b.Data, "--keep")
	dir := filepath.Join(b.Data, "images", "own")
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) == 0 {
		t.Fatal(len(entries), err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		var own map[string]any
		p, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(p, &own)
		}
		if err != nil {
			t.Fatal(err)
		}
		own["unix_ms"] = time.Now().Add(-2 * time.Hour).UnixMilli()
		if p, err = json.Marshal(own); err == nil {
			err = os.WriteFile(path, p, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestAnImageIsWarmedByWhatItsFirstStartRead(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true})
	sums := noisy(t, b, "traced", 32, 1<<20)
	c := b.Client(t)
	cold := func() {
		t.Helper()
		if out := b.Must(t, "image", "evict", "traced"); !strings.Contains(out, "freed ") {
			t.Error(out)
		}
	}
	cold()
	if out := b.Must(t, "image", "warm", "traced"); !strings.Contains(out, "no start of the image was recorded") {
		t.Error(out)
	}
	sb := b.Sandbox(t, c, client.Spec{Image: "traced"})
	if res, err := sb.Run(t.Context(), "cat", "/data/20"); err != nil || res.Code != 0 {
		t.Fatal(res, err)
	}
	bed.Eventually(t, "the trace is kept", func() error {
		_, err := os.Stat(filepath.Join(b.Data, "store", "trace"))
		return err
	})
	bed.Remove(t, sb)
	cold()
	last, err := c.WarmImage(t.Context(), "traced", client.WarmOptions{})
	if err != nil || len(last) != 1 || !last[0].Trace || last[0].Done < 1<<20 || last[0].Done > 12<<20 {
		t.Errorf("%+v, %v", last, err)
	}
	fetched := func(sb *client.Sandbox) (n int64) {
		info, err := c.Get(t.Context(), sb.ID())
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range info.Layers {
			n += l.FetchedBytes
		}
		return n
	}
	sb = b.Sandbox(t, c, client.Spec{Image: "traced"})
	before := fetched(sb)
	if res, err := sb.Run(t.Context(), "cat", "/data/20"); err != nil || res.Code != 0 {
		t.Fatal(res, err)
	}
	if now := fetched(sb); now-before > 6<<20 {
		t.Errorf("%d bytes were fetched although all that is read was warm", now-before)
	}
	last, err = c.WarmImage(t.Context(), "traced", client.WarmOptions{All: true})
	if err != nil || len(last) != 1 || last[0].Done != last[0].Total || last[0].Total < 32<<20 {
		t.Errorf("%+v, %v", last, err)
	}
	checkSums(t, sb, sums)
	if m := bed.Metrics(t, c); m["dsec_image_cache_fetched_bytes_total"] < 32<<20 {
		t.Errorf("metrics say %v", m["dsec_image_cache_fetched_bytes_total"])
	}
}
