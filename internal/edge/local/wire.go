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
	if s := img.Snapshot; s != nil {
		out.Snapshot = &v1.Snapshot{
			Source: s.Source, Parents: s.Parents, Labels: s.Labels, Temporary: s.Temporary, Entries: s.Entries, Bytes: s.Bytes,
			LeftOut: s.LeftOut, Omitted: s.Omitted, Notes: s.Notes,
		}
		for _, p := range s.Parts {
			out.Snapshot.Parts = append(out.Snapshot.Parts, v1.ImagePart{Kind: p.Kind, Name: p.Name, Digest: p.Digest, Layers: wireLayers(p.Layers)})
		}
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
		out.Snapshot = unwireSnapshot(img.Snapshot)
	}
	return out
}

func unwireSnapshot(s *v1.Snapshot) *image.Snapshot {
	return &image.Snapshot{
		Source: s.Source, Parents: s.Parents, Parts: unwireParts(s.Parts), Labels: s.Labels, Temporary: s.Temporary, Entries: s.Entries, Bytes: s.Bytes,
		LeftOut: s.LeftOut, Omitted: s.Omitted, Notes: s.Notes,
	}
}

func unwireParts(list []v1.ImagePart) (out []image.Part) {
	for _, p := range list {
		part := image.Part{Kind: p.Kind, Name: p.Name, Digest: p.Digest}
		if len(p.Layers) > 0 {
			part.Layers = layers(&v1.Image{Layers: p.Layers})
		}
		out = append(out, part)
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
