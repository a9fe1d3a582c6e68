package edge

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

// serveImageRoots answers which layers the object store must keep for this node: those of
// its sandboxes, in whatever state, of images made here, and of sandboxes' last snapshots, on which
// the next ones go, as long as this node has not heard of their removal.
func (e *Edge) serveImageRoots(ctx context.Context, s *aether.Stream, _ *msg.Empty) (*msg.Document, error) {
	roots, err := e.roots()
	if err != nil {
		return nil, err
	}
	return inParts(ctx, s, roots)
}

func (e *Edge) roots() (roots []v1.Layer, err error) {
	seen := map[v1.Layer]bool{}
	add := func(list []v1.Layer) {
		for _, l := range list {
			if !seen[l] {
				seen[l] = true
				roots = append(roots, l)
			}
		}
	}
	made, err := e.cfg.Images.Roots()
	if err != nil {
		return nil, err
	}
	add(made)
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.sandboxes {
		if s.image != nil {
			add(s.image.Layers)
		}
		// The catalogue may have the image with other layers by now, or lose it at any time.
		if s.last != nil && (s.packedOn == s.last.image.Digest || e.cfg.Images.Has(s.last.image.Digest)) {
			add(s.last.image.Layers)
		}
	}
	return roots, nil
}

func (e *Edge) serveImageCache(ctx context.Context, s *aether.Stream, _ *msg.Empty) (*msg.Document, error) {
	c := e.cfg.Images.Cache(nil)
	c.Node = e.id
	return inParts(ctx, s, c)
}

// inParts is an answer that grows with the node and may be more than a message can have: all but
// the last part of it are sent, and the last is returned. Whoever asked joins their JSON.
func inParts(ctx context.Context, s *aether.Stream, v any) (*msg.Document, error) {
	d, err := document(v)
	if err != nil {
		return nil, err
	}
	parts := aether.SplitDocument(d)
	for _, p := range parts[:len(parts)-1] {
		if err := s.SendMessage(ctx, p); err != nil {
			return nil, err
		}
	}
	return parts[len(parts)-1], nil
}

// serveImageWarm fetches an image and tells how far it is.
func (e *Edge) serveImageWarm(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var doc msg.Document
	var req v1.EdgeWarm
	if err := s.Parse(&doc); err != nil {
		return nil, err
	}
	if err := decode(&doc, &req); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	last := v1.WarmProgress{Node: e.id}
	traced, err := e.cfg.Images.Warm(ctx, &req.Image, req.All, func(done, total int64) {
		last.Done, last.Total = done, total
		if err := s.SendMessage(ctx, &msg.ImageProgress{Done: uint64(done), Total: uint64(total)}); err != nil {
			cancel(err) // nobody is there any more
		}
	})
	if err != nil {
		return nil, err
	}
	last.Trace, last.End = traced, true
	return document(last)
}

// serveImageCollapse merges small layers of an image. One image is at work at a time; others
// wait for their turn. Whoever asked and goes away, and the edge's end, end it.
func (e *Edge) serveImageCollapse(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.EdgeCollapse](s)
	if err != nil {
		return nil, err
	}
	ctx, end, tell := teller(ctx, s)
	defer end()
	select {
	case e.merging <- struct{}{}:
		defer func() { <-e.merging }()
	case <-e.stop:
		return nil, errs.New(errs.RequestCanceled, "image.collapse", "the edge is going down")
	case <-ctx.Done():
		return nil, errs.Wrap(errs.RequestCanceled, "image.collapse", "wait for another image's layers to be merged", ctx.Err())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-e.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	img, err := e.cfg.Images.Collapse(ctx, &req.Image, req.Below, req.Least, tell)
	if err != nil {
		return nil, err
	}
	return document(img)
}

func (e *Edge) serveImageEvict(_ context.Context, _ *aether.Stream, d *msg.Document) (*msg.Document, error) {
	var layers []v1.Layer
	if err := decode(d, &layers); err != nil {
		return nil, err
	}
	out := v1.EvictReport{Node: e.id}
	var err error
	if out.FreedBytes, out.InUse, err = e.cfg.Images.Evict(layers); err != nil {
		return nil, err
	}
	return document(out)
}

// serveImageTrim takes what the node is to keep in parts, since that is all there is.
func (e *Edge) serveImageTrim(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var all msg.Document
	if err := s.Parse(&all); err != nil {
		return nil, err
	}
	for {
		f, err := s.Recv(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if err := aether.JoinDocument(&all, f.Payload); err != nil {
			return nil, err
		}
	}
	var keep v1.EdgeKeep
	if err := decode(&all, &keep); err != nil {
		return nil, err
	}
	return &msg.Empty{}, e.cfg.Images.Trim(keep)
}

func decode(d *msg.Document, into any) error {
	return errs.Wrap(errs.BadRequest, "edge.images", "decode the request", json.Unmarshal(d.Json, into))
}
