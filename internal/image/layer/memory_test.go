package layer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"
)

// A tree that takes too much memory is refused, whatever it is made of, and what counts as
// its memory is near to what it takes. Not in parallel: it measures this process.
func TestMemoryIsBounded(t *testing.T) {
	const limit = 48 << 20
	dir := func(i int) string { return fmt.Sprintf("d%d/", i/1000) }
	for name, add := range map[string]func(b *layer.Builder, i int) error{
		"empty files": func(b *layer.Builder, i int) error {
			return b.File(context.Background(), fmt.Sprint(dir(i), i), layer.Attr{}, 0, strings.NewReader(""))
		},
		"one directory": func(b *layer.Builder, i int) error {
			return b.File(context.Background(), fmt.Sprint(i), layer.Attr{}, 0, strings.NewReader(""))
		},
		"small files": func(b *layer.Builder, i int) error {
			return b.File(context.Background(), fmt.Sprint(dir(i), i), layer.Attr{}, 200, io.LimitReader(zeros{}, 200))
		},
		"directories":     func(b *layer.Builder, i int) error { return b.Dir(fmt.Sprint(dir(i), i), layer.Attr{}) },
		"implied parents": func(b *layer.Builder, i int) error { return b.Symlink(fmt.Sprintf("a%d/b/c", i), "x", layer.Attr{}) },
		"long names": func(b *layer.Builder, i int) error {
			return b.Symlink(fmt.Sprint(dir(i), i, strings.Repeat("n", 240)), "x", layer.Attr{})
		},
		"long targets": func(b *layer.Builder, i int) error {
			return b.Symlink(fmt.Sprint(dir(i), i), strings.Repeat("t", 4000), layer.Attr{})
		},
		"large xattrs": func(b *layer.Builder, i int) error {
			return b.Dir(fmt.Sprint(dir(i), i), layer.Attr{Xattrs: []layer.Xattr{{Name: "user.a", Value: make([]byte, 3000)}}})
		},
		"many xattrs": func(b *layer.Builder, i int) error {
			var all []layer.Xattr
			for n := range 50 {
				all = append(all, layer.Xattr{Name: fmt.Sprintf("user.%d", n), Value: []byte{1}})
			}
			return b.Dir(fmt.Sprint(dir(i), i), layer.Attr{Xattrs: all})
		},
		"links": func(b *layer.Builder, i int) error {
			if i == 0 {
				return b.Symlink("target", "x", layer.Attr{})
			}
			return b.Link(fmt.Sprint(dir(i), i), "target")
		},
		"names cut out of long strings": func(b *layer.Builder, i int) error {
			header := fmt.Sprint(dir(i), i, " ") + strings.Repeat("h", 10_000)
			path, _, _ := strings.Cut(header, " ")
			return b.Dir(path, layer.Attr{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			data, err := os.Create(filepath.Join(t.TempDir(), "data"))
			if err != nil {
				t.Fatal(err)
			}
			defer data.Close()
			before := heap()
			b := layer.NewBuilder(data, layer.Options{MaxMemory: limit, InlineBudget: 1 << 30, MaxEntries: 1 << 40})
			n := 0
			for ; err == nil; n++ {
				if err = add(b, n); n > 10_000_000 {
					t.Fatal("it is never refused")
				}
			}
			if !errors.Is(err, errs.BodyTooLarge) {
				t.Fatal(err)
			}
			took := heap() - before
			runtime.KeepAlive(b)
			t.Logf("%d entries take %d bytes each, %.2f of the limit", n, took/int64(n), float64(took)/limit)
			if took > limit*13/10 || took < limit/5 {
				t.Errorf("%d entries take %d bytes; the limit is %d", n, took, limit)
			}
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
