package edges

import (
	"context"
	"encoding/json"
	"errors"
	"io"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// ImageRoots returns the layers that the object store must keep for an edge.
func (p *Pool) ImageRoots(ctx context.Context, node v1.Node) ([]v1.Layer, error) {
	var list []v1.Layer
	err := p.parts(ctx, node, "image.roots", &msg.Empty{}, &list)
	return list, err
}

// ImageCache returns what an edge has of images.
func (p *Pool) ImageCache(ctx context.Context, node v1.Node) (v1.ImageCache, error) {
	var c v1.ImageCache
	err := p.parts(ctx, node, "image.cache", &msg.Empty{}, &c)
	return c, err
}

// EvictImage removes what an edge has of layers.
func (p *Pool) EvictImage(ctx context.Context, node v1.Node, layers []v1.Layer) (v1.EvictReport, error) {
	var out v1.EvictReport
	req, err := encode("image.evict", layers)
	if err == nil {
		err = p.document(ctx, node, "", "image.evict", req, &out)
	}
	return out, err
}

// TrimImages removes what an edge has and need not keep.
func (p *Pool) TrimImages(ctx context.Context, node v1.Node, keep v1.EdgeKeep) error {
	req, err := encode("image.trim", keep)
	if err != nil {
		return err
	}
	c, err := p.Conn(ctx, node)
	if err != nil {
		return err
	}
	parts := aether.SplitDocument(req)
	s, err := c.Open(ctx, "", "image.trim", parts[0])
	if err != nil {
		return err
	}
	defer s.Cancel()
	for _, part := range parts[1:] {
		if s.SendMessage(ctx, part) != nil {
			break // the stream's end says why
		}
	}
	_ = s.CloseSend() // so does it then
	for {
		_, err := s.Recv(ctx)
		if errors.Is(err, io.EOF) {
			return answer(ctx, node, s.Result(&msg.Empty{}))
		}
		if err != nil {
			return answer(ctx, node, err)
		}
	}
}

// WarmImage has an edge fetch an image.
func (p *Pool) WarmImage(ctx context.Context, node v1.Node, req v1.EdgeWarm, progress func(done, total int64) error) (v1.WarmProgress, error) {
	var last v1.WarmProgress
	doc, err := encode("image.warm", req)
	if err != nil {
		return last, err
	}
	c, err := p.Conn(ctx, node)
	if err != nil {
		return last, err
	}
	s, err := c.Open(ctx, "", "image.warm", doc)
	if err != nil {
		return last, err
	}
	defer s.Cancel()
	err = receive(ctx, s, "image.warm", func(m *msg.ImageProgress) error { return progress(int64(m.Done), int64(m.Total)) }, &last)
	return last, answer(ctx, node, err)
}

func encode(method string, v any) (*msg.Document, error) {
	raw, err := json.Marshal(v)
	return &msg.Document{Json: raw}, errs.Wrap(errs.InternalError, method, "encode", err)
}
