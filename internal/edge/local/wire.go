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
	out.Layers, out.Made = wireLayers(img.Layers), wireLayers(img.Made)
	if img.Snapshot != nil {
		s := v1.Snapshot(*img.Snapshot)
		out.Snapshot = &s
	}
	return out
}

func wireLayers(list []image.Layer) []v1.Layer {
	var out []v1.Layer
	for _, l := range list {
		out = append(out, v1.Layer{
			Kind: l.Kind, MetaDigest: l.MetaDigest, MetaBytes: l.MetaSize, DataDigest: l.DataDigest, DataBytes: l.DataSize,
			Parent: l.Parent, View: l.View, Replaces: l.Replaces, MetaObject: l.MetaObject, MapObject: l.MapObject,
		})
	}
	return out
}

// unwire is the image that wire made img of.
func unwire(img *v1.Image) image.Image {
	out := image.Image{
		Digest: img.Digest, CreatedUnixMS: img.CreatedAt.UnixMilli(), SizeBytes: img.Bytes, Files: img.Files, Layers: layers(img),
		Config: image.Config(img.Config),
	}
	if img.Made != nil {
		out.Made = layers(&v1.Image{Layers: img.Made})
	}
	if img.Snapshot != nil {
		s := image.Snapshot(*img.Snapshot)
		out.Snapshot = &s
	}
	return out
}

// layers of an image of the API, lowest first.
func layers(img *v1.Image) []image.Layer {
	out := make([]image.Layer, len(img.Layers))
	for i, l := range img.Layers {
		out[i] = image.Layer{
			Kind: l.Kind, MetaDigest: l.MetaDigest, MetaSize: l.MetaBytes, DataDigest: l.DataDigest, DataSize: l.DataBytes,
			Parent: l.Parent, View: l.View, Replaces: l.Replaces, MetaObject: l.MetaObject, MapObject: l.MapObject,
		}
	}
	return out
}
