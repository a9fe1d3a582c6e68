package chunk

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
	"dsec/internal/image/object/objecttest"
)

// Neighbouring chunks are one read, and chunks that are not wanted are not read.
func TestReadsAreJoined(t *testing.T) {
	t.Parallel()
	s := objecttest.Counting(openDir(t))
	w := newWriter(t, s, Options{})
	b := randomBlocks(1, 4096)
	l, _ := putLayer(t, w, nil, b)
	m, err := LoadMap(t.Context(), s, l.Map)
	if err != nil {
		t.Fatal(err)
	}
	r := newReader(t, s)
	for _, c := range []struct {
		i, j int
		gets int64
	}{{0, 1, 1}, {3, 12, 1}, {5, 5, 0}, {0, m.Len(), 6}, {m.Len() - 1, m.Len(), 1}} {
		s.Reset()
		want := int64(0)
		for k := c.i; k < c.j; k++ {
			want += int64(m.Chunk(k).Stored)
		}
		if err := r.Read(t.Context(), m, c.i, c.j, func(int, []byte) error { return nil }); err != nil {
			t.Fatal(err)
		}
		if got := s.Of(objecttest.Get, ""); got.Calls > c.gets || got.Bytes < want || got.Bytes > want+64 {
			t.Errorf("chunks %d to %d: %+v, want %d reads of %d bytes", c.i, c.j, got, c.gets, want)
		}
	}
	stop := errors.New("stop")
	if err := r.Read(t.Context(), m, 0, m.Len(), func(int, []byte) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the callback's error: %v", err)
	}
	wantCode(t, "chunks that are not", r.Read(t.Context(), m, 0, m.Len()+1, nil), errs.BadRequest)
}

// flipped is a store in which a bit of one object is wrong, for so many reads.
func flipped(s object.Store, prefix string, at int64, bit byte, times int64) object.Store {
	var n atomic.Int64
	return objecttest.Faulty(s, func(op objecttest.Op, key string) *objecttest.Fault {
		if op != objecttest.Get || !strings.HasPrefix(key, prefix) {
			return nil
		}
		return &objecttest.Fault{Flip: func(off int64, p []byte) {
			if at >= off && at < off+int64(len(p)) && n.Add(1) <= times {
				p[at-off] ^= bit
			}
		}}
	})
}

// A wrong bit anywhere in what a layer needs is store_corrupt, and no wrong byte is
// handed out; one that is wrong on the way only is not noticed.
func TestDamageIsNeverServed(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	w := newWriter(t, d, Options{})
	meta := bytes.Repeat([]byte("some metadata, "), 3000)
	b := append(randomBlocks(1, 40), bytes.Repeat([]byte("0123456789abcdef"), 40*block/16)...)
	noise := make([]byte, 40*block) // is stored raw
	rng := rand.New(rand.NewPCG(3, 3))
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	b = append(b, noise...)
	l, _ := putLayer(t, w, meta, b)
	m, err := LoadMap(t.Context(), d, l.Map)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "meta")
	read := func(s object.Store) error {
		got, err := readData(t.Context(), s, newReader(t, s), l)
		if err == nil && !bytes.Equal(got, b) {
			t.Fatal("wrong bytes were served")
		}
		for i := 0; i < len(got); i += block {
			if p := got[i : i+block]; !isZero(p) && !bytes.Equal(p, b[i:i+block]) {
				t.Fatal("wrong bytes were served before the error")
			}
		}
		return err
	}
	getMeta := func(s object.Store) error {
		os.Remove(path)
		err := GetMeta(t.Context(), s, l, path)
		got, rerr := os.ReadFile(path)
		if (err == nil) != (rerr == nil) || err == nil && !bytes.Equal(got, meta) {
			t.Fatalf("wrong metadata was written: %v, %v", err, rerr)
		}
		return err
	}
	index := func(s object.Store) error {
		_, err := loadIndex(t.Context(), s, m.packs[0], sizeOf(t, d, m.packs[0].packKey()))
		return err
	}
	packSize := sizeOf(t, d, m.packs[0].packKey())
	entries, err := loadIndex(t.Context(), d, m.packs[0], packSize)
	if err != nil {
		t.Fatal(err)
	}
	chunksEnd := packSize - trailerLen - int64(len(entries))*entryLen
	for _, c := range []struct {
		what     string
		key      string
		from, to int64
		read     func(object.Store) error
	}{
		{"map", mapClass, 0, sizeOf(t, d, l.Map), read},
		{"pack header", packClass, 0, headerLen, read},
		{"chunk", packClass, headerLen, chunksEnd, read},
		{"pack index", packClass, chunksEnd, packSize, index},
		{"metadata", metaClass, 0, sizeOf(t, d, l.Meta), getMeta},
	} {
		step := max((c.to-c.from)/97, 1)
		for at := c.from; at < c.to; at += step {
			bit := byte(1) << (at % 8)
			err := c.read(flipped(d, c.key, at, bit, 1<<40))
			if c.what == "metadata" && err == nil {
				continue // a bit of the compressed form that means nothing: the right bytes came out
			}
			wantCode(t, c.what, err, errs.StoreCorrupt)
			if err != nil && errs.Of(err).Retryable {
				t.Errorf("%s: damage that stays is no reason to retry", c.what)
			}
			if c.what == "pack index" {
				continue
			}
			if err := c.read(flipped(d, c.key, at, bit, 1)); err != nil {
				t.Errorf("%s, wrong once at %d: %v", c.what, at, err)
			}
		}
		// Cut off and missing.
		key := c.key
		cut := objecttest.Faulty(d, func(op objecttest.Op, k string) *objecttest.Fault {
			if op == objecttest.Get && strings.HasPrefix(k, key) {
				return &objecttest.Fault{Cut: 30, Err: io.EOF}
			}
			return nil
		})
		wantCode(t, c.what+" cut off", c.read(cut), errs.StoreCorrupt)
	}
	gone := func(prefix string) object.Store {
		return objecttest.Faulty(d, func(op objecttest.Op, k string) *objecttest.Fault {
			if strings.HasPrefix(k, prefix) {
				return &objecttest.Fault{Err: errs.New(errs.ObjectNotFound, "test", "gone")}
			}
			return nil
		})
	}
	wantCode(t, "no pack", read(gone(packClass)), errs.StoreCorrupt)
	wantCode(t, "no map", read(gone(mapClass)), errs.ObjectNotFound)
	wantCode(t, "no metadata", getMeta(gone(metaClass)), errs.ObjectNotFound)
}

func sizeOf(t *testing.T, s object.Store, key string) int64 {
	t.Helper()
	st, err := s.Stat(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return st.Size
}

// Trouble of the store is told as such, and can be retried.
func TestTroubleIsTyped(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	b := randomBlocks(1, 300)
	l, _ := putLayer(t, newWriter(t, d, small()), []byte("meta"), b)
	down := errs.New(errs.StoreUnavailable, "test", "down")
	var fault atomic.Pointer[objecttest.Fault]
	s := objecttest.Faulty(d, func(objecttest.Op, string) *objecttest.Fault { return fault.Load() })
	r := newReader(t, s)
	m, err := LoadMap(t.Context(), s, l.Map)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []*objecttest.Fault{{Err: down}, {Err: down, Cut: 20}} {
		fault.Store(f)
		for what, err := range map[string]error{
			"map":      func() error { _, err := LoadMap(t.Context(), s, l.Map); return err }(),
			"chunks":   r.Verify(t.Context(), m),
			"metadata": GetMeta(t.Context(), s, l, filepath.Join(t.TempDir(), "meta")),
		} {
			wantCode(t, what, err, errs.StoreUnavailable)
			if err != nil && !errs.Of(err).Retryable {
				t.Errorf("%s: not retryable: %v", what, err)
			}
		}
	}
	fault.Store(nil)
	if err := r.Verify(t.Context(), m); err != nil {
		t.Error(err)
	}
}
