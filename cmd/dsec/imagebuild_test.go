package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/source"
)

// Needs root, as building does.
func TestImageBuild(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	dir := t.TempDir()
	recipe := filepath.Join(dir, "recipe.yaml")
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("content"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(recipe, []byte("from: scratch\nenv: {A: b}\nworkdir: /w\nsteps:\n  - copy: {src: f, dest: /w/f}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	img := into[v1.Image](t, c.ok("image", "build", "built", "-f", recipe, "--json", "--temp", dir))
	if img.Name != "built" || img.Files != 3 || img.Config.Labels["format"] != "docker-archive" {
		t.Errorf("%+v", img)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "dsec-*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	c.fails(2, "name the recipe", "image", "build", "x")
	c.fails(1, "read recipe", "image", "build", "x", "-f", filepath.Join(dir, "none"))
	if err := os.WriteFile(recipe, []byte("from: nothing-known\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r := c.run("image", "build", "x", "-f", recipe); r.code != 1 || !strings.Contains(r.err, "nothing-known") {
		t.Errorf("%+v", r)
	}
}

// What is sent must read, at the server's end, as the recipe said.
func TestBuiltArchiveCarriesTheConfig(t *testing.T) {
	t.Parallel()
	var layerTar bytes.Buffer
	tw := tar.NewWriter(&layerTar)
	if err := errors.Join(tw.WriteHeader(&tar.Header{Name: "./hello", Typeflag: tar.TypeReg, Mode: 0o644, Size: 2}), func() error { _, err := tw.Write([]byte("hi")); return err }(), tw.Close()); err != nil {
		t.Fatal(err)
	}
	want := image.Config{Env: []string{"A=b"}, Cmd: []string{"/bin/sh"}, Entrypoint: []string{"/init"}, User: "1000", WorkDir: "/w", Labels: map[string]string{"k": "v"}, Volumes: []string{"/data"}}
	sum := sha256.Sum256(layerTar.Bytes())
	var b bytes.Buffer
	if err := writeArchive(&b, want, bytes.NewReader(layerTar.Bytes()), int64(layerTar.Len()), sum[:]); err != nil {
		t.Fatal(err)
	}
	for _, format := range []source.Format{source.Docker, source.Auto} {
		var got source.Result
		_, res, err := imagetest.Build(t, layer.Options{}, func(lb *layer.Builder) (err error) {
			got, err = source.Stream(t.Context(), bytes.NewReader(b.Bytes()), lb, source.Options{Format: format, SpoolDir: t.TempDir()})
			return err
		})
		if err != nil || got.Format != source.Docker || !reflect.DeepEqual(got.Config, want) {
			t.Errorf("%q: %+v, %+v, %v", format, got, res, err)
		}
	}
}
