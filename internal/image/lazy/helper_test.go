package lazy_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/lazy"

	"golang.org/x/sys/unix"
)

// source is a filler over a complete blob, cut at random.
type source struct {
	data   []byte
	bounds []int64
	holes  map[int]bool

	delay   atomic.Int64 // ns
	fetches atomic.Int64
	bytes   atomic.Int64
	peak    atomic.Int64
	running atomic.Int64

	mu      sync.Mutex
	fail    func(i, j int) error
	perPart map[int]int // how often each chunk was fetched
}

func newSource(data []byte, seed uint64) *source {
	r := rand.New(rand.NewPCG(seed, 1))
	s := &source{data: data, bounds: []int64{0}, holes: map[int]bool{}, perPart: map[int]int{}}
	for off := int64(0); off < int64(len(data)); {
		off = min(off+4096*(8+r.Int64N(56)), int64(len(data)))
		if last := s.bounds[len(s.bounds)-1]; len(bytes.Trim(data[last:off], "\x00")) == 0 {
			s.holes[len(s.bounds)-1] = true
		}
		s.bounds = append(s.bounds, off)
	}
	return s
}

func (s *source) Bounds() []int64 { return s.bounds }
func (s *source) Hole(i int) bool { return s.holes[i] }

func (s *source) setFail(f func(i, j int) error) {
	s.mu.Lock()
	s.fail = f
	s.mu.Unlock()
}

func (s *source) Fetch(ctx context.Context, i, j int, put func(int64, []byte) error) error {
	s.fetches.Add(1)
	n := s.running.Add(1)
	for p := s.peak.Load(); n > p && !s.peak.CompareAndSwap(p, n); p = s.peak.Load() {
	}
	defer s.running.Add(-1)
	if d := time.Duration(s.delay.Load()); d > 0 {
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	s.mu.Lock()
	fail := s.fail
	for k := i; k < j; k++ {
		s.perPart[k]++
	}
	s.mu.Unlock()
	if fail != nil {
		if err := fail(i, j); err != nil {
			return err
		}
	}
	for k := i; k < j; k++ {
		if s.holes[k] {
			continue
		}
		p := s.data[s.bounds[k]:s.bounds[k+1]]
		s.bytes.Add(int64(len(p)))
		if err := put(s.bounds[k], p); err != nil {
			return err
		}
	}
	return nil
}

// testLayer is a layer with one big file of random bytes, some of them zeros.
type testLayer struct {
	meta    string
	data    []byte
	digest  string
	content []byte
}

func buildLayer(t testing.TB, size int, seed uint64) *testLayer {
	t.Helper()
	content := make([]byte, size)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), 1})
	r.Read(content)
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		return b.File(context.Background(), "big", layer.Attr{Perm: 0o644}, int64(size), bytes.NewReader(content))
	})
	data, err := os.ReadFile(l.Data)
	if err != nil {
		t.Fatal(err)
	}
	os.Remove(l.Data)
	sum := sha256.Sum256(data)
	return &testLayer{meta: l.Meta, data: data, digest: hex.EncodeToString(sum[:]), content: content}
}

func mountBlob(t testing.TB, l *testLayer, path string) int {
	t.Helper()
	fd, err := image.Mount(context.Background(), image.LayerFiles{Meta: l.meta, Data: path})
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// reader reads the layer's big file through a mount.
type reader struct {
	f *os.File
	l *testLayer
}

func openBig(t testing.TB, l *testLayer, mount int) *reader {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d/big", mount))
	if err != nil {
		t.Fatal(err)
	}
	return &reader{f, l}
}

var errWrongBytes = errors.New("wrong bytes")

// check reads n bytes at off and compares every one.
func (r *reader) check(off, n int64) error {
	p := make([]byte, n)
	k, err := r.f.ReadAt(p, off)
	if err != nil {
		return err
	}
	want := r.l.content[off : off+int64(k)]
	if !bytes.Equal(p[:k], want) {
		i := 0
		for p[i] == want[i] {
			i++
		}
		return fmt.Errorf("%w at %d: %x, not %x", errWrongBytes, off+int64(i), p[i:min(i+8, k)], want[i:min(i+8, k)])
	}
	return nil
}

// forget drops the kernel's cached pages of the file.
func (r *reader) forget() {
	unix.Fadvise(int(r.f.Fd()), 0, 0, unix.FADV_DONTNEED)
}

func openCache(t testing.TB, dir string, opts lazy.Options) *lazy.Cache {
	t.Helper()
	c, err := lazy.Open(context.Background(), dir, opts)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
}
