package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync/atomic"

	"dsec/api/v1/errs"
	"dsec/internal/image/export"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// PushOptions of a push; the zero value is usable. Of Options, Platform and what
// limits downloads are not used; compressed layers lie in SpoolDir one at a time.
type PushOptions struct {
	Options
	Compression export.Compression
	Format      export.Format
}

// PushResult tells what a push did.
type PushResult struct {
	Ref       string // what was asked for, in full
	Digest    string // of the manifest
	Size      int64  // of the layers as the registry has them
	SentBytes int64  // of layers and config that it did not have
	Sent      int    // and how many
	Skipped   int    // that it had
}

// Push writes the image to the registry, under the tag that ref has. What the
// registry has already is not sent again. The tag appears only when everything
// is there.
func Push(ctx context.Context, ref string, img export.Image, opts PushOptions) (PushResult, error) {
	if err := opts.Options.fill(); err != nil {
		return PushResult{}, err
	}
	ctx, cancel := withLimit(ctx, PhasePush, opts.TransferTimeout)
	defer cancel()
	res, err := push(ctx, ref, img, opts)
	return res, inPhase(ctx, PhasePush, "push "+fmt.Sprintf("%.200s", ref), opts.TransferTimeout, err)
}

func push(ctx context.Context, ref string, img export.Image, opts PushOptions) (PushResult, error) {
	var res PushResult
	lctx, cancel := withLimit(ctx, PhaseResolve, opts.ResolveTimeout)
	s, err := login(lctx, ref, opts.Options, true)
	err = inPhase(lctx, PhasePush, "log in", opts.ResolveTimeout, err)
	cancel()
	if err != nil {
		return res, err
	}
	defer s.close()
	if _, ok := s.ref.(name.Digest); ok {
		return res, errs.New(errs.BadRequest, s.phase(), fmt.Sprintf("%.200q names a digest: push to a tag", ref))
	}
	s.tell.begin(PhasePush, 0)
	p := &pusher{s: s, res: &res}
	res.Ref = s.ref.Name()
	pack := export.Options{Compression: opts.Compression, Format: opts.Format, SpoolDir: opts.SpoolDir}
	packed := make([]*export.Blob, 0, len(img.Layers))
	for i, l := range img.Layers {
		b, err := p.layer(ctx, fmt.Sprintf("layer %d of %d", i+1, len(img.Layers)), l, pack)
		if err != nil {
			return res, err
		}
		packed = append(packed, b)
		res.Size += b.Descriptor.Size
	}
	docs, err := export.Describe(img, packed, pack)
	if err != nil {
		return res, err
	}
	if err := p.blob(ctx, "config", docs.ConfigDesc, func() sized { return bytes.NewReader(docs.Config) }); err != nil {
		return res, err
	}
	res.Digest = docs.ManifestDesc.Digest.String()
	return res, p.manifest(ctx, docs)
}

type pusher struct {
	s   *session
	res *PushResult
}

// layer sends a layer; what it returns is closed, and good for its descriptor only.
func (p *pusher) layer(ctx context.Context, what string, l export.Layer, pack export.Options) (*export.Blob, error) {
	b, err := export.Pack(ctx, l, pack)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	defer b.Close()
	return b, p.blob(ctx, what, b.Descriptor, func() sized { return b.Reader() })
}

// sized is a body whose length is known.
type sized interface {
	io.Reader
	Size() int64
}

// blob sends a blob unless the registry has it.
func (p *pusher) blob(ctx context.Context, what string, d v1.Descriptor, open func() sized) error {
	have, err := p.has(ctx, what, d)
	if err != nil {
		return err
	}
	if have {
		p.res.Skipped++
		return nil
	}
	for failures := 1; ; failures++ {
		err := p.upload(ctx, what, d, open())
		if err == nil {
			p.res.Sent++
			p.res.SentBytes += d.Size
			return nil
		}
		if err := p.pause(ctx, err, failures); err != nil {
			return err
		}
		// What broke may have been the answer only.
		if have, herr := p.has(ctx, what, d); herr == nil && have {
			p.res.Sent++
			p.res.SentBytes += d.Size
			return nil
		}
	}
}

// pause waits before another try, or returns why there is to be none.
func (p *pusher) pause(ctx context.Context, err error, failures int) error {
	o := &p.s.opts
	e := errs.Of(err)
	again := errors.Is(err, errs.RegistryDown) || errors.Is(err, errs.RegistryBusy) || errors.Is(err, errs.DeadlineExceeded)
	if ctx.Err() != nil {
		return errs.Wrap(errs.RequestCanceled, p.s.phase(), "push", context.Cause(ctx))
	}
	wait := max(o.backoff(failures), e.RetryAfter)
	if !again || !e.Retryable || failures >= o.Retry.Attempts || wait > o.Retry.Max {
		return err
	}
	return o.Sleep(ctx, wait)
}

func (p *pusher) has(ctx context.Context, what string, d v1.Descriptor) (bool, error) {
	resp, err := p.s.do(ctx, http.MethodHead, p.s.url("blobs/"+d.Digest.String()), what, nil, nil, http.StatusOK, http.StatusNotFound)
	if err != nil {
		return false, err
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK, nil
}

func (p *pusher) upload(ctx context.Context, what string, d v1.Descriptor, body sized) error {
	s := p.s
	resp, err := s.do(ctx, http.MethodPost, s.url("blobs/uploads/"), "place for "+what, nil, nil, http.StatusAccepted)
	if err != nil {
		return err
	}
	to, err := p.next(resp)
	if err != nil {
		return err
	}
	told := &toldReader{sized: body, s: s}
	resp, err = s.do(ctx, http.MethodPatch, to.String(), what, told, http.Header{"Content-Type": {"application/octet-stream"}}, http.StatusAccepted, http.StatusNoContent, http.StatusCreated)
	if err != nil {
		s.tell.add(PhasePush, -told.n.Load())
		return err
	}
	if to, err = p.next(resp); err != nil {
		return err
	}
	q := to.Query()
	q.Set("digest", d.Digest.String())
	to.RawQuery = q.Encode()
	resp, err = s.do(ctx, http.MethodPut, to.String(), what, nil, nil, http.StatusCreated)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// next is where an upload goes on.
func (p *pusher) next(resp *http.Response) (*url.URL, error) {
	resp.Body.Close()
	u, err := location(resp)
	if err != nil {
		e := errs.New(errs.RegistryDown, p.s.phase(), p.s.host()+" does not say where to send to").Because(err)
		e.Retryable = false
		return nil, e
	}
	return u, nil
}

// toldReader counts what is sent.
type toldReader struct {
	sized
	s *session
	n atomic.Int64 // net/http may still read a body that it has given up
}

func (t *toldReader) Read(p []byte) (int, error) {
	n, err := t.sized.Read(p)
	t.n.Add(int64(n))
	t.s.tell.add(PhasePush, int64(n))
	return n, err
}

func (p *pusher) manifest(ctx context.Context, docs *export.Documents) error {
	s := p.s
	resp, err := s.do(ctx, http.MethodPut, s.url("manifests/"+s.ref.Identifier()), "manifest", bytes.NewReader(docs.Manifest),
		http.Header{"Content-Type": {string(docs.ManifestDesc.MediaType)}}, http.StatusCreated, http.StatusOK, http.StatusAccepted)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if says := resp.Header.Get("Docker-Content-Digest"); says != "" && says != docs.ManifestDesc.Digest.String() {
		return errs.New(errs.ImageCorrupt, s.phase(), fmt.Sprintf("%s stored the manifest as %.100s instead of %s", s.host(), says, docs.ManifestDesc.Digest))
	}
	return nil
}
