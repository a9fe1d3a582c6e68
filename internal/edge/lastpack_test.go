package edge

import (
	"encoding/json"
	"slices"
	"testing"

	v1 "dsec/api/v1"
	"dsec/internal/snapshot"
)

// someImages has some images.
type someImages struct {
	noImages
	has map[string]bool
}

func (i *someImages) Has(digest string) bool { return i.has[digest] }

// What the next pack of a sandbox may go on is kept in the object store until the node has
// heard of its removal, and while a pack is being made on it.
func TestTheLastSnapshotIsKeptForTheNext(t *testing.T) {
	t.Parallel()
	images := &someImages{has: map[string]bool{"sha256:last": true}}
	e := &Edge{cfg: Config{Images: images}, sandboxes: map[string]*sandbox{}}
	s := newSandbox(nil, &v1.Image{Digest: "sha256:base", Layers: []v1.Layer{{MetaDigest: "base"}}}, v1.Sandbox{ID: "one"})
	e.sandboxes["one"] = s
	check := func(when string, want ...string) {
		t.Helper()
		d, err := e.serveImageRoots(t.Context(), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		var roots []v1.Layer
		if err := json.Unmarshal(d.Json, &roots); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range roots {
			got = append(got, l.MetaDigest)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", when, got, want)
		}
	}
	check("before", "own", "base")
	last := v1.Image{Digest: "sha256:last", Layers: []v1.Layer{{MetaDigest: "base"}, {MetaDigest: "diff"}}}
	e.setLast(s, &lastPack{last, &snapshot.Seen{}})
	check("after a snapshot", "own", "base", "diff")
	if !e.packOn(s, last.Digest) {
		t.Error("it is not there")
	}
	delete(images.has, last.Digest)
	check("removed while a pack is made on it", "own", "base", "diff")
	e.packOn(s, "")
	check("removed", "own", "base")
	if e.packOn(s, last.Digest) {
		t.Error("a pack would go on what was removed")
	}
	e.packOn(s, "")
	images.has[last.Digest] = true
	check("made again", "own", "base", "diff")
	e.forgetPack(s)
	check("the sandbox is going", "own", "base")
}
