package apiserver

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/store"
)

// Collapsing an image has an edge merge its small neighbouring layers, and then the catalogue point
// at the new list. Name, digest and view stay, so that whatever was made on the image fits as before.
// Sandboxes keep the layers that they have; the collector removes those that nothing needs.

const (
	collapseClaim = "image-collapse"
	// collapseLeast is how many layers an image must lose for a collapse that nobody asked for: each
	// has its own copy of what it merges.
	collapseLeast = 8
)

// collapseOften collapses what has become long, now and then, one image after the other.
func (s *Server) collapseOften(ctx context.Context) {
	t := time.NewTicker(s.cfg.CollapseEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if err := s.collapseAll(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, errs.StateConflict) {
			s.cfg.Log.Warn("merge small layers of images", "err", err)
		}
	}
}

// collapseAll goes through the catalogue once. One apiserver of all does at a time.
func (s *Server) collapseAll(ctx context.Context) error {
	claim, held, err := s.cfg.Claims.Claim(ctx, collapseClaim, strconv.FormatUint(s.random.Uint64(), 16))
	if err != nil || held != nil {
		return err
	}
	defer func() {
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), catalogTime)
		defer cancel()
		if err := claim.Release(rctx); err != nil {
			s.cfg.Log.Warn("the claim of a collapse is not given up", "err", err)
		}
	}()
	var failed error
	for _, img := range s.catalog.list("") {
		if ctx.Err() != nil {
			break
		}
		if !worthCollapsing(&img, s.cfg.CollapseBelow) {
			continue
		}
		got, err := s.collapse(ctx, img, s.cfg.CollapseBelow, collapseLeast, func(*msg.ImageProgress) error { return nil })
		switch {
		case err == nil && len(got.Layers) < len(img.Layers):
			s.cfg.Log.Info("merged small layers of an image", "image", img.Name, "layers", len(img.Layers), "now", len(got.Layers))
		case err != nil && failed == nil && !errors.Is(err, errs.ImageNotFound) && !errors.Is(err, errs.StateConflict):
			failed = err
		}
	}
	return failed
}

// worthCollapsing tells whether an edge may find enough to merge.
func worthCollapsing(img *v1.Image, below int64) bool {
	small := 0
	for _, l := range img.Layers {
		if l.Kind == v1.KindDiff && l.MetaBytes+l.DataBytes < below {
			small++
		}
	}
	return small > collapseLeast
}

// collapse returns the image as the catalogue has it then.
func (s *Server) collapse(ctx context.Context, img v1.Image, below int64, least int, progress func(*msg.ImageProgress) error) (v1.Image, error) {
	node, err := s.readNode(img.Digest)
	if err != nil {
		return img, err
	}
	made, err := s.cfg.Edges.Collapse(ctx, node, &v1.EdgeCollapse{Image: img, Below: below, Least: least}, progress)
	if err != nil || store.SameLayers(made, img) {
		return img, err
	}
	s.cfg.Registry.SetImage(node.ID, img.Digest, true)
	next := func(of v1.Image) v1.Image {
		of.Layers, of.Made, of.Bytes = made.Layers, made.Made, made.Bytes
		return of
	}
	// What was merged is there: that its caller hangs up now is no reason to lose it.
	pctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), catalogTime)
	defer cancel()
	if err := s.catalog.swap(pctx, img, next(img)); err != nil {
		s.disown(ctx, node, img.Digest)
		return img, err
	}
	for _, other := range s.catalog.list(img.Digest) { // its other names
		if other.Name == img.Name || !store.SameLayers(other, img) {
			continue
		}
		if err := s.catalog.swap(pctx, other, next(other)); err != nil && !errors.Is(err, errs.ImageNotFound) && !errors.Is(err, errs.StateConflict) {
			return img, err
		}
	}
	return next(img), nil
}

type collapseInput struct {
	Image string `query:"image" required:"true" minLength:"1" maxLength:"255" doc:"Name or digest."`
	Below int64  `query:"below" default:"16777216" minimum:"1" doc:"Neighbouring layers that are both smaller than so many bytes are merged: metadata and data, before compression."`
}

// collapseNow is POST /v1/store/collapse.
func (s *Server) collapseNow(ctx context.Context, req *request, _ *http.Request, in *collapseInput) error {
	img, err := s.catalog.resolve(in.Image)
	if err != nil {
		return err
	}
	out := s.newLines(req, "application/x-ndjson")
	defer out.end()
	if img, err = s.collapse(ctx, img, in.Below, 1, out.progress); err == nil {
		return out.write(v1.ImageProgress{Phase: "commit", Image: &img})
	}
	if werr := s.importFailed(req, out, err); werr != nil {
		return werr
	}
	return err
}
