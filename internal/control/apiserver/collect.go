package apiserver

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/store"
	"dsec/internal/image/chunk"
	"dsec/internal/image/trace"
)

// Collection of garbage: what no image of the catalogue and no node needs goes from the
// object store, and then from the nodes. One apiserver of all collects at a time, by a
// claim in the store that ends with it.

const (
	collectClaim  = "image-collect"
	collectPasses = 3 // after which what was unneeded at the first is gone
	rootsTime     = 30 * time.Second
)

// fullTime is the least time between collections because a disk is full.
const fullTime = time.Minute

// noteFull has garbage collected soon if what failed was for want of disk space: what it had stored until
// then is garbage, which only a collection can tell from what others rely on.
func (s *Server) noteFull(err error) {
	if errors.Is(err, errs.DiskFull) {
		select {
		case s.full <- struct{}{}:
		default:
		}
	}
}

// collectOften makes a pass now and then, and when a disk is full.
func (s *Server) collectOften(ctx context.Context) {
	t := time.NewTicker(s.cfg.CollectEvery)
	defer t.Stop()
	var full time.Time // of the last time that one was
	for {
		var opts chunk.CollectOptions
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-s.full:
			if !full.IsZero() && time.Since(full) < fullTime {
				continue
			}
			full = time.Now()
			opts.Grace = -1 // however young it is
		}
		err := s.collect(ctx, opts, func(r v1.CollectReport) error {
			if r.Builds > 0 || r.Deleted > 0 || r.Condemned > 0 || len(r.Damaged) > 0 {
				s.cfg.Log.Info("garbage of the object store", "builds", r.Builds, "condemned", r.Condemned, "bytes", r.CondemnedBytes, "deleted", r.Deleted, "damaged", r.Damaged)
			}
			return nil
		})
		if err != nil && ctx.Err() == nil && !errors.Is(err, errs.StateConflict) {
			s.cfg.Log.Error("collect garbage of the object store", "err", err)
		}
	}
}

// collect makes as many passes as make sense now and tells of each; of the last when another
// collection may begin.
func (s *Server) collect(ctx context.Context, opts chunk.CollectOptions, tell func(v1.CollectReport) error) error {
	if s.cfg.Objects == nil {
		return noObjects("image.collect")
	}
	claim, held, err := s.cfg.Claims.Claim(ctx, collectClaim, strconv.FormatUint(s.random.Uint64(), 16))
	if err != nil {
		return err
	}
	if held != nil {
		return errs.New(errs.StateConflict, "image.collect", "a collection is under way").After(time.Second)
	}
	last, err := s.collectClaimed(ctx, opts, tell)
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), catalogTime)
	defer cancel()
	if err := claim.Release(rctx); err != nil {
		s.cfg.Log.Warn("the claim of a collection is not given up", "err", err)
	}
	if err != nil {
		return err
	}
	return tell(last)
}

// collectClaimed tells of all passes but the last, which it returns.
func (s *Server) collectClaimed(ctx context.Context, opts chunk.CollectOptions, tell func(v1.CollectReport) error) (out v1.CollectReport, err error) {
	builds, err := s.trimBuilds(ctx)
	if err != nil {
		return out, err
	}
	passes := collectPasses
	if s.cfg.ObjectsBehind {
		passes = 1 // time has to pass between them
	} else {
		opts.Settle = -1
	}
	var needed keep
	c := chunk.NewCollector(s.cfg.Objects, opts)
	for pass := 1; ; pass++ {
		r, err := c.Collect(ctx, func(ctx context.Context) ([]chunk.Layer, error) {
			needed = keep{images: map[string]bool{}, layers: map[string]bool{}}
			return s.roots(ctx, &needed)
		})
		if err != nil {
			return out, err
		}
		out = v1.CollectReport{
			Pass: pass, Builds: builds, Layers: r.Layers, NeededBytes: r.NeededBytes, Condemned: r.Condemned, CondemnedBytes: r.CondemnedBytes, Deleted: r.Deleted,
			Spared: r.Spared, Rewritten: r.Rewritten, CopiedBytes: r.CopiedBytes, Expired: r.Expired, Waiting: r.Waiting, Damaged: r.Damaged,
		}
		out.Done = pass == passes || r.Condemned+r.Deleted+r.Waiting+r.Rewritten+r.Expired == 0
		if out.Done {
			break
		}
		builds = 0 // told once
		if err := tell(out); err != nil {
			return out, err
		}
	}
	s.trim(ctx, needed)
	_, err = trace.Clean(ctx, s.cfg.Objects, needed.images)
	return out, err
}

// keep is what the catalogue and the nodes need.
type keep struct{ images, layers map[string]bool }

// roots are the layers that must stay: of every image of the catalogue, as the store has
// it and not as it was followed, and what each node says that it needs. A node that does
// not answer keeps everything.
func (s *Server) roots(ctx context.Context, needed *keep) ([]chunk.Layer, error) {
	ctx, cancel := context.WithTimeout(ctx, rootsTime)
	defer cancel()
	var all []chunk.Layer
	seen := map[chunk.Layer]bool{}
	add := func(list []v1.Layer) {
		for _, l := range list {
			needed.layers[l.MetaDigest] = true
			if l.MetaObject == "" {
				continue
			}
			c := chunkLayer(l)
			if !seen[c] {
				seen[c] = true
				all = append(all, c)
			}
		}
	}
	images, err := readImages(ctx, s.cfg.Images)
	if err != nil {
		return nil, err
	}
	for _, img := range images {
		needed.images[img.Digest] = true
		add(img.Layers)
	}
	for _, n := range s.cfg.Registry.Nodes() {
		list, err := s.cfg.Edges.ImageRoots(ctx, n)
		if err != nil {
			return nil, errs.Wrap(errs.EdgeUnreachable, "image.collect", "ask node "+n.ID+" what it needs", err)
		}
		add(list)
	}
	return all, nil
}

func chunkLayer(l v1.Layer) chunk.Layer {
	return chunk.Layer{Meta: l.MetaObject, MetaSize: l.MetaBytes, Map: l.MapObject, DataSize: l.DataBytes}
}

// readImages reads the catalogue from the store.
func readImages(ctx context.Context, from store.Images) (map[string]v1.Image, error) {
	var all map[string]v1.Image
	enough := errors.New("enough")
	err := from.FollowImages(ctx, func(ch store.Change[v1.Image]) error {
		all = ch.Put
		return enough
	})
	if errors.Is(err, enough) {
		return all, nil
	}
	return nil, err
}

// trim has the nodes forget what is not needed any more; one that fails has it in its cache
// a while longer.
func (s *Server) trim(ctx context.Context, needed keep) {
	var k v1.EdgeKeep
	for d := range needed.images {
		k.Images = append(k.Images, d)
	}
	for d := range needed.layers {
		k.Layers = append(k.Layers, d)
	}
	for _, n := range s.cfg.Registry.Nodes() {
		if err := s.cfg.Edges.TrimImages(ctx, n, k); err != nil {
			s.cfg.Log.Warn("a node keeps images that are not needed", "node", n.ID, "err", err)
		}
	}
}

type collectInput struct {
	Grace int64 `query:"grace_s" default:"3600" minimum:"0" maximum:"31536000" doc:"What is younger is left for a later collection."`
}

func (s *Server) collectNow(ctx context.Context, req *request, _ *http.Request, in *collectInput) error {
	out := s.newLines(req, "application/x-ndjson")
	defer out.end()
	opts := chunk.CollectOptions{Grace: time.Duration(in.Grace) * time.Second}
	if in.Grace == 0 {
		opts.Grace = -1
	}
	err := s.collect(ctx, opts, func(r v1.CollectReport) error { return out.write(r) })
	if err == nil || req.status == 0 {
		return err
	}
	if werr := out.write(v1.CollectReport{Error: problemOf(req, err)}); werr != nil {
		return werr
	}
	return err
}

func noObjects(phase string) error {
	return errs.New(errs.NotSupported, phase, "this server has no object store")
}
