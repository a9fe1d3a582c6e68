package imagetest

import (
	"os"
	"path/filepath"
	"testing"

	"dsec/internal/image"
	"dsec/internal/image/layer"
)

// Build makes a layer of what fill adds, in files of the test's own.
func Build(t testing.TB, opts layer.Options, fill func(b *layer.Builder) error) (image.LayerFiles, layer.Result, error) {
	t.Helper()
	dir, err := os.MkdirTemp(t.TempDir(), "layer-")
	if err != nil {
		t.Fatal(err)
	}
	l := image.LayerFiles{Meta: filepath.Join(dir, "meta"), Data: filepath.Join(dir, "data")}
	data, err := os.Create(l.Data)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	meta, err := os.Create(l.Meta)
	if err != nil {
		t.Fatal(err)
	}
	defer meta.Close()
	b := layer.NewBuilder(data, opts)
	if err := fill(b); err != nil {
		return l, layer.Result{}, err
	}
	res, err := b.Finish(meta)
	if res.DataSize == 0 {
		l.Data = ""
	}
	return l, res, err
}

// MustBuild is [Build] that must succeed.
func MustBuild(t testing.TB, opts layer.Options, fill func(b *layer.Builder) error) (image.LayerFiles, layer.Result) {
	t.Helper()
	l, res, err := Build(t, opts, fill)
	if err != nil {
		t.Fatal(err)
	}
	return l, res
}

// Mounted describes the layer as the kernel shows it. It needs root.
func Mounted(t testing.TB, l image.LayerFiles) []string {
	t.Helper()
	fd, err := image.Mount(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := DescribeFD(fd)
	if err != nil {
		t.Fatal(err)
	}
	return lines
}
