package store

import (
	"os"

	"dsec/internal/image/layer"
)

// TempDir makes a directory for work with images, which the caller removes; after a crash
// the next Open does.
func (s *Store) TempDir(prefix string) (string, error) {
	dir, err := os.MkdirTemp(s.path("tmp"), prefix)
	return dir, layer.DiskError("make a directory for work", err)
}
