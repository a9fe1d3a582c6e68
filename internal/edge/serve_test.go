package edge

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"dsec/aether"
	v1 "dsec/api/v1"
)

// The protocol's page names every method of an edge.
func TestMethodsAreDocumented(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/aether.md")
	if err != nil {
		t.Fatal(err)
	}
	for method := range new(Edge).handlers() {
		if !strings.Contains(string(page), "`"+method+"`") {
			t.Errorf("docs/aether.md does not have %s", method)
		}
	}
}

// Apiservers relay clients' streams by the method's name alone.
func TestControlMethodsAreNotRelayed(t *testing.T) {
	t.Parallel()
	for method := range (&Edge{}).handlers() {
		if g := aether.GuestGroup(method); g != "" || method == aether.MethodBatch {
			t.Errorf("%s would be relayed for clients, as of group %q", method, g)
		}
	}
}

// hasImages has every image.
type hasImages struct{ noImages }

func (hasImages) Has(string) bool { return true }

// The collector leaves alone what a sandbox's next pack may be made on, while the node has that image.
func TestRootsHaveWhatTheNextPackIsMadeOn(t *testing.T) {
	t.Parallel()
	last := &lastPack{image: v1.Image{Digest: "sha256:s", Layers: []v1.Layer{{MetaDigest: "below"}, {MetaDigest: "packed"}}}}
	sandboxes := map[string]*sandbox{"a": {image: &v1.Image{Layers: []v1.Layer{{MetaDigest: "below"}}}, last: last}}
	for want, images := range map[string]Images{"own below": noImages{}, "own below packed": hasImages{}} {
		e := &Edge{cfg: Config{Images: images}, sandboxes: sandboxes}
		doc, err := e.serveImageRoots(t.Context(), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		var roots []v1.Layer
		if err := json.Unmarshal(doc.Json, &roots); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range roots {
			got = append(got, l.MetaDigest)
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("roots are %s, want %s", s, want)
		}
	}
}
