package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dsec/client"
	"dsec/test/bed"
)

// A full disk under the cache: reads fail, they never give zeros, and go on when there is
// room again.
func TestAFullCacheDiskFailsReads(t *testing.T) {
	t.Parallel()
	store := t.TempDir()
	b := bed.New(t, bed.Options{NoImage: true, Prepare: small(400 << 20), Flags: []string{"--reserve-disk", "0", "--store", store}})
	sums := noisy(t, b, "big", 16, 2<<20)
	b.Must(t, "image", "evict", "big")
	sb := b.Sandbox(t, b.Client(t), client.Spec{Image: "big"})
	if res, err := sb.Run(t.Context(), "true"); err != nil || res.Code != 0 {
		t.Fatal(res, err)
	}
	free := fill(t, b.Data)
	res, err := sb.Run(t.Context(), "sh", "-c", "for f in /data/*; do sha256sum $f; done")
	if err != nil || res.Code == 0 {
		t.Errorf("reading 32 MiB onto a full disk: %d, %v", res.Code, err)
	}
	for line := range strings.Lines(string(res.Stdout)) {
		if sum, name, _ := strings.Cut(strings.TrimSpace(line), "  "); sums[name] != sum {
			t.Errorf("wrong content on a full disk: %s", line)
		}
	}
	free()
	checkSums(t, sb, sums)
}

// The cache is kept below its limit while sandboxes read more than that, right.
func TestACacheWithALimitServesEveryByte(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true, Flags: []string{"--image-cache", "8MiB"}})
	one, two := noisy(t, b, "one", 12, 2<<20), noisy(t, b, "two", 12, 2<<20)
	c := b.Client(t)
	for range 2 {
		for name, sums := range map[string]map[string]string{"one": one, "two": two} {
			sb, err := c.Create(t.Context(), client.Spec{Image: name})
			if err != nil {
				t.Fatal(err)
			}
			checkSums(t, sb, sums)
			bed.Remove(t, sb)
		}
	}
	if m := bed.Metrics(t, c); m["dsec_image_cache_limit_bytes"] != 8<<20 {
		t.Errorf("limit %v", m["dsec_image_cache_limit_bytes"])
	}
}

// The server is killed while it imports: the next one has all images of before, nothing
// of the half one, and takes it again.
func TestAKilledImportLeavesNothingHalf(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true, Flags: []string{"--store-rate", fmt.Sprint(40 << 20)}})
	sums := noisy(t, b, "kept", 4, 1<<20)
	rnd := bed.Random(t)
	tree := t.TempDir()
	for i := range 16 {
		p := make([]byte, 2<<20)
		for j := range p {
			p[j] = byte(rnd.Uint32())
		}
		if err := os.WriteFile(filepath.Join(tree, fmt.Sprint(i)), p, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for range 4 {
		wait := time.Duration(rnd.Int64N(int64(900 * time.Millisecond)))
		done := make(chan bed.Result)
		ctx, cancel := context.WithTimeout(t.Context(), bed.Patience)
		go func() { done <- b.Run(ctx, nil, "image", "import", "half", tree) }()
		time.Sleep(wait)
		b.Kill(t)
		r := <-done
		cancel()
		if err := b.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		left, err := os.ReadDir(filepath.Join(b.Data, "images", "tmp"))
		if err != nil || len(left) != 0 {
			t.Errorf("after a kill at %v: %v, %v", wait, left, err)
		}
		if listed := strings.Contains(b.Must(t, "image", "ls", "-q"), "half"); listed != (r.Code == 0) && r.Code == 0 {
			t.Errorf("the import answered %d, and the image is listed: %v", r.Code, listed)
		}
		b.Must(t, "image", "gc", "--grace", "0")
		b.Must(t, "image", "evict", "kept")
		sb, err := b.Client(t).Create(t.Context(), client.Spec{Image: "kept"})
		if err != nil {
			t.Fatal(err)
		}
		checkSums(t, sb, sums)
		bed.Remove(t, sb)
	}
	b.Must(t, "image", "import", "half", tree)
	b.Must(t, "image", "evict", "half")
	b.Must(t, "image", "warm", "half", "--all")
}

// The server is killed while it collects garbage: what is needed stays whole, and the
// garbage goes in the end.
func TestAKilledCollectionTakesNothingThatIsNeeded(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true, Flags: []string{"--store-latency", "3ms"}})
	sums := noisy(t, b, "kept", 4, 1<<20)
	for i := range 3 {
		name := fmt.Sprint("going-", i)
		noisy(t, b, name, 4, 1<<20)
		b.Must(t, "image", "rm", name)
	}
	before := packBytes(t, b)
	ageOwn(t, b)
	rnd := bed.Random(t)
	for range 5 {
		wait := time.Duration(rnd.Int64N(int64(400 * time.Millisecond)))
		done := make(chan bed.Result)
		ctx, cancel := context.WithTimeout(t.Context(), bed.Patience)
		go func() { done <- b.Run(ctx, nil, "image", "gc", "--grace", "0") }()
		time.Sleep(wait)
		b.Kill(t)
		<-done
		cancel()
		if err := b.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		b.Must(t, "image", "evict", "kept")
		sb, err := b.Client(t).Create(t.Context(), client.Spec{Image: "kept"})
		if err != nil {
			t.Fatal(err)
		}
		checkSums(t, sb, sums)
		bed.Remove(t, sb)
	}
	// As if the leases of the dead had run out, a quarter of an hour later.
	b.Kill(t)
	if err := os.RemoveAll(filepath.Join(b.Data, "store", "lease")); err != nil {
		t.Fatal(err)
	}
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	bed.Eventually(t, "the garbage is gone", func() error {
		if r := b.CLI(t, "image", "gc", "--grace", "0"); r.Code != 0 {
			return errors.New(r.Stderr) // the killed one's claim is still there
		}
		if after := packBytes(t, b); after > before-9<<20 {
			return fmt.Errorf("%d bytes of packs, %d before", after, before)
		}
		return nil
	})
}
