package edge

import (
	"context"
	"errors"
	"io"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/image/layer"
	"dsec/internal/snapshot"
)

// Pack is a snapshot to be stored.
type Pack struct {
	On     *v1.Image      // what the layer is made on
	Config v1.ImageConfig // of the image that comes of it
	About  v1.Snapshot    // without what the manifest says
	Plain  bool           // without About: an image as any other
	// Write makes the layer.
	Write func(data layer.Blob, meta io.Writer) (layer.Result, snapshot.Manifest, error)
}

// snapshot packs what a sandbox changed into an image of this node. The sandbox stands
// still while its changes are read, or what is left of them to read. One pack of a sandbox runs at a time; the
// sandbox's end ends it.
func (e *Edge) snapshot(ctx context.Context, req *v1.EdgeSnapshot, progress func(v1.ImageProgress)) (v1.Image, error) {
	s := e.get(req.ID)
	if s == nil {
		return v1.Image{}, e.absent(req.ID)
	}
	img, err := e.pack(ctx, s, packing{leaveOut: req.LeaveOut, plain: req.Plain, config: req.Config, progress: progress})
	if err != nil {
		x := *errs.Of(err)
		x.Node, x.Sandbox = e.id, req.ID
		return v1.Image{}, &x
	}
	return img, nil
}

// packing is what is asked of one pack.
type packing struct {
	leaveOut  []string
	temporary bool
	plain     bool            // the image belongs to no lineage
	config    *v1.ImageConfig // nil: as the sandbox runs programs
	progress  func(v1.ImageProgress)
}

func (e *Edge) pack(ctx context.Context, s *sandbox, p packing) (v1.Image, error) {
	ctx, done, err := s.beginPack(ctx)
	if err != nil {
		return v1.Image{}, err
	}
	defer done()
	s.begin()
	defer s.onEnd()
	s.mu.Lock()
	v, instance := s.view, s.instance
	s.mu.Unlock()
	if v.State != v1.StateRunning && v.State != v1.StatePaused || instance == nil { // a paused one stays so: whoever wants to resume it waits
		return v1.Image{}, notRunning(v)
	}
	packer, ok := instance.(backend.Packer)
	if !ok {
		return v1.Image{}, errs.New(errs.NotSupported, "edge.pack", "sandboxes of the backend "+string(v.Spec.Backend)+" have no snapshots")
	}
	if s.image == nil {
		return v1.Image{}, errs.New(errs.NotSupported, "edge.pack", "the sandbox has no image")
	}
	on, since := s.image, (*snapshot.Seen)(nil)
	if s.last != nil {
		defer e.packOn(s, "")
		if e.packOn(s, s.last.image.Digest) {
			on, since = &s.last.image, s.last.seen
		}
	}
	config := configOf(s.image, &v.Spec)
	if p.config != nil {
		config = *p.config
	}
	tell := Thin(p.progress)
	var times backend.PackTimes
	for {
		next := &snapshot.Seen{}
		img, err := e.cfg.Images.Pack(ctx, Pack{
			On: on, Config: config, Plain: p.plain,
			About: v1.Snapshot{Source: v.ID, Parents: parentsOf(on), Parts: partsOf(on), Labels: v.Spec.Labels, Temporary: p.temporary},
			Write: func(data layer.Blob, meta io.Writer) (layer.Result, snapshot.Manifest, error) {
				res, man, err := packer.Pack(ctx, backend.PackOptions{
					Data: data, Meta: meta, LeaveOut: p.leaveOut, Since: since, Next: next, Times: &times,
					Progress: func(bytes, entries int64) { tell(v1.ImageProgress{Phase: "pack", Done: bytes, Entries: entries}) },
				})
				if err == nil {
					tell(v1.ImageProgress{Phase: "store"})
				}
				return res, man, err
			},
		})
		if since != nil && errors.Is(err, snapshot.ErrWhole) {
			on, since = s.image, nil
			continue
		}
		if err == nil {
			e.rememberPack(s, &lastPack{img, next})
			img.Pack = &v1.PackTimes{FrozenMS: milliseconds(times.Frozen), ReadAheadMS: milliseconds(times.Ahead)}
		}
		return img, err
	}
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// packOn notes that a pack is made on an image, which is then not removed, unless it is gone
// already. An empty digest ends that.
func (e *Edge) packOn(s *sandbox, digest string) bool {
	e.mu.Lock()
	s.packedOn = digest
	e.mu.Unlock()
	return e.cfg.Images.Has(digest)
}

// parentsOf are the images that a snapshot of a sandbox of img is made on.
func parentsOf(img *v1.Image) []string {
	if temporary(img) {
		return img.Snapshot.Parents // it goes before the snapshot does
	}
	return img.Digests()
}

// partsOf are the images at the bottom of a snapshot of a sandbox of img, if there are several.
func partsOf(img *v1.Image) []v1.ImagePart {
	if len(img.Parts) == 0 && img.Snapshot != nil {
		return img.Snapshot.Parts
	}
	return img.Parts
}

// configOf is the configuration by which a sandbox of the snapshot runs programs as the
// one that it was made of did.
func configOf(img *v1.Image, spec *v1.Spec) v1.ImageConfig {
	c := img.Config
	c.Override(spec.Env, spec.User, spec.WorkDir)
	return c
}

// beginPack waits for the sandbox's turn to be packed. The context that it returns ends
// with the sandbox.
func (s *sandbox) beginPack(ctx context.Context) (_ context.Context, done func(), err error) {
	select {
	case s.packs <- struct{}{}:
	case <-s.life.Done():
		return nil, nil, notRunning(s.snapshot())
	case <-ctx.Done():
		return nil, nil, errs.Wrap(errs.RequestCanceled, "edge.pack", "wait for another snapshot of the sandbox", ctx.Err())
	}
	if s.life.Err() != nil {
		<-s.packs
		return nil, nil, notRunning(s.snapshot())
	}
	ctx, cancel := context.WithCancel(ctx)
	unhook := context.AfterFunc(s.life, cancel)
	return ctx, func() {
		unhook()
		cancel()
		<-s.packs
	}, nil
}

// stopPacks ends the pack, the pause or the resume that is under way, and no other begins. It is called before the
// sandbox's resources go.
func (s *sandbox) stopPacks() {
	s.stop()
	s.mu.Lock()
	if s.move != nil {
		s.move.cancel()
	}
	s.mu.Unlock()
	select {
	case s.packs <- struct{}{}:
		<-s.packs
	case <-time.After(removeTime): // it reads a directory that vanishes under it, which does no harm
	}
}

// progressStep is how many bytes there are between two words of progress.
const progressStep = 4 << 20

// Thin passes progress on when there is something to tell.
func Thin(to func(v1.ImageProgress)) func(v1.ImageProgress) {
	var last v1.ImageProgress
	return func(p v1.ImageProgress) {
		if p.Phase != last.Phase || p.Done-last.Done >= progressStep || p.Entries-last.Entries >= 4096 {
			last = p
			to(p)
		}
	}
}

// teller sends progress on a stream. If nobody takes it, the work's context ends.
func teller(ctx context.Context, s *aether.Stream) (_ context.Context, end func(), tell func(v1.ImageProgress)) {
	ctx, cancel := context.WithCancelCause(ctx)
	return ctx, func() { cancel(nil) }, func(p v1.ImageProgress) {
		m := &msg.ImageProgress{Phase: p.Phase, Done: uint64(p.Done), Total: uint64(p.Total), Entries: uint64(p.Entries)}
		if err := s.SendMessage(ctx, m); err != nil {
			cancel(err) // nobody is there any more
		}
	}
}

func (e *Edge) serveSnapshot(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	req, err := asked[v1.EdgeSnapshot](s)
	if err != nil {
		return nil, err
	}
	ctx, end, tell := teller(ctx, s)
	defer end()
	img, err := e.snapshot(ctx, &req, tell)
	if err != nil {
		return nil, err
	}
	return document(img)
}
