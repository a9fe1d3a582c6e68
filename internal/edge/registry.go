package edge

import (
	"context"
	"encoding/json"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// asked decodes the document that a stream began with.
func asked[T any](s *aether.Stream) (req T, err error) {
	var doc msg.Document
	if err := s.Parse(&doc); err != nil {
		return req, err
	}
	return req, errs.Wrap(errs.BadRequest, "edge.decode", "decode the request", json.Unmarshal(doc.Json, &req))
}

// servePull reads an image from a registry.
func (e *Edge) servePull(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.RegistryRequest](s)
	if err != nil {
		return nil, err
	}
	ctx, end, tell := teller(ctx, s)
	defer end()
	img, err := e.cfg.Images.Pull(ctx, req, tell)
	if err != nil {
		return nil, err
	}
	return document(img)
}

// servePush sends an image to a registry.
func (e *Edge) servePush(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.EdgePush](s)
	if err != nil {
		return nil, err
	}
	ctx, end, tell := teller(ctx, s)
	defer end()
	pushed, err := e.cfg.Images.Push(ctx, &req.Image, req.Request, tell)
	if err != nil {
		return nil, err
	}
	return document(pushed)
}

// serveExport sends an image as data.
func (e *Edge) serveExport(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.EdgeExport](s)
	if err != nil {
		return nil, err
	}
	return &msg.Empty{}, e.cfg.Images.Export(ctx, &req.Image, req.Format, streamWriter{ctx, s})
}

// streamWriter sends what is written as data, waiting for the reader.
type streamWriter struct {
	ctx context.Context
	s   *aether.Stream
}

// exportChunk is the most that one frame takes of an export.
const exportChunk = 256 << 10

func (w streamWriter) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		k := min(len(p), exportChunk)
		if err := w.s.Send(w.ctx, aether.KindStdout, p[:k]); err != nil {
			return n, err
		}
		n, p = n+k, p[k:]
	}
	return n, nil
}
