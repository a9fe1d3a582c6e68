package up

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
)

// fresh is a data directory that no node has used: what a start that fails makes in it
// is removed again.
type fresh struct {
	dir     string
	existed bool
	names   []string // what was in it
}

// untouched returns nil if a node has used the directory, whose lock the caller holds.
func untouched(dir string, existed bool) (*fresh, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	f := &fresh{dir: dir, existed: existed}
	for _, e := range entries {
		switch e.Name() {
		case "lock":
			continue
		case "root.token", "etcd", "edge", "images", "store":
			return nil, nil
		}
		f.names = append(f.names, e.Name())
	}
	return f, nil
}

// restore removes what is there now and was not.
func (f *fresh) restore() error {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return err
	}
	var all []error
	for _, e := range entries {
		if !slices.Contains(f.names, e.Name()) {
			all = append(all, os.RemoveAll(filepath.Join(f.dir, e.Name())))
		}
	}
	if !f.existed && len(f.names) == 0 {
		all = append(all, remove(f.dir))
	}
	return errors.Join(all...)
}
