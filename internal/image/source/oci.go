package source

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"path"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	ociMarker = "oci-layout"
	ociIndex  = "index.json"

	maxIndexDepth = 4

	annRefName   = "org.opencontainers.image.ref.name"
	annImageName = "io.containerd.image.name"
	annRefType   = "vnd.docker.reference.type" // marks attestations, which are no images
)

func readOCI(ctx context.Context, f files, b *layer.Builder, opts Options) (Result, error) {
	marker, err := readJSON(f, ociMarker)
	if err != nil {
		return Result{}, err
	}
	if !bytes.Contains(marker, []byte("imageLayoutVersion")) {
		return Result{}, errs.New(errs.ImageCorrupt, phase, ociMarker+" names no version")
	}
	raw, err := readJSON(f, ociIndex)
	if err != nil {
		return Result{}, err
	}
	desc, err := chooseOCI(f, ociIndex, raw, opts, opts.Ref, 0)
	if err != nil {
		return Result{}, err
	}
	raw, err = readBlob(f, desc)
	if err != nil {
		return Result{}, err
	}
	m, err := ParseManifest(desc.Digest.String(), raw)
	if err != nil {
		return Result{}, err
	}
	if raw, err = readBlob(f, m.Config); err != nil {
		return Result{}, err
	}
	cfg, err := parseConfig(m.Config.Digest.String(), raw, len(m.Layers), opts.Platform)
	if err != nil {
		return Result{}, err
	}
	var blobs []blob
	for _, l := range m.Layers {
		name, err := blobPath(l.Digest)
		if err != nil {
			return Result{}, err
		}
		blobs = append(blobs, blob{name: name, packed: &l.Digest, size: l.Size})
	}
	if err := applyLayers(ctx, f, blobs, b, opts); err != nil {
		return Result{}, err
	}
	return Result{Format: OCI, Config: toConfig(cfg)}, nil
}

// ParseManifest reads the manifest of an image and refuses one of anything else.
// where is what messages call it.
func ParseManifest(where string, raw []byte) (*v1.Manifest, error) {
	m, err := v1.ParseManifest(bytes.NewReader(raw))
	if err != nil {
		return nil, errs.Wrap(errs.ImageCorrupt, phase, "read manifest "+where, err)
	}
	if !m.Config.MediaType.IsConfig() {
		return nil, errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("manifest %s holds %.100q, not an image", where, m.Config.MediaType))
	}
	for _, l := range m.Layers {
		if !layerMedia(l.MediaType) {
			return nil, errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("layer %s of media type %.100q", l.Digest, l.MediaType))
		}
		if l.Size < 0 {
			return nil, errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("layer %s of %d bytes", l.Digest, l.Size))
		}
	}
	return m, nil
}

// Image reads the image with a manifest that [ParseManifest] returned and that
// manifest's config. open is called once for each layer, in order, the one before
// being closed; what it returns is checked against the manifest.
func Image(ctx context.Context, m *v1.Manifest, config []byte, open func(i int) (io.ReadCloser, error), b *layer.Builder, opts Options) (Result, error) {
	if err := opts.fill(); err != nil {
		return Result{}, err
	}
	if err := checkBytes("the config", config, m.Config.Digest); err != nil {
		return Result{}, err
	}
	cfg, err := parseConfig(m.Config.Digest.String(), config, len(m.Layers), opts.Platform)
	if err != nil {
		return Result{}, err
	}
	var blobs []blob
	for i, l := range m.Layers {
		blobs = append(blobs, blob{
			name: l.Digest.String(), packed: &l.Digest, size: l.Size,
			open: func() (io.ReadCloser, int64, error) {
				r, err := open(i)
				return r, l.Size, err
			},
		})
	}
	if err := applyLayers(ctx, nil, blobs, b, opts); err != nil {
		return Result{}, err
	}
	return Result{Format: OCI, Config: toConfig(cfg)}, nil
}

// CheckDigest checks that p, which messages call what, has the digest.
func CheckDigest(what string, p []byte, want v1.Hash) error { return checkBytes(what, p, want) }

func layerMedia(m types.MediaType) bool {
	switch m {
	case types.OCILayer, types.OCILayerZStd, types.OCIUncompressedLayer,
		types.OCIRestrictedLayer, types.OCIUncompressedRestrictedLayer,
		types.DockerLayer, types.DockerUncompressedLayer, types.DockerForeignLayer,
		"application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
		"application/vnd.docker.image.rootfs.diff.tar.zstd":
		return true
	}
	return false
}

// chooseOCI finds the one image manifest that an index means, going into nested
// indexes for the platform.
func chooseOCI(f files, where string, raw []byte, opts Options, ref string, depth int) (v1.Descriptor, error) {
	none := v1.Descriptor{}
	if depth > maxIndexDepth {
		return none, errs.New(errs.ImageCorrupt, phase, "indexes nested too deep at "+where)
	}
	fit, have, err := candidates(where, raw, opts.Platform, ref)
	if err != nil {
		return none, err
	}
	if len(fit) > 1 && depth == 0 {
		for _, d := range fit {
			have = append(have, refOf(d))
		}
		return none, errs.New(errs.BadRequest, phase, fmt.Sprintf("the layout holds %d images; name one of: %.500s", len(fit), strings.Join(have, ", ")))
	}
	d := fit[0]
	if !d.MediaType.IsIndex() {
		return d, nil
	}
	if raw, err = readBlob(f, d); err != nil {
		return none, err
	}
	return chooseOCI(f, d.Digest.String(), raw, opts, "", depth+1)
}

// Choose picks from an image index the entry for platform, os/arch or
// os/arch/variant; it may be an index again. where is what messages call it.
func Choose(where string, index []byte, platform string) (v1.Descriptor, error) {
	fit, _, err := candidates(where, index, platform, "")
	if err != nil {
		return v1.Descriptor{}, err
	}
	return fit[0], nil
}

// candidates lists what in an index fits, at least one, and what does not.
func candidates(where string, raw []byte, platform, ref string) (fit []v1.Descriptor, have []string, err error) {
	idx, err := v1.ParseIndexManifest(bytes.NewReader(raw))
	if err != nil {
		return nil, nil, errs.Wrap(errs.ImageCorrupt, phase, "read index "+where, err)
	}
	for _, d := range idx.Manifests {
		if d.Annotations[annRefType] != "" {
			continue
		}
		if ref != "" && !refMatches(d, ref) {
			have = append(have, refOf(d))
			continue
		}
		if d.Platform != nil && !platformFits(d.Platform, platform) {
			have = append(have, d.Platform.String())
			continue
		}
		if !d.MediaType.IsImage() && !d.MediaType.IsIndex() {
			have = append(have, string(d.MediaType))
			continue
		}
		fit = append(fit, d)
	}
	if len(fit) == 0 {
		want := platform
		if ref != "" {
			want = ref + " for " + want
		}
		return nil, nil, errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("index %s has no image %s; it has: %.500s", where, want, strings.Join(have, ", ")))
	}
	return fit, have, nil
}

func refOf(d v1.Descriptor) string {
	for _, k := range []string{annImageName, annRefName} {
		if v := d.Annotations[k]; v != "" {
			return v
		}
	}
	return d.Digest.String()
}

func refMatches(d v1.Descriptor, ref string) bool {
	return d.Digest.String() == ref || d.Annotations[annRefName] == ref ||
		d.Annotations[annImageName] != "" && sameRef(d.Annotations[annImageName], ref) ||
		d.Annotations[annRefName] != "" && sameRef(d.Annotations[annRefName], ref)
}

// platformFits compares os/arch and, if one is asked for, the variant.
func platformFits(p *v1.Platform, want string) bool {
	w := strings.SplitN(want, "/", 3)
	return len(w) >= 2 && p.OS == w[0] && p.Architecture == w[1] && (len(w) < 3 || p.Variant == w[2])
}

func blobPath(h v1.Hash) (string, error) {
	if h.Algorithm != "sha256" && h.Algorithm != "sha512" {
		return "", errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("digest %.200q", h.String()))
	}
	return path.Join("blobs", h.Algorithm, h.Hex), nil
}

// readBlob reads a small blob and checks its size and digest.
func readBlob(f files, d v1.Descriptor) ([]byte, error) {
	name, err := blobPath(d.Digest)
	if err != nil {
		return nil, err
	}
	p, err := readJSON(f, name)
	if err != nil {
		return nil, err
	}
	if int64(len(p)) != d.Size {
		return nil, errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("blob %s has %d bytes instead of %d", d.Digest, len(p), d.Size))
	}
	return p, checkBytes(name, p, d.Digest)
}
