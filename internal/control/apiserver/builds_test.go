package apiserver_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

// A collection removes of what builds keep what was not used for long and what is too much, the longest
// unused first, but nothing that a sandbox, a snapshot or a build under way needs, and nothing that others
// were built on.
func TestACollectionBoundsWhatBuildsKeep(t *testing.T) {
	t.Parallel()
	s := newStock(t)
	const day = 24 * time.Hour
	layer := func(n, mib int64) v1.Layer {
		return v1.Layer{Kind: v1.KindBase, MetaDigest: fmt.Sprintf("%064d", n), MetaBytes: mib << 20}
	}
	w := newWorld(t, over(s), func(c *control.Config, _ *controltest.Config) {
		c.BuildCacheAge, c.BuildCacheBytes = 10*day, 100<<20
	})
	n := 0
	put := func(name string, unused time.Duration, layers ...v1.Layer) v1.Image {
		n++
		at := time.Now().Add(-unused)
		img := v1.Image{Name: name, Digest: "sha256:" + fmt.Sprintf("%064d", n), Layers: layers, CreatedAt: time.Now().Add(-20 * day), UsedAt: &at}
		if _, err := w.store.PutImage(t.Context(), img); err != nil {
			t.Fatal(err)
		}
		return img
	}
	base, shared := layer(1, 30), layer(2, 500)
	put("build-base:live", 11*day, base) // a step that was made on it was used since
	put("build-step:live", 9*day, base, layer(3, 20))
	put("build-base:old", 11*day, layer(4, 1))
	needed := put("build-base:needed", 12*day, layer(5, 1))
	put("build-step:free", 8*day, shared) // to remove it gains nothing
	put("build-step:young", time.Minute, layer(6, 60))
	put("plain", 30*day, shared)
	put("build-step:last", 5*day, base, layer(7, 30))
	onIt := put("snap:on", 20*day, layer(8, 1))
	onIt.Snapshot = &v1.Snapshot{Parents: []string{needed.Digest}}
	if _, err := w.store.PutImage(t.Context(), onIt); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the catalogue is followed", func() bool {
		status, _, raw := w.do("GET", "/v1/images/snap:on", nil)
		return status == 200 && strings.Contains(string(raw), needed.Digest)
	})
	u := want[v1.ImageUsage](w, 200, "GET", "/v1/store/usage", nil).Builds
	if u.Images != 7 || u.Bytes != (30+20+1+1+60+30)<<20 || u.LimitBytes != 100<<20 || u.AgeSeconds != 10*24*3600 {
		t.Errorf("%+v", u)
	}
	_, _, raw := w.do("POST", "/v1/store/collect?grace_s=0", nil)
	r := lines[v1.CollectReport](t, raw)
	// 142 MiB are too many: without the old one 141, without the live step 121, without the last step 91,
	// which is few enough for the base of both to stay.
	if len(r) == 0 || r[0].Builds != 3 || slices.ContainsFunc(r[1:], func(r v1.CollectReport) bool { return r.Builds != 0 }) {
		t.Errorf("%s", raw)
	}
	var left []string
	for _, img := range want[v1.ImageList](w, 200, "GET", "/v1/images", nil).Items {
		left = append(left, img.Name)
	}
	if got := strings.Join(left, " "); got != "build-base:live build-base:needed build-step:free build-step:young debian plain snap:on" {
		t.Errorf("left are %s", got)
	}
}

// A create from what a build keeps is noted, by the hour.
func TestTheUseOfWhatBuildsKeepIsNoted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	long := time.Now().Add(-48 * time.Hour)
	img := testImage
	img.Name, img.UsedAt = "build-step:x", &long
	if _, err := w.store.PutImage(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	used := func(name string) *time.Time { return want[v1.Image](w, 200, "GET", "/v1/images/"+name, nil).UsedAt }
	eventually(t, "the catalogue is followed", func() bool {
		status, _, _ := w.do("GET", "/v1/images/build-step:x", nil)
		return status == 200
	})
	want[v1.Sandbox](w, 201, "POST", "/v1/sandboxes", v1.Spec{Image: "build-step:x"})
	first := used("build-step:x")
	if first == nil || time.Since(*first) > time.Minute {
		t.Fatalf("used %v", first)
	}
	want[v1.Sandbox](w, 201, "POST", "/v1/sandboxes", v1.Spec{Image: "build-step:x"})
	if again := used("build-step:x"); !again.Equal(*first) {
		t.Errorf("noted again at %v, after %v", again, first)
	}
	want[v1.Sandbox](w, 201, "POST", "/v1/sandboxes", v1.Spec{Image: "debian"})
	if at := used("debian"); at != nil {
		t.Errorf("the use of another image is noted: %v", at)
	}
}
