package export_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image/export"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// blobs of a small layer with every type of entry.
func blobs(t testing.TB) (meta, data []byte) {
	t.Helper()
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		x := layer.Attr{Xattrs: []layer.Xattr{{Name: "user.a", Value: []byte("v")}, {Name: "security.capability", Value: make([]byte, 20)}}}
		for _, c := range []int{0, 1, 3000, 5000} {
			if err := b.File(t.Context(), "f"+strings.Repeat("x", c/100), x, int64(c), strings.NewReader(strings.Repeat("c", c))); err != nil {
				return err
			}
		}
		sparse := strings.Repeat("a", 1<<16) + strings.Repeat("\x00", 1<<17) + "b"
		return errors.Join(
			b.File(t.Context(), "d/sparse", layer.Attr{}, int64(len(sparse)), strings.NewReader(sparse)),
			b.Symlink("l", "f", layer.Attr{}), b.Symlink("long", strings.Repeat("x", 4000), layer.Attr{}), b.Link("h", "d/sparse"),
			b.Special("dev", unix.S_IFBLK, 8, 300, x), b.Special("w", unix.S_IFCHR, 0, 0, layer.Attr{}), b.Special("p", unix.S_IFIFO, 0, 0, layer.Attr{}),
		)
	})
	meta, err := os.ReadFile(l.Meta)
	if err != nil {
		t.Fatal(err)
	}
	if data, err = os.ReadFile(l.Data); err != nil {
		t.Fatal(err)
	}
	return meta, data
}

// sum makes the superblock's checksum right, so that damage is met further in.
func sum(meta []byte) {
	if len(meta) < 4096 {
		return
	}
	sb := meta[1024:4096]
	binary.LittleEndian.PutUint32(sb[4:], 0)
	binary.LittleEndian.PutUint32(sb[4:], ^crc32.Checksum(sb, crc32.MakeTable(crc32.Castagnoli)))
}

// limited stops what a hostile layer would make endless.
type limited struct{ left int }

var errLimit = errors.New("enough")

func (l *limited) Write(p []byte) (int, error) {
	if l.left -= len(p); l.left < 0 {
		return 0, errLimit
	}
	return len(p), nil
}

func tarOf(t testing.TB, meta, data []byte, diff bool) error {
	r, err := layer.NewReader(bytes.NewReader(meta), int64(len(meta)), bytes.NewReader(data), int64(len(data)))
	if err != nil {
		return err
	}
	_, err = export.Tar(t.Context(), &limited{16 << 20}, export.TarOptions{Diff: diff}, r)
	return err
}

func typed(err error) bool {
	return err == nil || errors.Is(err, errLimit) || errors.Is(err, errs.ImageCorrupt) || errors.Is(err, errs.ImageUnsupported)
}

func TestAnyFlippedByteIsATypedErrorOrHarmless(t *testing.T) {
	t.Parallel()
	meta, data := blobs(t)
	if err := tarOf(t, meta, data, false); err != nil {
		t.Fatal(err)
	}
	for i := 1024; i < len(meta); i += 1 + i/4096*2 {
		for _, flip := range []byte{1 << (i % 8), 0xff}[i%2 : i%2+1] {
			meta[i] ^= flip
			if i >= 1028 && i < 1032 || i < 4096 && i%2 == 0 {
				if err := tarOf(t, meta, data, false); err == nil || !typed(err) {
					t.Errorf("superblock byte %d: %v", i, err)
				}
			}
			was := append([]byte(nil), meta[1028:1032]...)
			sum(meta)
			if err := tarOf(t, meta, data, i%2 == 0); !typed(err) {
				t.Errorf("byte %d: %v", i, err)
			}
			copy(meta[1028:], was)
			meta[i] ^= flip
		}
	}
	for _, n := range []int{0, 1000, 4096, len(meta) - 4096, len(meta) - 1} {
		if err := tarOf(t, meta[:n], data, false); !errors.Is(err, errs.ImageCorrupt) {
			t.Errorf("metadata cut at %d: %v", n, err)
		}
	}
	if err := tarOf(t, meta, data[:len(data)-4096], false); !errors.Is(err, errs.ImageCorrupt) {
		t.Errorf("cut data: %v", err)
	}
	// A blob store that has lost bytes since it said how many it has.
	r, err := layer.NewReader(bytes.NewReader(meta), int64(len(meta)), bytes.NewReader(nil), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := export.Tar(t.Context(), io.Discard, export.TarOptions{}, r); !errors.Is(err, errs.ImageCorrupt) {
		t.Errorf("lost data: %v", err)
	}
}

// FuzzTar feeds whatever as a layer's metadata; each must end with a typed error
// or a tar, within bounds.
func FuzzTar(f *testing.F) {
	meta, data := blobs(f)
	f.Add(meta, false)
	f.Add(meta, true)
	f.Add(meta[:4096], false)
	f.Fuzz(func(t *testing.T, meta []byte, diff bool) {
		sum(meta)
		if err := tarOf(t, meta, data, diff); !typed(err) {
			t.Error(err)
		}
	})
}
