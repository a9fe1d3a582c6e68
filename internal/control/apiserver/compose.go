package apiserver

import (
	"maps"
	"slices"
	"strconv"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// maxLayers of a sandbox; the kernel's overlay takes 500.
const maxLayers = 256

// compose stacks a spec's images: the base lowest, the workspace over it, each toolkit over
// those before. A base alone is returned as it is.
//
// Programs run as the base says; the workspace may have another user and working directory,
// and all add to the environment.
func (c *catalog) compose(spec *v1.Spec) (*v1.Image, error) {
	base, err := c.resolve(spec.Image)
	base.Made = nil // who makes sandboxes has no use for it
	if err != nil || spec.Workspace == "" && len(spec.Toolkits) == 0 {
		return &base, err
	}
	out := base
	out.Layers, out.Config.Env, out.Config.Volumes, out.Config.Labels = nil, nil, nil, nil
	add := func(kind string, img *v1.Image) {
		own := slices.Clone(img.Layers)
		for n := range own {
			own[n].MetaObject, own[n].MapObject = "", ""
		}
		out.Parts = append(out.Parts, v1.ImagePart{Kind: kind, Name: img.Name, Digest: img.Digest, Layers: own})
		for _, l := range img.Layers {
			// An overlay takes no layer twice, and what is higher covers it anyway.
			out.Layers = slices.DeleteFunc(out.Layers, func(low v1.Layer) bool { return low.MetaDigest == l.MetaDigest })
			if l.Kind != v1.KindDiff {
				l.Kind = kind
			}
			out.Layers = append(out.Layers, l)
		}
		out.Config.Env = append(out.Config.Env, img.Config.Env...)
		for _, v := range img.Config.Volumes {
			if !slices.Contains(out.Config.Volumes, v) {
				out.Config.Volumes = append(out.Config.Volumes, v)
			}
		}
		if len(img.Config.Labels) > 0 && out.Config.Labels == nil {
			out.Config.Labels = map[string]string{}
		}
		maps.Copy(out.Config.Labels, img.Config.Labels)
	}
	add(v1.KindBase, &base)
	if spec.Workspace != "" {
		w, err := c.resolve(spec.Workspace)
		if err != nil {
			return nil, err
		}
		add(v1.KindWorkspace, &w)
		if w.Config.User != "" {
			out.Config.User = w.Config.User
		}
		if w.Config.WorkDir != "" {
			out.Config.WorkDir = w.Config.WorkDir
		}
	}
	out.Bytes, out.Files = 0, 0
	for _, name := range spec.Toolkits {
		t, err := c.resolve(name)
		if err != nil {
			return nil, err
		}
		add(v1.KindToolkit, &t)
	}
	if n := len(out.Layers); n > maxLayers {
		return nil, errs.New(errs.BadSpec, "image.compose", "the images have more layers than a sandbox can have").With("layers", strconv.Itoa(n)).With("at_most", strconv.Itoa(maxLayers))
	}
	return &out, nil
}
