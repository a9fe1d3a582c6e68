package source

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

const dockerManifest = "manifest.json"

// dockerImage is one image of a docker-archive's manifest.
type dockerImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func parseDocker(p []byte) ([]dockerImage, error) {
	var list []dockerImage
	if err := json.Unmarshal(p, &list); err != nil {
		return nil, errs.Wrap(errs.ImageCorrupt, phase, "read "+dockerManifest, err)
	}
	for _, m := range list {
		if m.Config == "" {
			return nil, errs.New(errs.ImageCorrupt, phase, dockerManifest+" names no config")
		}
	}
	if len(list) == 0 {
		return nil, errs.New(errs.ImageCorrupt, phase, dockerManifest+" names no image")
	}
	return list, nil
}

func looksDocker(f files) bool {
	p, err := readJSON(f, dockerManifest)
	if err != nil {
		return false
	}
	_, err = parseDocker(p)
	return err == nil
}

func readDocker(ctx context.Context, f files, b *layer.Builder, opts Options) (Result, error) {
	p, err := readJSON(f, dockerManifest)
	if err != nil {
		return Result{}, err
	}
	list, err := parseDocker(p)
	if err != nil {
		return Result{}, err
	}
	m, err := chooseDocker(list, opts.Ref)
	if err != nil {
		return Result{}, err
	}
	raw, err := readJSON(f, m.Config)
	if err != nil {
		return Result{}, err
	}
	if want := digestOfName(m.Config); want != nil {
		if err := checkBytes(m.Config, raw, *want); err != nil {
			return Result{}, err
		}
	}
	cfg, err := parseConfig(m.Config, raw, len(m.Layers), opts.Platform)
	if err != nil {
		return Result{}, err
	}
	var blobs []blob
	for i, name := range m.Layers {
		blobs = append(blobs, blob{name: name, packed: digestOfBlobPath(name), plain: &cfg.RootFS.DiffIDs[i], size: -1})
	}
	if err := applyLayers(ctx, f, blobs, b, opts); err != nil {
		return Result{}, err
	}
	return Result{Format: Docker, Config: toConfig(cfg)}, nil
}

func chooseDocker(list []dockerImage, ref string) (dockerImage, error) {
	if ref == "" && len(list) == 1 {
		return list[0], nil
	}
	var names []string
	for _, m := range list {
		if ref != "" && slices.ContainsFunc(m.RepoTags, func(t string) bool { return sameRef(t, ref) }) {
			return m, nil
		}
		names = append(names, m.RepoTags...)
	}
	if ref == "" {
		return dockerImage{}, errs.New(errs.BadRequest, phase, fmt.Sprintf("the archive holds %d images; name one of: %s", len(list), strings.Join(names, ", ")))
	}
	return dockerImage{}, errs.New(errs.BadRequest, phase, fmt.Sprintf("the archive has no image %q; it has: %s", ref, strings.Join(names, ", ")))
}

// sameRef compares names the way people shorten them.
func sameRef(a, b string) bool {
	norm := func(s string) string {
		s = strings.TrimPrefix(strings.TrimPrefix(s, "docker.io/"), "library/")
		if last := s[strings.LastIndexByte(s, '/')+1:]; !strings.ContainsAny(last, ":@") {
			s += ":latest"
		}
		return s
	}
	return norm(a) == norm(b)
}

// digestOfName reads the digest that a config's file name is, in either layout.
func digestOfName(name string) *v1.Hash {
	if h := digestOfBlobPath(name); h != nil {
		return h
	}
	return hexDigest(strings.TrimPrefix(strings.TrimSuffix(clean(name), ".json"), "sha256:"))
}

func digestOfBlobPath(name string) *v1.Hash {
	hex, ok := strings.CutPrefix(clean(name), "blobs/sha256/")
	if !ok {
		return nil
	}
	return hexDigest(hex)
}

func hexDigest(hex string) *v1.Hash {
	h, err := v1.NewHash("sha256:" + hex)
	if err != nil {
		return nil
	}
	return &h
}
