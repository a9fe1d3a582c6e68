package chunk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
)

// Blob is what a layer's blob is read from.
type Blob struct {
	R    io.ReaderAt // if an *os.File, its holes are not read
	Size int64
	// Grow, if set, is of a blob that is still being written, from start to end, whose Size
	// nobody knows yet. It waits until more than the pos bytes are there and returns how many
	// are, or until there will be no more, when size is the blob's and done is true. Holes of
	// such a blob are read as zeros.
	Grow func(ctx context.Context, pos int64) (size int64, done bool, err error)
	// Progress, if set, is told how far the blob was read, from one goroutine.
	Progress func(done int64)
}

// Layer names the objects of a stored layer; the catalogue keeps it.
type Layer struct {
	Meta     string `json:"meta"` // object of the metadata blob
	MetaSize int64  `json:"meta_size"`
	Map      string `json:"map,omitempty"` // object of the data blob's Map; none if there is no data
	DataSize int64  `json:"data_size,omitempty"`
}

// Stats say what a Put did.
type Stats struct {
	Bytes     int64 // of the blob
	HoleBytes int64 // of it that are zeros and not stored
	Chunks    int
	NewChunks int   // of them that the store did not have
	NewBytes  int64 // of these, uncompressed
	Stored    int64 // bytes put into the store: packs, maps and metadata
	Packs     int
}

func (s *Stats) add(o Stats) {
	s.Bytes += o.Bytes
	s.HoleBytes += o.HoleBytes
	s.Chunks += o.Chunks
	s.NewChunks += o.NewChunks
	s.NewBytes += o.NewBytes
	s.Stored += o.Stored
	s.Packs += o.Packs
}

// Session puts layers under one lease of the store, so that no collector deletes what
// it put or relies on. The caller puts, records the layers where the collector's roots
// come from, and calls Commit; only then are they safe. It may be used concurrently.
type Session struct {
	w         *Writer
	lease     *lease
	condemned map[string]bool
	distrust  bool // a condemnation cannot be read: rely on nothing

	mu     sync.Mutex
	usable map[id]bool
}

// Begin takes a lease. The session must be ended with Commit or Close, or the store
// waits for it for Options.LeaseTTL. Errors: the store's own.
func (w *Writer) Begin(ctx context.Context) (*Session, error) {
	i, err := w.newID()
	if err != nil {
		return nil, err
	}
	// The order matters, see doc.go: the lease, then the condemned, then what is relied on.
	l, err := takeLease(ctx, w.store, i, leaseBody{TTLMS: w.opts.LeaseTTL.Milliseconds()}, w.opts.Now)
	if err != nil {
		return nil, err
	}
	s := &Session{w: w, lease: l, condemned: map[string]bool{}, usable: map[id]bool{}}
	if err := s.begin(ctx); err != nil {
		s.Close(ctx)
		return nil, err
	}
	return s, nil
}

func (s *Session) begin(ctx context.Context) error {
	all, err := loadCondemned(ctx, s.w.store)
	if err != nil {
		return fmt.Errorf("read what is to be deleted: %w", err)
	}
	for _, c := range all {
		if c.bad != nil {
			s.distrust = true
		}
		for _, k := range c.Keys {
			s.condemned[k] = true
		}
	}
	if err := s.w.refresh(ctx); err != nil {
		return fmt.Errorf("read the indexes of packs: %w", err)
	}
	return nil
}

// Commit is called when the layers of the session are recorded among the collector's
// roots. If it returns nil they stay until they are taken out of there. With lease_lost
// they may be incomplete: take the record back and put them again in a new session. With
// another error it is not known; Commit can be called again.
func (s *Session) Commit(ctx context.Context) error {
	if err := s.lease.confirm(ctx); err != nil {
		return fmt.Errorf("confirm what was stored: %w", err)
	}
	s.Close(ctx)
	return nil
}

// Close gives the session up: what it put may be deleted. After Commit it does nothing.
func (s *Session) Close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.w.opts.LeaseTTL/4)
	defer cancel()
	s.lease.end(ctx)
}

// mayUse says whether a pack is not known to be damaged and will stay for as long as the
// session: it was there when the session had its lease already, and is not condemned.
func (s *Session) mayUse(ctx context.Context, p id) (bool, error) {
	if s.distrust || s.w.opts.Damage.has(p) {
		return false, nil
	}
	s.mu.Lock()
	ok, known := s.usable[p]
	s.mu.Unlock()
	if known {
		return ok, nil
	}
	ok = !s.condemned[p.packKey()]
	if ok {
		_, err := s.w.store.Stat(ctx, p.packKey())
		if errors.Is(err, errs.ObjectNotFound) {
			ok = false
			s.w.index.drop(p)
		} else if err != nil {
			return false, err
		}
	}
	s.mu.Lock()
	s.usable[p] = ok
	s.mu.Unlock()
	return ok, nil
}

// existing returns an object of content d that has exactly the bytes b and will stay, or "".
// One that is damaged is not relied on, so that putting the content again mends it.
func (s *Session) existing(ctx context.Context, class string, d digest, b []byte) (string, error) {
	if s.distrust {
		return "", nil
	}
	var names []string
	err := s.w.store.List(ctx, contentPrefix(class, d), func(i object.Info) error {
		if !s.condemned[i.Key] && i.Size == int64(len(b)) && strings.HasPrefix(i.Key, class) {
			names = append(names, i.Key)
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	slices.Sort(names)
	for _, name := range names {
		same, err := s.holds(ctx, name, b)
		if err != nil {
			return "", err
		}
		if same {
			return name, nil
		}
	}
	return "", nil
}

// holds says whether an object that was just listed has the bytes b.
func (s *Session) holds(ctx context.Context, name string, b []byte) (bool, error) {
	rc, err := s.w.store.Get(ctx, name, 0, -1)
	if errors.Is(err, errs.ObjectNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer rc.Close()
	for buf := make([]byte, 64<<10); ; {
		n, err := io.ReadFull(rc, buf)
		if n > len(b) || !bytes.Equal(buf[:n], b[:n]) {
			return false, nil
		}
		b = b[n:]
		switch {
		case err == io.EOF, err == io.ErrUnexpectedEOF:
			return len(b) == 0, nil
		case err != nil:
			return false, errs.Wrap(errs.StoreUnavailable, phase, "read object "+name, err)
		}
	}
}

// PutLayer puts both blobs of a layer; data.Size may be 0.
func (s *Session) PutLayer(ctx context.Context, meta, data Blob) (l Layer, st Stats, err error) {
	l.MetaSize, l.DataSize = meta.Size, data.Size
	if data.Size > 0 {
		if l.Map, st, err = s.PutData(ctx, data); err != nil {
			return Layer{}, st, err
		}
	}
	name, more, err := s.PutMeta(ctx, meta)
	if err != nil {
		return Layer{}, st, err
	}
	st.add(more)
	l.Meta = name
	return l, st, nil
}
