package local

import (
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/image"
)

// wire is an image as the API has it.
func wire(img image.Image) v1.Image {
	out := v1.Image{
		Digest: img.Digest, CreatedAt: time.UnixMilli(img.CreatedUnixMS).UTC(), Bytes: img.SizeBytes, Files: img.Files,
		Config: v1.ImageConfig(img.Config),
	}
	for _, l := range img.Layers {
		out.Layers = append(out.Layers, v1.Layer{
			Kind: l.Kind, MetaDigest: l.MetaDigest, MetaBytes: l.MetaSize, DataDigest: l.DataDigest, DataBytes: l.DataSize,
			Parent: l.Parent, View: l.View, Replaces: l.Replaces,
		})
	}
	if img.Snapshot != nil {
		s := v1.Snapshot(*img.Snapshot)
		out.Snapshot = &s
	}
	return out
}

// stored is a layer as the store has it.
func stored(l v1.Layer) image.Layer {
	return image.Layer{
		Kind: l.Kind, MetaDigest: l.MetaDigest, MetaSize: l.MetaBytes, DataDigest: l.DataDigest, DataSize: l.DataBytes,
		Parent: l.Parent, View: l.View, Replaces: l.Replaces,
	}
}
