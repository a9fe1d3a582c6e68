package store

import (
	"context"
	"slices"
	"time"

	"dsec/internal/image"
	"dsec/internal/image/lazy"
	"dsec/internal/image/trace"
)

const warmTick = 200 * time.Millisecond

// Warm fetches layers: all of them, or what a start of their image read, if t is known.
// Metadata is fetched in any case. progress, if set, is told now and then how many bytes of
// data are here, of how many. Errors: those of [Store.Use], the object store's.
func (s *Store) Warm(ctx context.Context, layers []image.Layer, all bool, t trace.Trace, progress func(done, total int64)) error {
	var blobs []*lazy.Blob
	for _, l := range layers {
		_, blob, release, err := s.use(ctx, l)
		if err != nil {
			return err
		}
		defer release()
		if blob != nil {
			blobs = append(blobs, blob)
		}
	}
	tell := func() {
		if progress == nil {
			return
		}
		var done, total int64
		for _, b := range blobs {
			p := b.Progress()
			done += p.Filled
			total += p.Total
		}
		progress(done, total)
	}
	tell()
	defer tell()
	failed := make(chan error, 1)
	go func() {
		for i, b := range blobs {
			var err error
			if all {
				err = b.Fill(ctx)
			} else {
				err = b.Warm(ctx, replay(t[blobDigest(layers, i)]))
			}
			if err != nil {
				failed <- err
				return
			}
		}
		failed <- nil
	}()
	tick := time.NewTicker(warmTick)
	defer tick.Stop()
	for {
		select {
		case err := <-failed:
			return err
		case <-tick.C:
			tell()
		}
	}
}

func replay(t []trace.Range) lazy.Trace {
	out := make(lazy.Trace, len(t))
	for i, x := range t {
		out[i] = lazy.Range(x)
	}
	return out
}

// blobDigest is the digest of the data blob i of those layers that have one.
func blobDigest(layers []image.Layer, i int) string {
	for _, l := range layers {
		if l.DataDigest == "" {
			continue
		}
		if i == 0 {
			return l.DataDigest
		}
		i--
	}
	return ""
}

// What the starts of images are learnt from and helped by.
const (
	startTime = time.Minute // between two looks at what a start of an image needs
	replayMax = 256 << 20   // bytes of a trace that are fetched: who recorded it may have read all
)

// Started says that a sandbox of the image starts. If not all of it is here, what an
// earlier start read is fetched in the background, or, if that is not known, what is read
// in the next seconds is recorded and put into the object store.
func (s *Store) Started(digest string, layers []image.Layer) {
	now := s.now()
	ctx, cancel := context.WithCancel(s.closing)
	x := &start{when: now, layers: layers, end: cancel, over: make(chan struct{})}
	s.mu.Lock()
	if last, ok := s.starts[digest]; ok && now.Sub(last.when) < startTime || s.closing.Err() != nil {
		s.mu.Unlock()
		cancel()
		return
	}
	s.starts[digest] = x
	s.tasks.Add(1)
	s.mu.Unlock()
	// Not under the lock, which every create needs: a blob may be busy.
	recorders := map[string]*lazy.Recorder{}
	for _, l := range layers {
		if r := s.data.Record(l.DataDigest, s.traceTime); r != nil {
			recorders[l.DataDigest] = r
		}
	}
	end := func() {
		cancel()
		close(x.over)
		s.tasks.Done()
	}
	if len(recorders) == 0 {
		end()
		return
	}
	go func() {
		defer end()
		if err := s.learn(ctx, digest, layers, recorders); err != nil && ctx.Err() == nil {
			s.log.Warn("what the start of an image reads is not known", "image", digest, "err", err)
		}
	}()
}

// start is one of an image on this node.
type start struct {
	when   time.Time
	layers []image.Layer
	end    context.CancelFunc // ends what it does in the background
	over   chan struct{}      // closed when that has ended
}

// forgetStarts says that what is here of a layer goes: whoever starts is in need of all
// again. It returns when nothing uses the layer because of an earlier start.
func (s *Store) forgetStarts(l image.Layer) {
	var ended []*start
	s.mu.Lock()
	for d, x := range s.starts {
		if slices.ContainsFunc(x.layers, func(y image.Layer) bool {
			return y.MetaDigest == l.MetaDigest || l.DataDigest != "" && y.DataDigest == l.DataDigest
		}) {
			delete(s.starts, d)
			x.end()
			ended = append(ended, x)
		}
	}
	s.mu.Unlock()
	for _, x := range ended {
		<-x.over
	}
}

func (s *Store) learn(ctx context.Context, digest string, layers []image.Layer, recorders map[string]*lazy.Recorder) error {
	stop := func() trace.Trace {
		t := trace.Trace{}
		for d, r := range recorders {
			for _, x := range r.Stop() {
				t[d] = append(t[d], trace.Range(x))
			}
		}
		return t
	}
	known, err := s.LoadTrace(ctx, digest)
	if err != nil || known != nil {
		stop()
		if err == nil {
			err = s.Warm(ctx, layers, false, known.First(replayMax), nil)
		}
		return err
	}
	timer := time.NewTimer(s.traceTime)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done(): // half a trace is none
		stop()
		return nil
	}
	return trace.Put(ctx, s.objects, digest, stop())
}

// LoadTrace returns what an earlier start of an image read; nil if that is not known.
func (s *Store) LoadTrace(ctx context.Context, digest string) (trace.Trace, error) {
	return trace.Get(ctx, s.objects, digest)
}
