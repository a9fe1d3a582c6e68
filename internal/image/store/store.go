package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
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

const (
	phase     = "image.store"
	digestPfx = "sha256:"
	jsonExt   = ".json"
)

// Store is safe for concurrent use.
type Store struct {
	dir     string
	now     func() time.Time
	log     *slog.Logger
	lock    *os.File
	objects object.Store
	writer  *chunk.Writer
	reader  *chunk.Reader
	maps    object.Store
	data    *lazy.Cache

	closing context.Context // ends with Close
	end     context.CancelFunc
	tasks   sync.WaitGroup

	traceTime time.Duration

	mu     sync.Mutex // guards the maps, and the directory but for data
	images map[string]image.Image
	layers map[string]image.Layer // by metadata digest
	pins   map[string]*pin        // by metadata digest
	uses   map[string]int         // by metadata digest: who has the files
	own    map[string]own         // by file name
	// checked has which metadata was compared with its digest, by that.
	checked map[string]checked
	// starts has when sandboxes of images started last, by digest of the image.
	starts map[string]*start
}

// Options of a store. Objects is needed.
type Options struct {
	Objects object.Store     // where layers are kept; the caller closes it, after the store
	Now     func() time.Time // for CreatedUnixMS
	Log     *slog.Logger
	Lazy    lazy.Options // of the cache of data; Reopen is the store's own
	// TraceTime is how long after the start of a sandbox what it reads is recorded (10 s).
	TraceTime time.Duration
}

// Open opens the store in dir, making it if needed, and removes what a crash left. What
// sandboxes read that outlived an earlier process is served on. A second process is
// refused with state_conflict. Other errors: not_supported (data cannot be loaded on
// demand here), disk_full, internal_error.
func Open(ctx context.Context, dir string, opts Options) (_ *Store, err error) {
	s := &Store{
		dir: dir, now: opts.Now, log: opts.Log, objects: opts.Objects,
		images: map[string]image.Image{}, layers: map[string]image.Layer{}, pins: map[string]*pin{}, uses: map[string]int{}, own: map[string]own{}, checked: map[string]checked{}, starts: map[string]*start{},
	}
	s.traceTime = cmp.Or(opts.TraceTime, 10*time.Second)
	if s.now == nil {
		s.now = time.Now
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.closing, s.end = context.WithCancel(context.WithoutCancel(ctx))
	for _, d := range []string{"meta", "layers", "images", "own", "tmp"} {
		if err := os.MkdirAll(s.path(d), 0o700); err != nil {
			return nil, layer.DiskError("make store directory", err)
		}
	}
	if s.lock, err = os.OpenFile(s.path("lock"), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return nil, layer.DiskError("open store lock", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if err := unix.Flock(int(s.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errs.New(errs.StateConflict, phase, "another process has the image store "+dir+" open").Because(err)
	}
	if err := s.load(); err != nil {
		return nil, err
	}
	if s.maps, err = object.OpenDir(ctx, s.path("maps")); err != nil {
		return nil, err
	}
	damage := &chunk.Damage{} // what is read here and damaged, an import on this node stores again
	if s.reader, err = chunk.NewReader(opts.Objects, chunk.ReaderOptions{Damage: damage}); err != nil {
		return nil, err
	}
	s.writer = chunk.NewWriter(opts.Objects, chunk.Options{Now: opts.Now, Damage: damage})
	opts.Lazy.Reopen = s.reopen
	if opts.Lazy.Log == nil {
		opts.Lazy.Log = s.log
	}
	// From here on what sandboxes of an earlier process read is answered.
	s.data, err = lazy.Open(ctx, DataDir(dir), opts.Lazy)
	return s, err
}

// Close gives the store up to other processes. Readers of what is not there yet wait for
// the next one.
func (s *Store) Close() error {
	s.mu.Lock()
	s.end()
	s.mu.Unlock()
	s.tasks.Wait()
	var all []error
	if s.data != nil {
		all = append(all, s.data.Close())
	}
	if s.writer != nil {
		s.writer.Close()
	}
	return errors.Join(append(all, s.lock.Close())...)
}

// DataDir is where the store in dir has the cache of data blobs.
func DataDir(dir string) string { return filepath.Join(dir, "data") }

// Cache is the cache of data blobs.
func (s *Store) Cache() *lazy.Cache { return s.data }

func (s *Store) path(name ...string) string {
	return filepath.Join(append([]string{s.dir}, name...)...)
}

// load reads what is known here and removes what imports left.
func (s *Store) load() error {
	if err := removeAllIn(s.path("tmp")); err != nil {
		return err
	}
	err := loadNotes(s, "images", func(name string, img image.Image) bool {
		s.images[img.Digest] = img
		return img.Digest == digestPfx+name
	})
	if err != nil {
		return err
	}
	err = loadNotes(s, "layers", func(name string, l image.Layer) bool {
		s.layers[l.MetaDigest] = l
		return l.MetaDigest == name
	})
	if err != nil {
		return err
	}
	return loadNotes(s, "own", func(name string, o own) bool {
		s.own[name] = o
		return len(o.Layers) > 0
	})
}

// loadNotes reads a directory of notes and removes those that are not whole: a crash of
// the machine leaves such, since most are not synced.
func loadNotes[T any](s *Store, dir string, take func(name string, v T) bool) error {
	names, err := os.ReadDir(s.path(dir))
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "list "+dir, err)
	}
	for _, n := range names {
		var v T
		name, ok := strings.CutSuffix(n.Name(), jsonExt)
		p, err := os.ReadFile(s.path(dir, n.Name()))
		if err != nil {
			return errs.Wrap(errs.InternalError, phase, "read "+n.Name(), err)
		}
		if ok && json.Unmarshal(p, &v) == nil && take(name, v) {
			continue
		}
		s.log.Warn("a note of the image store is not usable", "dir", dir, "name", n.Name())
		if err := os.Remove(s.path(dir, n.Name())); err != nil {
			return errs.Wrap(errs.InternalError, phase, "remove damaged note", err)
		}
	}
	return nil
}

func removeAllIn(dir string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "list unfinished imports", err)
	}
	for _, e := range list {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return errs.Wrap(errs.InternalError, phase, "remove unfinished import", err)
		}
	}
	return nil
}

// writeNote puts v in place whole as far as a dying process can tell, with sync also as
// far as a dying machine can.
func (s *Store) writeNote(dir, name string, v any, sync bool) error {
	p, err := json.Marshal(v)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "encode note", err)
	}
	f, err := os.CreateTemp(s.path("tmp"), "note-")
	if err != nil {
		return layer.DiskError("make note", err)
	}
	_, err = f.Write(append(p, '\n'))
	if err == nil && sync {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), s.path(dir, name+jsonExt))
	}
	if err != nil {
		os.Remove(f.Name())
		return layer.DiskError("write note", err)
	}
	if !sync {
		return nil
	}
	d, err := os.Open(s.path(dir))
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "open directory to sync it", err)
	}
	defer d.Close()
	return layer.DiskError("sync directory", d.Sync())
}
