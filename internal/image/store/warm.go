package store

import (
	"context"
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

// traceTime is how long after the start of a sandbox what it reads is recorded.
const traceTime = 10 * time.Second

// Trace records what is read of an image from now on for a few seconds, if not all of it
// is here, and puts the trace into the object store unless there is one.
func (s *Store) Trace(digest string, layers []image.Layer) {
	s.mu.Lock()
	if s.tracing[digest] || s.closing.Err() != nil {
		s.mu.Unlock()
		return
	}
	s.tracing[digest] = true // once in the life of the process
	s.tasks.Add(1)
	s.mu.Unlock()
	recorders := map[string]*lazy.Recorder{}
	for _, l := range layers {
		if r := s.data.Record(l.DataDigest, traceTime); r != nil {
			recorders[l.DataDigest] = r
		}
	}
	go func() {
		defer s.tasks.Done()
		if len(recorders) == 0 {
			return
		}
		timer := time.NewTimer(traceTime)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-s.closing.Done(): // half a trace is none
			return
		}
		t := trace.Trace{}
		for d, r := range recorders {
			if got := r.Stop(); len(got) > 0 {
				for _, x := range got {
					t[d] = append(t[d], trace.Range(x))
				}
			}
		}
		if err := trace.Put(s.closing, s.objects, digest, t); err != nil {
			s.log.Warn("what the start of an image read is not kept", "image", digest, "err", err)
		}
	}()
}

// LoadTrace returns what an earlier start of an image read; nil if that is not known.
func (s *Store) LoadTrace(ctx context.Context, digest string) (trace.Trace, error) {
	return trace.Get(ctx, s.objects, digest)
}
