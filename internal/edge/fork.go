package edge

import (
	"context"
	"errors"
	"sync"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// forkParallel children are made at once: each keeps a core busy for a while.
const forkParallel = 8

// fork packs a sandbox once, into an image that only its children have, and makes them.
// Each outcome is told as it is known; the children that were made stay, whatever becomes
// of the others. An error is the fork's own: then there are no children.
func (e *Edge) fork(ctx context.Context, req *v1.EdgeFork, tell func(v1.CreateResult) error) error {
	s := e.get(req.ID)
	if s == nil {
		return e.absent(req.ID)
	}
	img, release, err := e.packTemporary(ctx, s, req.LeaveOut)
	if err != nil {
		x := *errs.Of(err)
		x.Node, x.Sandbox = e.id, req.ID
		return &x
	}
	defer release()
	spec := s.snapshot().Spec
	spec.Hostname, spec.Lease = "", req.Lease
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	var mu sync.Mutex // one word at a time
	slots := make(chan struct{}, forkParallel)
	for _, id := range req.Children {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			v, err := e.create(ctx, &v1.EdgeCreate{ID: id, Spec: spec, Image: &img, ForkOf: req.ID, SecretEnv: req.SecretEnv})
			r := v1.CreateResult{Sandbox: &v}
			if err != nil {
				r = v1.CreateResult{Error: v1.ProblemOf(err)}
			}
			mu.Lock()
			defer mu.Unlock()
			if err := tell(r); err != nil {
				cancel(err) // nobody is there; whoever asked removes what it was not told of
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// packTemporary packs a sandbox into an image that goes when release was called and no
// sandbox uses it.
func (e *Edge) packTemporary(ctx context.Context, s *sandbox, leaveOut []string) (img v1.Image, release func(), err error) {
	for range 3 { // the same image as an earlier fork's may be going just now
		if img, err = e.pack(ctx, s, packing{leaveOut: leaveOut, temporary: true, progress: func(v1.ImageProgress) {}}); err != nil {
			return img, nil, err
		}
		e.tempMu.Lock()
		if e.cfg.Images.Has(img.Digest) {
			e.temps[img.Digest]++
			e.tempMu.Unlock()
			return img, func() {
				e.tempMu.Lock()
				if e.temps[img.Digest]--; e.temps[img.Digest] == 0 {
					delete(e.temps, img.Digest)
				}
				e.tempMu.Unlock()
				e.dropTemporary(&img)
			}, nil
		}
		e.tempMu.Unlock()
	}
	return img, nil, errs.New(errs.StateConflict, "edge.fork", "the sandbox's last fork was removed meanwhile, again and again")
}

// dropTemporary removes a fork's image if nothing uses it any more.
func (e *Edge) dropTemporary(img *v1.Image) {
	if img == nil || !temporary(img) {
		return
	}
	e.tempMu.Lock()
	defer e.tempMu.Unlock()
	if e.temps[img.Digest] > 0 || e.uses(img.Digest) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeTime)
	defer cancel()
	if err := e.cfg.Images.Delete(ctx, img.Digest); err != nil && !errors.Is(err, errs.ImageNotFound) {
		e.cfg.Log.Error("remove a fork's image; the next start tries again", "image", img.Digest, "err", err)
	}
}

// dropTemporaries removes the images of forks that an earlier process left.
func (e *Edge) dropTemporaries(ctx context.Context) error {
	list, err := e.cfg.Images.List(ctx)
	for _, img := range list {
		e.dropTemporary(&img)
	}
	return err
}

// uses tells whether a sandbox has the image.
func (e *Edge) uses(digest string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.sandboxes {
		if s.image != nil && s.image.Digest == digest {
			return true
		}
	}
	return false
}

func (e *Edge) serveFork(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.EdgeFork](s)
	if err != nil {
		return nil, err
	}
	err = e.fork(ctx, &req, func(r v1.CreateResult) error {
		d, err := document(r)
		if err != nil {
			return err
		}
		return s.SendMessage(ctx, d)
	})
	return &msg.Empty{}, err
}
