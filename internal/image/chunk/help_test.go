package chunk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
)

// randomBlocks are n blocks that compress a little and are as random as can be else.
func randomBlocks(seed uint64, n int) []byte {
	b := make([]byte, n*block)
	rng := rand.New(rand.NewPCG(seed, 7))
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64()&0x3f3f3f3f3f3f3f3f)
	}
	return b
}

func openDir(t testing.TB) *object.Dir {
	t.Helper()
	d, err := object.OpenDir(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// small makes packs and times small, so that tests see many of them.
func small() Options {
	return Options{Workers: 3, PackSize: 256 << 10, LeaseTTL: time.Minute}
}

func newWriter(t testing.TB, s object.Store, o Options) *Writer {
	w := NewWriter(s, o)
	t.Cleanup(w.Close)
	return w
}

func begin(t testing.TB, w *Writer) *Session {
	t.Helper()
	s, err := w.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(context.WithoutCancel(t.Context())) })
	return s
}

func blob(b []byte) Blob { return Blob{R: bytes.NewReader(b), Size: int64(len(b))} }

// putLayer puts and commits a layer of meta and data.
func putLayer(t testing.TB, w *Writer, meta, data []byte) (Layer, Stats) {
	t.Helper()
	s := begin(t, w)
	l, st, err := s.PutLayer(t.Context(), blob(meta), blob(data))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	return l, st
}

func newReader(t testing.TB, s object.Store) *Reader {
	t.Helper()
	r, err := NewReader(s, ReaderOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// readData reads a data blob back, with zeros where no chunk is.
func readData(ctx context.Context, s object.Store, r *Reader, l Layer) ([]byte, error) {
	if l.Map == "" {
		return nil, nil
	}
	m, err := LoadMap(ctx, s, l.Map)
	if err != nil {
		return nil, err
	}
	if m.Size() != l.DataSize {
		return nil, fmt.Errorf("the map is of %d bytes, the layer of %d", m.Size(), l.DataSize)
	}
	out := make([]byte, m.Size())
	var mu sync.Mutex
	seen := map[int]bool{}
	err = r.Read(ctx, m, 0, m.Len(), func(k int, p []byte) error {
		mu.Lock()
		defer mu.Unlock()
		if seen[k] {
			return fmt.Errorf("chunk %d was read twice", k)
		}
		seen[k] = true
		copy(out[m.Chunk(k).Off:], p)
		return nil
	})
	if err == nil && len(seen) != m.Len() {
		err = fmt.Errorf("%d of %d chunks were read", len(seen), m.Len())
	}
	return out, err
}

func wantData(t testing.TB, s object.Store, l Layer, want []byte) {
	t.Helper()
	got, err := readData(t.Context(), s, newReader(t, s), l)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("other bytes came back")
	}
}

func wantCode(t testing.TB, what string, err error, code errs.Code) {
	t.Helper()
	var e *errs.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("%s: got error %v, want %s", what, err, code)
	}
}

func count(t testing.TB, s object.Store, prefix string) (n int) {
	t.Helper()
	if err := s.List(t.Context(), prefix, func(object.Info) error { n++; return nil }); err != nil {
		t.Fatal(err)
	}
	return n
}

func sum256(b []byte) []byte { s := sha256.Sum256(b); return s[:] }
