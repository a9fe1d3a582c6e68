package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "dsec/api/v1"
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
	img := into[v1.Image](t, c.ok("image", "build", "--steps", "host", "built", "-f", recipe, "--json"))
	if img.Name != "built" || img.Files != 3 || img.Config.Labels["format"] != "docker-archive" {
		t.Errorf("%+v", img)
	}
	c.fails(2, "-f RECIPE is missing", "image", "build", "x")
	c.fails(1, "read recipe", "image", "build", "x", "-f", filepath.Join(dir, "none"))
	if err := os.WriteFile(recipe, []byte("from: nothing-known\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r := c.run("image", "build", "x", "-f", recipe); r.code != 1 || !strings.Contains(r.err, "nothing-known") {
		t.Errorf("%+v", r)
	}
}
