package apiserver_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

// chained is an image of a base and n layers of snapshots.
func chained(name string, n int) v1.Image {
	img := v1.Image{Name: name, Digest: "sha256:" + strings.Repeat("c", 64), Layers: []v1.Layer{{Kind: v1.KindBase, MetaDigest: "base"}}}
	for i := range n {
		img.Layers = append(img.Layers, v1.Layer{Kind: v1.KindDiff, MetaDigest: fmt.Sprint("diff", i), MetaBytes: 100})
	}
	return img
}

func (w *world) layersOf(name string) string {
	var all []string
	for _, l := range want[v1.Image](w, 200, "GET", "/v1/images/"+name, nil).Layers {
		all = append(all, l.MetaDigest)
	}
	return strings.Join(all, " ")
}

// All names of an image get the layers that an edge made of it, and an image that has less of them to
// lose than is worth it is left alone unless somebody asks.
func TestCollapse(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one, other := chained("one", 3), chained("two", 3)
	elsewhere := chained("three", 3)
	elsewhere.Layers[1].MetaObject = "elsewhere" // the same content, stored apart: not to be touched
	for _, img := range []v1.Image{one, other, elsewhere} {
		if _, err := w.store.PutImage(t.Context(), img); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the catalogue is followed", func() bool {
		status, _, _ := w.do("GET", "/v1/images/three", nil)
		return status == 200
	})
	_, _, raw := w.do("POST", "/v1/store/collapse?image=one&below=1000", nil)
	p := lines[v1.ImageProgress](t, raw)
	if n := len(p); n != 2 || p[0].Phase != "merge" || p[1].Image == nil || p[1].Image.Name != "one" || p[1].Image.Digest != one.Digest ||
		len(p[1].Image.Layers) != 2 || p[1].Image.Layers[1].MetaBytes != 1000 || len(p[1].Image.Made) != 4 {
		t.Errorf("%s", raw)
	}
	for name, want := range map[string]string{"one": "base merged", "two": "base merged", "three": "base diff0 diff1 diff2"} {
		if got := w.layersOf(name); got != want {
			t.Errorf("%s has %s, want %s", name, got, want)
		}
	}
	// Again: there is nothing to do.
	if _, _, raw = w.do("POST", "/v1/store/collapse?image=one", nil); len(lines[v1.ImageProgress](t, raw)) != 2 || w.layersOf("one") != "base merged" {
		t.Errorf("%s", raw)
	}
	w.problem("image_not_found", "POST", "/v1/store/collapse?image=none", nil)
	w.problem("bad_request", "POST", "/v1/store/collapse?image=one&below=0", nil)
}

// What is long is collapsed without being asked, what is short is not.
func TestCollapseInTheBackground(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *control.Config, _ *controltest.Config) {
		c.CollapseBelow, c.CollapseEvery = 1000, 10*time.Millisecond
	})
	short, long, large := chained("short", 8), chained("long", 9), chained("large", 9)
	short.Digest, large.Digest = "sha256:"+strings.Repeat("d", 64), "sha256:"+strings.Repeat("e", 64)
	for i := range large.Layers {
		large.Layers[i].DataBytes = 1000
	}
	for _, img := range []v1.Image{short, large, long} {
		if _, err := w.store.PutImage(t.Context(), img); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the long image is collapsed", func() bool {
		status, _, raw := w.do("GET", "/v1/images/long", nil)
		return status == 200 && strings.Contains(string(raw), "merged")
	})
	// By name the others came before it.
	for _, img := range []v1.Image{short, large} {
		if got := w.layersOf(img.Name); strings.Contains(got, "merged") {
			t.Errorf("%s has %s", img.Name, got)
		}
	}
}
