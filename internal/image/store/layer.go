package store

import (
	"context"
	"io"
	"os"
	"path/filepath"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/chunk"
	"dsec/internal/image/layer"
)

// pin is a layer that was added and not released, with the leases under which it was.
type pin struct {
	n        int
	sessions []*chunk.Session
}

// AddLayer puts the layer that write makes into the object store, and keeps a copy here.
// It is kept though no image has it, until [Store.Release], which the caller calls once
// in any case, after [Store.AddImage] or when there is to be no image. On error nothing
// is left and there is nothing to release. Errors: write's, disk_full, lease_lost, the
// object store's.
func (s *Store) AddLayer(ctx context.Context, kind string, write func(data layer.Blob, meta io.Writer) (layer.Result, error)) (image.Layer, error) {
	return s.addLayer(ctx, kind, false, nil, write)
}

// addLayer is AddLayer. With along, data goes into the object store while write works, which
// so has less of the processors for itself.
func (s *Store) addLayer(ctx context.Context, kind string, along bool, progress func(int64), write func(data layer.Blob, meta io.Writer) (layer.Result, error)) (l image.Layer, err error) {
	tmp, err := os.MkdirTemp(s.path("tmp"), "import-")
	if err != nil {
		return l, layer.DiskError("make import directory", err)
	}
	defer os.RemoveAll(tmp)
	meta, err := os.Create(filepath.Join(tmp, "meta"))
	if err != nil {
		return l, layer.DiskError("make metadata blob", err)
	}
	defer meta.Close()
	data, err := os.Create(filepath.Join(tmp, "data"))
	if err != nil {
		return l, layer.DiskError("make data blob", err)
	}
	defer data.Close()
	var session *chunk.Session
	if along { // else not yet: a lease is not to be held for what may take long
		if session, err = s.writer.Begin(ctx); err != nil {
			return l, err
		}
	}
	f := newFollowed(ctx, data, session)
	res, err := write(f, meta)
	if err == nil {
		err = errs.Wrap(errs.RequestCanceled, phase, "store layer", ctx.Err())
	}
	if err == nil && session == nil {
		session, err = s.writer.Begin(ctx)
	}
	if err == nil {
		l = image.Layer{
			Kind: kind, MetaDigest: res.MetaDigest, MetaSize: res.MetaSize, DataDigest: res.DataDigest, DataSize: res.DataSize,
		}
		err = s.put(ctx, session, &l, f, meta, progress)
	} else {
		f.end(err)
	}
	if err == nil {
		data.Close() // the cache takes only what nobody has open
		err = s.place(ctx, l, meta, filepath.Join(tmp, "data"))
	}
	if err != nil {
		if session != nil {
			session.Close(ctx)
		}
		return image.Layer{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pins[l.MetaDigest]
	if p == nil {
		p = &pin{}
		s.pins[l.MetaDigest] = p
	}
	p.n++
	p.sessions = append(p.sessions, session)
	return l, nil
}

// put puts both blobs of a layer into the object store and notes where they are.
func (s *Store) put(ctx context.Context, session *chunk.Session, l *image.Layer, data *followed, meta *os.File, progress func(int64)) error {
	var err error
	if l.MapObject, err = data.finish(l.DataSize); err != nil {
		return err
	}
	rest := chunk.Blob{R: data.File, Size: l.DataSize, Progress: progress}
	if l.MapObject != "" {
		rest.Size = 0
	}
	stored, _, err := session.PutLayer(ctx, chunk.Blob{R: meta, Size: l.MetaSize}, rest)
	if err != nil {
		return err
	}
	l.MetaObject = stored.Meta
	if stored.Map != "" {
		l.MapObject = stored.Map
	}
	return nil
}

// place keeps what was built as this node's copy.
func (s *Store) place(ctx context.Context, l image.Layer, meta *os.File, data string) error {
	// Whoever finds it takes it for whole.
	if err := meta.Sync(); err != nil {
		return layer.DiskError("sync metadata", err)
	}
	if err := os.Rename(meta.Name(), s.path("meta", l.MetaDigest)); err != nil {
		return layer.DiskError("place metadata", err)
	}
	s.metaIs(l, s.path("meta", l.MetaDigest))
	if l.DataDigest != "" {
		m, err := s.loadMap(ctx, l)
		if err != nil {
			return err
		}
		if err := s.data.Add(ctx, l.DataDigest, l.DataSize, newFiller(s.reader, m), data); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.note(l)
}

// Release ends what [Store.AddLayer] began: the object store keeps the layer only if an
// image has it. What is here of it stays while the cache has room.
func (s *Store) Release(l image.Layer) {
	s.mu.Lock()
	p := s.pins[l.MetaDigest]
	if p == nil {
		s.mu.Unlock()
		return
	}
	var ended []*chunk.Session
	if p.n--; p.n == 0 {
		delete(s.pins, l.MetaDigest)
		ended = p.sessions
	}
	s.mu.Unlock()
	for _, e := range ended {
		e.Close(context.Background()) // bounded by itself
	}
}
