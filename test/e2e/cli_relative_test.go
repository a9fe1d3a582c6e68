package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Relative paths are the caller's, wherever the server was started, and a server that was
// started with relative ones is found from elsewhere.
func TestRelativePaths(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, content := range map[string]string{
		"tree/hello": "hello\n", "env": "A=from-file\n", "recipe/recipe.yaml": "from: busybox\nsteps:\n  - copy: {src: f, dest: /f}\n", "recipe/f": "built\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	context := "--context=" + filepath.Join(dir, "context.json")
	in := func(sub string, args ...string) string {
		t.Helper()
		cmd := shared.Command(t.Context(), append([]string{context}, args...)...)
		cmd.Dir = filepath.Join(dir, sub)
		var said strings.Builder
		cmd.Stderr = &said
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("dsec %v in %s: %v\n%s", args, sub, err, said.String())
		}
		return string(out)
	}
	if out := in(".", "up", "--detach", "--data", "data", "--listen", "unix:api.sock"); !strings.Contains(out, "unix://"+dir+"/api.sock") || !strings.Contains(out, "next: dsec --context ") {
		t.Errorf("up says %q", out)
	}
	defer in("recipe", "down", "--data", "../data")
	in("tree", "ls")
	in("tree", "image", "import", "relative-tree", ".")
	in("recipe", "image", "build", "relative", "-f", "recipe.yaml")
	in(".", "image", "build", "relative", "-f", "recipe/recipe.yaml")
	id := in(".", "create", "--env-file", "env", "relative")
	id = id[:len(id)-1]
	in("recipe", "cp", "../tree", id+":/")
	in("recipe", "cp", id+":/f", "out")
	if b, err := os.ReadFile(filepath.Join(dir, "recipe/out")); err != nil || string(b) != "built\n" {
		t.Errorf("copied out: %q, %v", b, err)
	}
	if out := in("tree", "exec", id, "--", "sh", "-c", "cat /tree/hello; echo $A"); out != "hello\nfrom-file\n" {
		t.Errorf("%q", out)
	}
	// It fails if other tests have stopped a server whose sandboxes run on.
	cmd := shared.Command(t.Context(), context, "doctor", "--audit", "--data", "../data")
	cmd.Dir = filepath.Join(dir, "recipe")
	if out, err := cmd.Output(); !strings.Contains(string(out), "OTHERS") {
		t.Errorf("no audit: %v, %s", err, out)
	}
}
