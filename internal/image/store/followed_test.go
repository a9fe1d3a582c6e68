package store

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
	"dsec/internal/image/object/objecttest"
)

// A blob is stored alike whether it is put while it is written or afterwards, also when
// names are replaced on the way, for which it is rewritten.
func TestDataIsStoredAlong(t *testing.T) {
	t.Parallel()
	noise := make([]byte, 2*followStep+100)
	rand.NewChaCha8([32]byte{9}).Read(noise)
	for _, c := range []struct {
		name  string
		files []string
	}{
		{"in order", []string{"a", "b", "c"}},
		{"replaced", []string{"a", "b", "a", "c", "b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var archive bytes.Buffer
			w := tar.NewWriter(&archive)
			for i, name := range c.files {
				p := noise[i*1000 : len(noise)-i*2000]
				err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(p)), Mode: 0o644})
				if _, werr := w.Write(p); err != nil || werr != nil {
					t.Fatal(err, werr)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			s := open(t, filepath.Join(t.TempDir(), "node"))
			img, err := s.ImportStream(t.Context(), bytes.NewReader(archive.Bytes()), ImportOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Verify(t.Context(), img.Layers, nil); err != nil {
				t.Error(err)
			}
			l := img.Layers[0]
			m, err := s.loadMap(t.Context(), l)
			if err != nil {
				t.Fatal(err)
			}
			blob := make([]byte, l.DataSize)
			err = s.reader.Read(t.Context(), m, 0, m.Len(), func(k int, p []byte) error {
				copy(blob[m.Chunk(k).Off:], p)
				return nil
			})
			if sum := sha256.Sum256(blob); err != nil || hex.EncodeToString(sum[:]) != l.DataDigest {
				t.Errorf("the object store has other data, or %v", err)
			}
		})
	}
}

// An object store that fails in the middle ends the import with its own error.
func TestAStoreThatFailsAlongTheWay(t *testing.T) {
	t.Parallel()
	noise := make([]byte, 64<<20)
	rand.NewChaCha8([32]byte{10}).Read(noise)
	dir := filepath.Join(t.TempDir(), "node")
	objects, err := object.OpenDir(t.Context(), dir+".objects")
	if err != nil {
		t.Fatal(err)
	}
	s := openOver(t, dir, objecttest.Faulty(objects, func(op objecttest.Op, key string) *objecttest.Fault {
		if op == objecttest.Put && strings.HasPrefix(key, "pack") {
			return &objecttest.Fault{Err: errs.New(errs.StoreUnavailable, "test", "gone")}
		}
		return nil
	}))
	if _, err := s.ImportPath(t.Context(), tree(t, map[string]string{"a": string(noise)}), ImportOptions{}); !errors.Is(err, errs.StoreUnavailable) {
		t.Errorf("got %v", err)
	}
	if roots, err := s.Roots(); err != nil || len(roots) != 0 || len(s.List()) != 0 {
		t.Errorf("roots %v, images %v, %v", roots, s.List(), err)
	}
}
