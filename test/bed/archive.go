package bed

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"dsec/internal/image/build"
)

// Archive returns an archive of the image that a recipe makes, without files of its own,
// built once for each version of the recipe: it takes minutes and the network.
func Archive(ctx context.Context, file string) (string, error) {
	file, err := filepath.Abs(file)
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "dsec-test")
	path := filepath.Join(dir, filepath.Base(filepath.Dir(file))+"-"+hex.EncodeToString(sum[:6])+".tar")
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	recipe, err := build.Load(file)
	if err != nil {
		return "", err
	}
	f, err := os.CreateTemp(dir, "new-")
	if err != nil {
		return "", err
	}
	defer os.Remove(f.Name())
	err = build.Archive(ctx, recipe, f, build.Options{Progress: func(line string) { fmt.Fprintln(os.Stderr, "image of "+file+":", line) }})
	if err := errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	return path, os.Rename(f.Name(), path)
}
