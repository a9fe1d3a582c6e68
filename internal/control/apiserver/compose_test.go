package apiserver

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

func layersOf(img *v1.Image) (out []string) {
	for _, l := range img.Layers {
		out = append(out, l.Kind+" "+l.MetaDigest)
	}
	return out
}

func TestCompose(t *testing.T) {
	c := newCatalog(nil)
	add := func(name string, cfg v1.ImageConfig, layers ...string) {
		img := v1.Image{Name: name, Digest: "sha256:" + name, Config: cfg}
		for _, l := range layers {
			img.Layers = append(img.Layers, v1.Layer{Kind: "base", MetaDigest: l})
		}
		c.byName[name] = img
	}
	add("base", v1.ImageConfig{Env: []string{"A=base", "B=base"}, User: "root", WorkDir: "/", Entrypoint: []string{"/init"}, Volumes: []string{"/data"}, Labels: map[string]string{"l": "base"}}, "b1", "b2")
	add("work", v1.ImageConfig{Env: []string{"B=work"}, User: "dev", WorkDir: "/repo", Entrypoint: []string{"/other"}, Volumes: []string{"/data", "/w"}, Labels: map[string]string{"l": "work"}}, "w")
	add("tool", v1.ImageConfig{Env: []string{"T=1"}, User: "tool", WorkDir: "/opt"}, "t", "shared")
	add("other", v1.ImageConfig{}, "shared", "o")

	alone, err := c.compose(&v1.Spec{Image: "base"})
	if err != nil || !reflect.DeepEqual(*alone, c.byName["base"]) || !slices.Equal(alone.Digests(), []string{"sha256:base"}) {
		t.Errorf("a base alone: %+v, %v", alone, err)
	}
	img, err := c.compose(&v1.Spec{Image: "base", Workspace: "work", Toolkits: []string{"tool", "other"}})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := layersOf(img), []string{"base b1", "base b2", "workspace w", "toolkit t", "toolkit shared", "toolkit o"}; !slices.Equal(got, want) {
		t.Errorf("layers %q, want %q", got, want)
	}
	want := v1.ImageConfig{
		Env: []string{"A=base", "B=base", "B=work", "T=1"}, User: "dev", WorkDir: "/repo", Entrypoint: []string{"/init"},
		Volumes: []string{"/data", "/w"}, Labels: map[string]string{"l": "work"},
	}
	if !reflect.DeepEqual(img.Config, want) {
		t.Errorf("config %+v, want %+v", img.Config, want)
	}
	if got := img.Digests(); !slices.Equal(got, []string{"sha256:base", "sha256:work", "sha256:tool", "sha256:other"}) {
		t.Errorf("digests %q", got)
	}
	if b := c.byName["base"]; b.Config.Labels["l"] != "base" || len(b.Config.Env) != 2 || b.Layers[0].Kind != "base" {
		t.Errorf("the catalogue's own entry was changed: %+v", b)
	}

	for what, spec := range map[string]v1.Spec{
		"base": {Image: "none", Workspace: "work"}, "workspace": {Image: "base", Workspace: "none"}, "toolkit": {Image: "base", Toolkits: []string{"tool", "none"}},
	} {
		if _, err := c.compose(&spec); errs.Of(err).Code != errs.ImageNotFound {
			t.Errorf("unknown %s: %v", what, err)
		}
	}
	var many []string
	for i := range maxLayers {
		many = append(many, fmt.Sprint("l", i))
	}
	add("deep", v1.ImageConfig{}, many...)
	if _, err := c.compose(&v1.Spec{Image: "base", Workspace: "deep"}); errs.Of(err).Code != errs.BadSpec {
		t.Errorf("too many layers: %v", err)
	}
}
