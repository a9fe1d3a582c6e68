package local

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image"
)

// Whoever writes an archive also makes its digest: what it says is checked by itself.
func TestDescriptionsOfArchives(t *testing.T) {
	t.Parallel()
	digest := "sha256:" + strings.Repeat("0a", 32)
	good := func() image.Image {
		return image.Image{
			Digest: digest, Layers: []image.Layer{{Kind: image.KindBase}, {Kind: image.KindToolkit}, {Kind: image.KindDiff}},
			Snapshot: &image.Snapshot{
				Source: "si2gzu3aaaabbpeakqrtvo", Parents: []string{digest, digest},
				Parts: []image.Part{{Kind: image.KindBase, Digest: digest}, {Kind: image.KindToolkit, Digest: digest}},
			},
		}
	}
	read := func(img image.Image) error {
		raw, err := json.Marshal(archived{Version: archiveVersion, Image: img})
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := addFile(t.Context(), w, archiveHead, bytes.NewReader(raw), int64(len(raw))); err != nil {
			t.Fatal(err)
		}
		_, err = readHead(tar.NewReader(&b))
		return err
	}
	if err := read(good()); err != nil {
		t.Fatal(err)
	}
	for what, forge := range map[string]func(*image.Image){
		"no snapshot":        func(i *image.Image) { i.Snapshot = nil },
		"temporary":          func(i *image.Image) { i.Snapshot.Temporary = true },
		"no layers":          func(i *image.Image) { i.Layers = nil },
		"many layers":        func(i *image.Image) { i.Layers = make([]image.Layer, maxArchived+1) },
		"a layer's kind":     func(i *image.Image) { i.Layers[2].Kind = "../x" },
		"no digest":          func(i *image.Image) { i.Digest = "" },
		"another digest":     func(i *image.Image) { i.Digest = strings.ToUpper(digest) },
		"the source":         func(i *image.Image) { i.Snapshot.Source = "\x1b[31m../.." },
		"no parents":         func(i *image.Image) { i.Snapshot.Parents = nil },
		"a parent":           func(i *image.Image) { i.Snapshot.Parents[1] = "../../x" },
		"a part's digest":    func(i *image.Image) { i.Snapshot.Parts[1].Digest = "sha256:0a" },
		"a part's kind":      func(i *image.Image) { i.Snapshot.Parts[1].Kind = "evil" },
		"two bases":          func(i *image.Image) { i.Snapshot.Parts[1].Kind = image.KindBase },
		"no base":            func(i *image.Image) { i.Snapshot.Parts[0].Kind = image.KindToolkit },
		"a negative count":   func(i *image.Image) { i.Files = -1 },
		"a negative time":    func(i *image.Image) { i.CreatedUnixMS = -1 << 62 },
		"negative left out":  func(i *image.Image) { i.Snapshot.Omitted = -1 },
		"negative new bytes": func(i *image.Image) { i.Snapshot.Bytes = -1 },
	} {
		img := good()
		forge(&img)
		if err := read(img); !errors.Is(err, errs.ImageCorrupt) {
			t.Errorf("%s: got %v", what, err)
		}
	}
}
