package export

import (
	"context"
	"encoding/json"
	"io"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Archive writes the image as a tar of an OCI layout that is a docker-archive
// too: docker load, podman, skopeo and our own import read it. ref is its name
// in there, or "". Layers that are the same are written once. Errors: as [Tar]
// and [Pack].
func Archive(ctx context.Context, w io.Writer, img Image, ref string, opts Options) error {
	var blobs []*Blob
	defer func() {
		for _, b := range blobs {
			b.Close()
		}
	}()
	for _, l := range img.Layers {
		b, err := Pack(ctx, l, opts)
		if err != nil {
			return err
		}
		blobs = append(blobs, b)
	}
	docs, err := Describe(img, blobs, opts)
	if err != nil {
		return err
	}
	a := &archive{w: w, have: map[v1.Hash]bool{}}
	if err := a.small("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	for _, b := range blobs {
		if err := a.blob(b.Descriptor, b.Reader()); err != nil {
			return err
		}
	}
	if err := a.bytes(docs.ConfigDesc, docs.Config); err != nil {
		return err
	}
	if err := a.bytes(docs.ManifestDesc, docs.Manifest); err != nil {
		return err
	}
	return a.indexes(docs, blobs, ref)
}

type archive struct {
	w    io.Writer
	have map[v1.Hash]bool
}

func (a *archive) head(name string, size int64) error {
	return (&header{name: name, typ: typeReg, mode: 0o644, size: size}).write(a.w)
}

func (a *archive) small(name string, p []byte) error {
	if err := a.head(name, int64(len(p))); err != nil {
		return err
	}
	_, err := a.w.Write(append(p[:len(p):len(p)], make([]byte, -len(p)&(block-1))...))
	return err
}

func (a *archive) bytes(d v1.Descriptor, p []byte) error { return a.small(hexName(d.Digest), p) }

func (a *archive) blob(d v1.Descriptor, r io.Reader) error {
	if a.have[d.Digest] {
		return nil
	}
	a.have[d.Digest] = true
	if err := a.head(hexName(d.Digest), d.Size); err != nil {
		return err
	}
	spool := &spoolReader{r: r}
	if n, err := io.Copy(a.w, spool); err != nil || n != d.Size {
		if spool.err != nil {
			return layer.DiskError("read spool file", spool.err)
		}
		return err
	}
	_, err := a.w.Write(make([]byte, -d.Size&(block-1)))
	return err
}

// spoolReader remembers whether it was reading that failed, rather than writing.
type spoolReader struct {
	r   io.Reader
	err error
}

func (s *spoolReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

func (a *archive) indexes(docs *Documents, blobs []*Blob, ref string) error {
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{docs.ManifestDesc}}
	var tags []string
	if ref != "" {
		tags = []string{ref}
		ann := map[string]string{"io.containerd.image.name": ref}
		if tag := tagOf(ref); tag != "" {
			ann["org.opencontainers.image.ref.name"] = tag
		}
		index.Manifests[0].Annotations = ann
	}
	old := []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}{{Config: hexName(docs.ConfigDesc.Digest), RepoTags: tags, Layers: []string{}}}
	for _, b := range blobs {
		old[0].Layers = append(old[0].Layers, hexName(b.Descriptor.Digest))
	}
	for _, f := range []struct {
		name string
		v    any
	}{{"index.json", index}, {"manifest.json", old}} {
		p, err := json.Marshal(f.v)
		if err != nil {
			return errs.Wrap(errs.InternalError, phase, "encode "+f.name, err)
		}
		if err := a.small(f.name, p); err != nil {
			return err
		}
	}
	_, err := a.w.Write(make([]byte, 2*block))
	return err
}
