package source

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
)

func build(t *testing.T, opts layer.Options, fill func(b *layer.Builder) error) (image.LayerFiles, layer.Result) {
	t.Helper()
	dir := t.TempDir()
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
		t.Fatal(err)
	}
	res, err := b.Finish(meta)
	if err != nil {
		t.Fatal(err)
	}
	if res.DataSize == 0 {
		l.Data = ""
	}
	return l, res
}

func mounted(t *testing.T, l image.LayerFiles) []string {
	t.Helper()
	fd, err := image.Mount(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := imagetest.DescribeFD(fd)
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

func TestUsrLibOfThisMachineMountsBackTheSame(t *testing.T) {
	src := os.Getenv("SRC")
	if src == "" { src = "/usr/share/doc" }
	l, res := build(t, layer.Options{}, func(b *layer.Builder) error { return readDir(t.Context(), src, b) })
	t.Logf("%+v", res)
	want, err := imagetest.Describe(src)
	if err != nil {
		t.Fatal(err)
	}
	if d := imagetest.Diff(want, mounted(t, l)); d != "" {
		t.Error(d)
	}
	out, err := exec.Command("fsck.erofs", "--device="+l.Data, l.Meta).CombinedOutput()
	t.Logf("%s %v", out, err)
}
