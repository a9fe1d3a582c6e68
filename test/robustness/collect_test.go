package robustness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dsec/internal/image"
	"dsec/test/bed"
)

// What a node needs, has and is to keep may be more than one message between server and node
// can have: ten thousands of layers.
func TestANodeOfManyLayersIsCollected(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	b.Kill(t)
	note := func(dir, name string, v any) {
		t.Helper()
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(b.Data, "images", dir, name+".json"), raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const many = 20_000
	list := make([]image.Layer, many)
	for i := range list {
		d := fmt.Sprintf("%064x", i)
		list[i] = image.Layer{Kind: image.KindDiff, MetaDigest: d, MetaSize: 8192, MetaObject: "meta/" + d + "." + d[48:]}
		if i < many/2 {
			note("layers", d, list[i])
		}
	}
	// As if they had just been made here; the catalogue does not have them yet.
	note("own", strings.Repeat("0", 32), map[string]any{"unix_ms": time.Now().UnixMilli(), "digest": "sha256:" + strings.Repeat("0", 64), "layers": list})
	note("layers", strings.Repeat("f", 64), image.Layer{MetaDigest: strings.Repeat("f", 64), MetaSize: 8192, MetaObject: "meta/" + strings.Repeat("f", 64) + "." + strings.Repeat("f", 16)})
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := b.CLI(t, "image", "gc"); r.Code != 0 || !strings.Contains(r.Stdout+r.Stderr, "2000") { // and those of the images
		t.Errorf("gc: %+v", r)
	}
	b.Must(t, "image", "du")
	// The node was told: it forgot the layer that nothing needs, and no other.
	left, err := os.ReadDir(filepath.Join(b.Data, "images", "layers"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range left {
		if strings.HasPrefix(e.Name(), "ffff") {
			t.Errorf("%s is still there", e.Name())
		}
	}
	if len(left) < many/2 {
		t.Errorf("%d notes of layers are left", len(left))
	}
}
