package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image/source"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	maxManifest   = 4 << 20 // what registries have to take at most, by the specification
	maxConfig     = 8 << 20
	maxLayers     = 1 << 12
	maxIndexDepth = 4
	tagsShown     = 10
)

// Remote is an image that a registry has, found but not yet downloaded. Pull or
// Close it.
type Remote struct {
	Ref      string // what was asked for, in full
	Digest   string // of what the reference names: the index, if it is one
	Manifest string // digest of the image's own manifest
	Platform string
	Size     int64 // bytes of all layers as the registry has them

	s        *session
	manifest *v1.Manifest
	config   []byte
}

// Resolve finds the image that ref names and reads its manifest and config.
func Resolve(ctx context.Context, ref string, opts Options) (*Remote, error) {
	if err := opts.fill(); err != nil {
		return nil, err
	}
	ctx, cancel := withLimit(ctx, PhaseResolve, opts.ResolveTimeout)
	defer cancel()
	r, err := resolve(ctx, ref, opts)
	return r, inPhase(ctx, PhaseResolve, "find "+fmt.Sprintf("%.200s", ref), opts.ResolveTimeout, err)
}

// Close gives up the connections to the registry.
func (r *Remote) Close() { r.s.close() }

func resolve(ctx context.Context, ref string, opts Options) (_ *Remote, err error) {
	s, err := login(ctx, ref, opts, false)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	s.tell.begin(PhaseResolve, 0)
	r := &Remote{Ref: s.ref.Name(), Platform: s.opts.Platform, s: s}
	raw, desc, err := s.find(ctx)
	if err != nil {
		return nil, err
	}
	r.Digest = desc.Digest.String()
	for depth := 0; desc.MediaType.IsIndex(); depth++ {
		if depth == maxIndexDepth {
			return nil, errs.New(errs.ImageCorrupt, s.phase(), "indexes nested too deep in "+r.Ref)
		}
		if desc, err = source.Choose(r.Ref, raw, s.opts.Platform); err != nil {
			return nil, err
		}
		if err := refuseOld(desc.MediaType); err != nil {
			return nil, err
		}
		if raw, _, err = s.manifestBy(ctx, desc.Digest.String(), &desc); err != nil {
			return nil, err
		}
	}
	r.Manifest = desc.Digest.String()
	if r.manifest, err = source.ParseManifest(r.Manifest, raw); err != nil {
		return nil, err
	}
	if r.Size, err = checkLayers(r.manifest); err != nil {
		return nil, err
	}
	r.config, err = s.small(ctx, "config", r.manifest.Config)
	return r, err
}

// find reads what the reference names.
func (s *session) find(ctx context.Context) ([]byte, v1.Descriptor, error) {
	var want *v1.Descriptor
	if d, ok := s.ref.(name.Digest); ok {
		h, err := v1.NewHash(d.DigestStr())
		if err != nil {
			return nil, v1.Descriptor{}, errs.New(errs.BadRequest, s.phase(), fmt.Sprintf("digest %.100q", d.DigestStr()))
		}
		want = &v1.Descriptor{Digest: h, Size: -1}
	}
	raw, desc, err := s.manifestBy(ctx, s.ref.Identifier(), want)
	if errors.Is(err, errs.RegistryNotFound) && want == nil {
		err = s.whichIsMissing(ctx, err)
	}
	return raw, desc, err
}

// whichIsMissing tells apart a missing tag and a missing repository, which not
// all registries do by themselves.
func (s *session) whichIsMissing(ctx context.Context, was error) error {
	resp, err := s.do(ctx, http.MethodGet, s.url("tags/list?n=50"), "list of tags", nil, nil, http.StatusOK)
	if errors.Is(err, errs.RegistryNotFound) {
		return errs.New(errs.RegistryNotFound, s.phase(), fmt.Sprintf("%s has no repository %s", s.host(), s.repo.RepositoryStr()))
	}
	if err != nil {
		return was
	}
	defer resp.Body.Close()
	p, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	var list struct {
		Tags []string `json:"tags"`
	}
	if err != nil || json.Unmarshal(p, &list) != nil {
		return was
	}
	if len(list.Tags) == 0 {
		return errs.New(errs.RegistryNotFound, s.phase(), fmt.Sprintf("the repository %s on %s has no tags", s.repo.RepositoryStr(), s.host()))
	}
	shown, more := list.Tags, ""
	if len(shown) > tagsShown {
		shown, more = shown[:tagsShown], ", …"
	}
	return errs.New(errs.RegistryNotFound, s.phase(), fmt.Sprintf("the repository %s on %s has no tag %s; it has %.500s%s",
		s.repo.RepositoryStr(), s.host(), s.ref.Identifier(), strings.Join(shown, ", "), more))
}

// manifestTypes are what we take for a manifest, the old ones to refuse them clearly.
var manifestTypes = []string{
	string(types.OCIManifestSchema1), string(types.DockerManifestSchema2),
	string(types.OCIImageIndex), string(types.DockerManifestList),
	string(types.DockerManifestSchema1) + ";q=0.1", string(types.DockerManifestSchema1Signed) + ";q=0.1",
}

// manifestBy reads the manifest or index with a tag or digest and checks it.
func (s *session) manifestBy(ctx context.Context, id string, want *v1.Descriptor) ([]byte, v1.Descriptor, error) {
	what := "tag " + id
	if want != nil {
		what = "manifest " + id
	}
	var desc v1.Descriptor
	raw, err := s.retryBody(ctx, what, func() ([]byte, error) {
		resp, err := s.do(ctx, http.MethodGet, s.url("manifests/"+id), what, nil, http.Header{"Accept": {strings.Join(manifestTypes, ", ")}}, http.StatusOK)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		raw, err := s.readAll(ctx, resp, what, maxManifest)
		if err != nil {
			return nil, err
		}
		desc.MediaType = mediaTypeOf(resp.Header.Get("Content-Type"), raw)
		if says := resp.Header.Get("Docker-Content-Digest"); says != "" && want == nil {
			h, err := v1.NewHash(says)
			if err == nil {
				err = source.CheckDigest("the answer for "+what, raw, h)
			}
			return raw, err
		}
		return raw, nil
	})
	if err != nil {
		return nil, desc, err
	}
	if err := refuseOld(desc.MediaType); err != nil {
		return nil, desc, err
	}
	if !desc.MediaType.IsIndex() && !desc.MediaType.IsImage() {
		if !json.Valid(raw) {
			return nil, desc, errs.New(errs.ImageCorrupt, s.phase(), what+" is not JSON")
		}
		return nil, desc, errs.New(errs.ImageUnsupported, s.phase(), fmt.Sprintf("%s is %.100q, not an image", what, desc.MediaType))
	}
	desc.Size = int64(len(raw))
	if want == nil {
		desc.Digest, _, err = v1.SHA256(bytes.NewReader(raw))
		return raw, desc, errs.Wrap(errs.InternalError, s.phase(), "hash manifest", err)
	}
	if want.Size >= 0 && want.Size != desc.Size {
		return nil, desc, errs.New(errs.ImageCorrupt, s.phase(), fmt.Sprintf("%s has %d bytes instead of %d", what, desc.Size, want.Size))
	}
	desc.Digest = want.Digest
	return raw, desc, source.CheckDigest(what, raw, want.Digest)
}

// retryBody repeats a small download whose connection breaks.
func (s *session) retryBody(ctx context.Context, what string, get func() ([]byte, error)) ([]byte, error) {
	for failures := 1; ; failures++ {
		p, err := get()
		var cut *cutError
		if !errors.As(err, &cut) {
			return p, err
		}
		if failures >= s.opts.Retry.Attempts {
			return nil, s.broken(what, cut, failures)
		}
		if err := s.opts.Sleep(ctx, s.opts.backoff(failures)); err != nil {
			return nil, err
		}
	}
}

// cutError is a body that ended early.
type cutError struct {
	cause error
	got   int64
}

func (c *cutError) Error() string { return fmt.Sprintf("cut off after %d bytes: %v", c.got, c.cause) }
func (c *cutError) Unwrap() error { return c.cause }

func (s *session) broken(what string, cut *cutError, times int) error {
	if errors.Is(cut.cause, errIdle) {
		return errs.New(errs.DeadlineExceeded, s.phase(), fmt.Sprintf("nothing came from %s for %s in the middle of %s, %d times", s.host(), s.opts.IdleTimeout, what, times))
	}
	return errs.New(errs.RegistryDown, s.phase(), fmt.Sprintf("%s broke off %d times sending %s", s.host(), times, what)).Because(bare(cut))
}

// readAll reads a small body whole.
func (s *session) readAll(ctx context.Context, resp *http.Response, what string, limit int64) ([]byte, error) {
	p, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if int64(len(p)) > limit {
		return nil, errs.New(errs.ImageUnsupported, s.phase(), fmt.Sprintf("%s has more than %d bytes", what, limit))
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, &cutError{err, int64(len(p))}
	}
	return p, nil
}

// small reads a small blob whole.
func (s *session) small(ctx context.Context, what string, d v1.Descriptor) ([]byte, error) {
	if d.Size < 0 || d.Size > maxConfig {
		return nil, errs.New(errs.ImageUnsupported, s.phase(), fmt.Sprintf("%s of %d bytes (limit %d)", what, d.Size, maxConfig))
	}
	var buf bytes.Buffer
	err := s.fetch(ctx, what+" "+d.Digest.String(), d, func(p []byte) error { buf.Write(p); return nil })
	if err == nil {
		err = source.CheckDigest(what, buf.Bytes(), d.Digest)
	}
	return buf.Bytes(), err
}

// mediaTypeOf says what a manifest is, by its header or, that being vague, its content.
func mediaTypeOf(header string, raw []byte) types.MediaType {
	m, _, err := mime.ParseMediaType(header)
	if mt := types.MediaType(m); err == nil && (mt.IsIndex() || mt.IsImage() || refuseOld(mt) != nil) {
		return mt
	}
	var doc struct {
		SchemaVersion int             `json:"schemaVersion"`
		MediaType     types.MediaType `json:"mediaType"`
		Manifests     json.RawMessage `json:"manifests"`
		Config        json.RawMessage `json:"config"`
		FSLayers      json.RawMessage `json:"fsLayers"`
	}
	if json.Unmarshal(raw, &doc) != nil {
		return types.MediaType(m)
	}
	switch {
	case doc.MediaType != "":
		return doc.MediaType
	case doc.SchemaVersion == 1 || doc.FSLayers != nil:
		return types.DockerManifestSchema1
	case doc.Manifests != nil:
		return types.OCIImageIndex
	case doc.Config != nil:
		return types.OCIManifestSchema1
	}
	return types.MediaType(m)
}

func refuseOld(m types.MediaType) error {
	if m == types.DockerManifestSchema1 || m == types.DockerManifestSchema1Signed {
		return errs.New(errs.ImageUnsupported, phasePrefix+PhaseResolve, "the image is in Docker's old format (schema 1), which has no digests of what is in it: push it again with a current docker")
	}
	return nil
}

// checkLayers refuses what cannot be pulled, before anything is, and adds up sizes.
func checkLayers(m *v1.Manifest) (int64, error) {
	if len(m.Layers) > maxLayers {
		return 0, errs.New(errs.ImageUnsupported, phasePrefix+PhaseResolve, fmt.Sprintf("an image of %d layers (limit %d)", len(m.Layers), maxLayers))
	}
	var total int64
	for _, l := range m.Layers {
		if !l.MediaType.IsDistributable() || strings.Contains(string(l.MediaType), "nondistributable") || l.MediaType == types.DockerForeignLayer {
			return 0, errs.New(errs.ImageUnsupported, phasePrefix+PhaseResolve, fmt.Sprintf("layer %s is a foreign one: its license keeps it out of registries", l.Digest))
		}
		if total += l.Size; total < 0 || l.Size > 1<<44 {
			return 0, errs.New(errs.ImageUnsupported, phasePrefix+PhaseResolve, fmt.Sprintf("layer %s of %d bytes", l.Digest, l.Size))
		}
	}
	return total, nil
}
