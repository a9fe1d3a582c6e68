package store

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"sync"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/chunk"
	"dsec/internal/image/layer"
	"dsec/internal/image/lazy"
	"dsec/internal/image/object"

	"golang.org/x/sys/unix"
)

// fetchTime bounds how long the metadata and the map of a layer may take to come.
const fetchTime = 2 * time.Minute

// Use makes a layer ready to be mounted or read, and returns its files and a function to
// call once when they are not open any more. Metadata is fetched, data comes when it is
// read: a file of it must not be opened otherwise. Errors: image_not_found (it is in no
// object store), store_corrupt, object_not_found and the object store's own, disk_full,
// those of [lazy.Cache.Blob].
func (s *Store) Use(ctx context.Context, l image.Layer) (f image.LayerFiles, release func(), err error) {
	f, _, release, err = s.use(ctx, l)
	return f, release, err
}

func (s *Store) use(ctx context.Context, l image.Layer) (f image.LayerFiles, blob *lazy.Blob, release func(), err error) {
	if err := Stored(l); err != nil {
		return f, nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTime)
	defer cancel()
	s.mu.Lock()
	s.uses[l.MetaDigest]++
	err = s.note(l)
	s.mu.Unlock()
	release = sync.OnceFunc(func() {
		if blob != nil {
			blob.Close()
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.uses[l.MetaDigest]--; s.uses[l.MetaDigest] == 0 {
			delete(s.uses, l.MetaDigest)
		}
	})
	if err == nil {
		err = s.fetchMeta(ctx, l)
	}
	if err == nil && l.DataDigest != "" {
		var m *chunk.Map
		if m, err = s.loadMap(ctx, l); err == nil {
			f := newFiller(s.reader, m)
			if blob, err = s.data.Blob(ctx, l.DataDigest, l.DataSize, f); err == nil {
				s.group(f, blob, l)
			}
		}
	}
	if err != nil {
		release()
		return f, nil, nil, err
	}
	f.Meta = s.path("meta", l.MetaDigest)
	if blob != nil {
		f.Data = blob.Path()
	}
	return f, blob, release, nil
}

// group tells a filler where the layer's files are, while the layer is being mounted.
func (s *Store) group(f *filler, blob *lazy.Blob, l image.Layer) {
	if p := blob.Progress(); p.Filled == p.Total {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing.Err() != nil {
		return
	}
	s.tasks.Add(1)
	go func() {
		defer s.tasks.Done()
		meta, err := os.Open(s.path("meta", l.MetaDigest))
		if err == nil {
			defer meta.Close()
			var runs *layer.Runs
			if runs, err = layer.ReadRuns(s.closing, meta, l.MetaSize, l.DataSize); err == nil {
				f.runs.Store(runs)
			}
		}
		if err != nil && s.closing.Err() == nil {
			s.log.Warn("a layer is read ahead without regard to its files", "layer", l.MetaDigest, "err", err)
		}
	}()
}

// fetchMeta makes the layer's metadata be here, and be what its name says: the kernel
// would show whatever a damaged file says.
func (s *Store) fetchMeta(ctx context.Context, l image.Layer) error {
	path := s.path("meta", l.MetaDigest)
	if ok, err := s.checkMeta(ctx, l, path); ok || err != nil {
		return err
	}
	if err := chunk.GetMeta(ctx, s.objects, chunkLayer(l), path); err != nil {
		return err
	}
	s.metaIs(l, path)
	return nil
}

// checked is which file was compared with its digest last.
type checked struct {
	inode        uint64
	mtime, ctime unix.Timespec
}

// checkMeta says whether the file is what its name says. It is read once, and again when
// it has changed.
func (s *Store) checkMeta(ctx context.Context, l image.Layer, path string) (bool, error) {
	now, err := stamp(path)
	if err != nil {
		return false, nil //nolint:nilerr // then it is fetched
	}
	s.mu.Lock()
	same := s.checked[l.MetaDigest] == now
	s.mu.Unlock()
	if same {
		return true, nil
	}
	err = verifyBlob(ctx, "metadata", path, l.MetaDigest, l.MetaSize, func(int) {})
	if errors.Is(err, errs.RequestCanceled) {
		return false, err
	}
	if err != nil {
		s.log.Warn("metadata on the node is damaged and fetched again", "layer", l.MetaDigest, "err", err)
		return false, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checked[l.MetaDigest] = now
	return true, nil
}

func stamp(path string) (checked, error) {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	return checked{st.Ino, st.Mtim, st.Ctim}, err
}

// metaIs notes that the file was just written from what has the layer's digest.
func (s *Store) metaIs(l image.Layer, path string) {
	now, err := stamp(path)
	if err != nil {
		return // gone again; a use looks for itself
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checked[l.MetaDigest] = now
}

func chunkLayer(l image.Layer) chunk.Layer {
	return chunk.Layer{Meta: l.MetaObject, MetaSize: l.MetaSize, Map: l.MapObject, DataSize: l.DataSize}
}

// note writes down where a layer is, for Reopen. s.mu is held.
func (s *Store) note(l image.Layer) error {
	l.Kind = ""
	if s.layers[l.MetaDigest] == l {
		return nil
	}
	if err := s.writeNote("layers", l.MetaDigest, l, false); err != nil {
		return err
	}
	s.layers[l.MetaDigest] = l
	return nil
}

// reopen finds where the data of a blob is that sandboxes of an earlier process read.
func (s *Store) reopen(ctx context.Context, digest string, size int64) (lazy.Filler, error) {
	var found image.Layer
	s.mu.Lock()
	for _, l := range s.layers {
		if l.DataDigest == digest && l.DataSize == size {
			found = l
		}
	}
	s.mu.Unlock()
	if found.MapObject == "" {
		return nil, errs.New(errs.ImageNotFound, phase, "nothing here says where data blob "+digest+" is stored")
	}
	m, err := s.loadMap(ctx, found)
	if err != nil {
		return nil, err
	}
	return newFiller(s.reader, m), nil
}

// loadMap reads a layer's map, from here if it was read before.
func (s *Store) loadMap(ctx context.Context, l image.Layer) (*chunk.Map, error) {
	m, err := chunk.LoadMap(ctx, s.maps, l.MapObject)
	if err != nil { // not here, or damaged here
		read := &recorded{Store: s.objects}
		if m, err = chunk.LoadMap(ctx, read, l.MapObject); err != nil {
			return nil, err
		}
		if err := s.maps.Put(ctx, l.MapObject, int64(read.body.Len()), &read.body); err != nil {
			s.log.Warn("a map is not kept on the node", "map", l.MapObject, "err", err)
		}
	}
	if m.Size() != l.DataSize {
		return nil, errs.New(errs.ImageCorrupt, phase, "the map "+l.MapObject+" is of a blob of another size")
	}
	return m, nil
}

// recorded keeps what was read last.
type recorded struct {
	object.Store
	body bytes.Buffer
}

func (r *recorded) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	rc, err := r.Store.Get(ctx, key, off, n)
	if err != nil {
		return nil, err
	}
	r.body.Reset()
	return struct {
		io.Reader
		io.Closer
	}{io.TeeReader(rc, &r.body), rc}, nil
}

// Drop removes what is here of a layer. Errors: state_conflict (it is in use).
func (s *Store) Drop(l image.Layer) error {
	s.forgetStarts(l)
	if l.DataDigest != "" {
		if err := s.data.Remove(l.DataDigest); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.uses[l.MetaDigest] > 0 || s.pins[l.MetaDigest] != nil {
		return errs.New(errs.StateConflict, phase, "layer "+l.MetaDigest+" is in use")
	}
	if err := os.Remove(s.path("meta", l.MetaDigest)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap(errs.InternalError, phase, "remove metadata", err)
	}
	delete(s.checked, l.MetaDigest)
	if err := s.removeNote("layers", l.MetaDigest); err != nil {
		return err
	}
	delete(s.layers, l.MetaDigest)
	if l.MapObject == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), fetchTime)
	defer cancel()
	return s.maps.Delete(ctx, l.MapObject)
}
