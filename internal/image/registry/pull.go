package registry

import (
	"context"
	"fmt"
	"io"
	"sync"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/layer"
	"dsec/internal/image/source"
)

// Result of a pull.
type Result struct {
	Ref        string // what was asked for, in full
	Digest     string // of what the reference names: the index, if it is one
	Manifest   string // digest of the image's own manifest
	Platform   string
	Config     image.Config
	Downloaded int64 // bytes of layers
	SpoolPeak  int64 // bytes that lay in the spool at most
}

// Pull reads the image that ref names into b. On error b is of no use.
func Pull(ctx context.Context, ref string, b *layer.Builder, opts Options) (Result, error) {
	r, err := Resolve(ctx, ref, opts)
	if err != nil {
		return Result{}, err
	}
	return r.Pull(ctx, b)
}

// Pull downloads the image into b and closes r. On error b is of no use.
func (r *Remote) Pull(ctx context.Context, b *layer.Builder) (Result, error) {
	defer r.Close()
	o := &r.s.opts
	ctx, cancel := withLimit(ctx, PhaseDownload, o.TransferTimeout)
	defer cancel()
	r.s.enter(PhaseDownload)
	res, phase, err := r.pull(ctx, b)
	return res, inPhase(ctx, phase, phase+" "+r.Ref, o.TransferTimeout, err)
}

// pull returns the phase that an error belongs to besides.
func (r *Remote) pull(ctx context.Context, b *layer.Builder) (Result, string, error) {
	s := r.s
	sp, err := newSpool(s.opts.SpoolDir, s.opts.SpoolMax)
	if err != nil {
		return Result{}, PhaseDownload, err
	}
	defer sp.close()
	s.tell.begin(PhaseDownload, r.Size)
	s.tell.begin(PhaseConvert, r.Size)
	streams := make([]*stream, len(r.manifest.Layers))
	for i, l := range r.manifest.Layers {
		streams[i] = newStream(sp, i, l.Size, func(n int64) { s.tell.add(PhaseConvert, n) })
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	wait := r.start(ctx, stop, streams)
	got, err := source.Image(ctx, r.manifest, r.config, func(i int) (io.ReadCloser, error) {
		sp.read(i)
		return streams[i], nil
	}, b, source.Options{Platform: s.opts.Platform, MaxBytes: s.opts.MaxBytes})
	if err != nil {
		stop()
	}
	wait()
	res := Result{
		Ref: r.Ref, Digest: r.Digest, Manifest: r.Manifest, Platform: r.Platform, Config: got.Config,
		Downloaded: s.tell.done(PhaseDownload), SpoolPeak: int64(sp.peak) * slotSize,
	}
	// Where the two stopped each other, the one that was not told to is the cause.
	failed := firstFailure(streams)
	if err != nil && failed != nil && (!canceled(failed) || canceled(err)) {
		return res, PhaseDownload, failed
	}
	return res, PhaseConvert, err
}

// start downloads the streams, in order and a few at a time; the first failure
// stops everything. The function it returns waits for the end of that.
func (r *Remote) start(ctx context.Context, stop func(), streams []*stream) (wait func()) {
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(r.s.opts.Parallel, len(streams)) {
		wg.Go(func() {
			for i := range next {
				if err := r.download(ctx, i, streams); err != nil {
					stop()
				}
			}
		})
	}
	wg.Go(func() {
		defer close(next)
		for i := range streams {
			select {
			case next <- i:
			case <-ctx.Done():
				for _, st := range streams[i:] {
					st.finish(stopped(ctx))
				}
				return
			}
		}
	})
	return wg.Wait
}

func (r *Remote) download(ctx context.Context, i int, streams []*stream) error {
	st, d := streams[i], r.manifest.Layers[i]
	err := r.s.fetch(ctx, fmt.Sprintf("layer %d of %d (%s)", i+1, len(streams), d.Digest), d, func(p []byte) error {
		r.s.tell.add(PhaseDownload, int64(len(p)))
		return st.write(ctx, p)
	})
	if err != nil && ctx.Err() != nil {
		err = stopped(ctx)
	}
	st.finish(errs.Wrap(errs.InternalError, r.s.phase(), "download", err))
	return err
}

func stopped(ctx context.Context) error {
	return errs.Wrap(errs.RequestCanceled, phasePrefix+PhaseDownload, "download", context.Cause(ctx))
}

// firstFailure is what stopped the streams: not what being stopped did to others.
func firstFailure(streams []*stream) error {
	var stopped error
	for _, st := range streams {
		err := st.failure()
		if err != nil && !canceled(err) {
			return err
		}
		if stopped == nil {
			stopped = err
		}
	}
	return stopped
}

func canceled(err error) bool { return errs.Of(err).Class() == errs.Canceled }
