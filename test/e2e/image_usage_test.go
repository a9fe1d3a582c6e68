package e2e

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/client"
	"dsec/internal/image/lazy"
	"dsec/test/bed"
)

// Two sandboxes that read different files of a cold image have what they read each, and
// with what others read that is all that the node has read and fetched, however readers
// are stopped.
func TestEachSandboxHasItsOwnReads(t *testing.T) {
	t.Parallel()
	for _, mode := range []lazy.Mode{lazy.Fanotify, lazy.FUSE} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			testOwnReads(t, mode)
		})
	}
}

func testOwnReads(t *testing.T, mode lazy.Mode) {
	b := bed.New(t, bed.Options{NoImage: true, Flags: []string{"--image-loading", string(mode)}})
	noisy(t, b, "shared", 16, 2<<20)
	b.Must(t, "image", "evict", "shared")
	c := b.Client(t)
	const file = 2 << 20
	read := func(sb *client.Sandbox, script string) {
		t.Helper()
		if res, err := sb.Run(t.Context(), "sh", "-c", script); err != nil || res.Code != 0 {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	get := func(sb *client.Sandbox) *v1.Sandbox {
		t.Helper()
		info, err := c.Get(t.Context(), sb.ID())
		if err != nil || info.Usage == nil {
			t.Fatalf("%+v, %v", info, err)
		}
		return info
	}
	one, two := b.Sandbox(t, c, client.Spec{Image: "shared"}), b.Sandbox(t, c, client.Spec{Image: "shared"})
	read(one, "cat /data/02 >/dev/null")
	atOnce := *get(two).Usage
	read(two, "cat /data/07 /data/12 >/dev/null") // in a process that ends at once
	for _, x := range []struct {
		name string
		sb   *client.Sandbox
		want int64
	}{{"one", one, file}, {"two", two, 2 * file}} {
		u := get(x.sb).Usage
		const slack = 3 << 20 // busybox, and what is fetched ahead
		if u.ImageReadBytes < x.want || u.ImageReadBytes > x.want+slack || u.ImageFetchedBytes < x.want || u.ImageFetchedBytes > x.want+slack ||
			u.ImageWaitedBytes <= 0 || u.ImageWaitedBytes > u.ImageReadBytes || u.ImageWaitSeconds <= 0 {
			t.Errorf("%s read %d bytes: %+v", x.name, x.want, u)
		}
	}
	if u := atOnce; u.ImageReadBytes > 2<<20 {
		t.Errorf("what one reads counts for two: %+v", u)
	}
	// A warm-up is nobody's, and saves the wait.
	b.Must(t, "image", "warm", "--all", "shared")
	before := *get(one).Usage
	bed.Eventually(t, "all that is fetched is somebody's", func() error {
		u1, u2 := get(one), get(two)
		var layer v1.LayerCache
		for _, l := range u1.Layers {
			layer.ReadBytes += l.ReadBytes
			layer.FetchedBytes += l.FetchedBytes
		}
		fetched := u1.Usage.ImageFetchedBytes + u2.Usage.ImageFetchedBytes + series(t, c, `dsec_image_cache_use_bytes_total{by="others",kind="fetched"}`)
		got := u1.Usage.ImageReadBytes + u2.Usage.ImageReadBytes + series(t, c, `dsec_image_cache_use_bytes_total{by="others",kind="read"}`)
		if fetched != layer.FetchedBytes || got != layer.ReadBytes {
			return fmt.Errorf("%d of %d bytes fetched, %d of %d read", fetched, layer.FetchedBytes, got, layer.ReadBytes)
		}
		return nil
	})
	if n := series(t, c, `dsec_image_cache_use_bytes_total{by="others",kind="fetched"}`); n < 20<<20 {
		t.Errorf("a warm-up of 26 MiB counts as %d", n)
	}
	if n := series(t, c, `dsec_image_cache_use_bytes_total{by="sandboxes",kind="fetched"}`); n != get(one).Usage.ImageFetchedBytes+get(two).Usage.ImageFetchedBytes {
		t.Errorf("metrics have %d for all sandboxes", n)
	}
	if n := series(t, c, `dsec_sandbox_image_bytes{kind="fetched",sandbox="`+one.ID()+`"}`); n != get(one).Usage.ImageFetchedBytes {
		t.Errorf("metrics have %d for one sandbox", n)
	}
	read(one, "cat /data/15 >/dev/null")
	if u := get(one).Usage; u.ImageFetchedBytes != before.ImageFetchedBytes || u.ImageWaitedBytes != before.ImageWaitedBytes {
		t.Errorf("reads of what is warm: %+v, before %+v", u, before)
	}
	// It is what the CLI shows, and the next server knows it too.
	before = *get(one).Usage
	b.Must(t, "down", "--data", b.Data, "--keep")
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	var stats v1.Usage
	if err := json.Unmarshal([]byte(b.Must(t, "stats", "--json", "--interval", "0", one.ID())), &stats); err != nil {
		t.Fatal(err)
	}
	if stats.ImageReadBytes != before.ImageReadBytes || stats.ImageWaitedBytes != before.ImageWaitedBytes || stats.ImageWaitSeconds != before.ImageWaitSeconds ||
		stats.ImageFetchedBytes != before.ImageFetchedBytes {
		t.Errorf("after a restart %+v, before %+v", stats, before)
	}
	if out := b.Must(t, "inspect", one.ID()); !strings.Contains(out, "image read") || !strings.Contains(out, "from the node's cache") {
		t.Error(out)
	}
}

// series is one of the server's metrics, by name and labels.
func series(t *testing.T, c *client.Client, name string) int64 {
	t.Helper()
	text, err := c.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, name+" "); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
			if err != nil {
				t.Fatal(err)
			}
			return int64(n)
		}
	}
	t.Fatalf("no series %s", name)
	return 0
}
