package client

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/url"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Formats of an export.
const (
	ExportDocker   = v1.ExportDocker   // read by docker load, podman, skopeo and Import
	ExportOCI      = v1.ExportOCI      // the same with OCI's media types
	ExportSnapshot = v1.ExportSnapshot // a snapshot's layers as they are, for ImportSnapshot
)

// Pull makes an image of one in a registry. The node reads it; ending ctx leaves nothing.
func (c *Client) Pull(ctx context.Context, req v1.RegistryRequest, progress func(v1.ImageProgress)) (*Image, error) {
	img, err := c.makeImage(ctx, "/v1/images/pull", req, progress)
	if err != nil {
		return nil, about("pull image", req.Ref, err)
	}
	return img, nil
}

// Push sends an image to a registry.
func (c *Client) Push(ctx context.Context, req v1.RegistryRequest, progress func(v1.ImageProgress)) (*v1.Pushed, error) {
	for p, err := range stream[v1.ImageProgress](ctx, c, http.MethodPost, "/v1/images/push", nil, req) {
		switch {
		case err != nil:
			return nil, about("push image", req.Name, err)
		case p.Error != nil:
			return nil, about("push image", req.Name, p.Error.Err())
		case p.Pushed != nil:
			return p.Pushed, nil
		case progress != nil:
			progress(p)
		}
	}
	return nil, about("push image", req.Name, errs.New(errs.ConnectionLost, "client.read", "the answer ended without a result"))
}

// Export writes an image, or a snapshot, as an archive to w. After an error w has a part of it.
func (c *Client) Export(ctx context.Context, name, format string, w io.Writer) error {
	if err := c.export(ctx, name, format, w); err != nil {
		return about("export image", name, err)
	}
	return nil
}

func (c *Client) export(ctx context.Context, name, format string, w io.Writer) error {
	q := url.Values{"name": {name}}
	if format != "" {
		q.Set("format", format)
	}
	resp, err := c.send(ctx, http.MethodGet, "/v1/export", q, http.Header{"Accept": {"application/x-tar"}}, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	to := &sink{w: w}
	if _, err := io.Copy(to, resp.Body); err != nil {
		if to.err != nil {
			return localFile("client.export", "write the archive", to.err)
		}
		return c.badAnswer(ctx, http.MethodGet, "/v1/export", err)
	}
	outcome := resp.Trailer.Get("Dsec-Outcome")
	if outcome == "ok" {
		return nil
	}
	var p v1.Problem
	raw, err := base64.StdEncoding.DecodeString(outcome)
	if err == nil && outcome != "" && json.Unmarshal(raw, &p) == nil {
		return p.Err()
	}
	return errs.New(errs.ConnectionLost, "client.read", "the archive ended early")
}

// sink keeps its writer's own error apart from the connection's.
type sink struct {
	w   io.Writer
	err error
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	if err != nil {
		s.err = err
	}
	return n, err
}

// ImportSnapshot makes a snapshot of an archive of [ExportSnapshot]. Without a name it gets the one
// that it had. Of the options, Format is not used.
func (c *Client) ImportSnapshot(ctx context.Context, name string, r io.Reader, o ImportOptions) (*Image, error) {
	q := url.Values{}
	if name != "" {
		q.Set("name", name)
	}
	img, err := c.upload(ctx, "/v1/snapshots", q, r, o)
	if err != nil {
		return nil, about("import snapshot", name, err)
	}
	return img, nil
}
