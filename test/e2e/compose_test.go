package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

// tree makes a directory of files, whose names end with a slash for directories.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// A sandbox is composed of a base, a workspace over it and toolkits on top; each has its own life.
func TestComposition(t *testing.T) {
	t.Parallel()
	name := func(s string) string { return strings.ToLower(t.Name()) + "-" + s }
	shared.Must(t, "image", "import", name("repo"), tree(t, map[string]string{"repo/main.c": "int x;", "etc/which": "workspace", "repo/tool": "workspace"}))
	shared.Must(t, "image", "import", name("lint"), tree(t, map[string]string{"opt/lint/run": "#!/bin/sh\necho lint 1\n", "repo/tool": "lint", "etc/order": "lint"}))
	shared.Must(t, "image", "import", name("agent"), tree(t, map[string]string{"opt/agent/run": "#!/bin/sh\necho agent\n", "etc/order": "agent"}))
	create := func(args ...string) string {
		return strings.TrimSpace(shared.Must(t, append([]string{"create", "--image", bed.Image, "--workspace", name("repo")}, args...)...))
	}
	id := create("--toolkit", name("lint"), "--toolkit", name("agent"))
	defer shared.Must(t, "rm", id)
	const look = "cat /repo/main.c /etc/which /repo/tool /etc/order; /opt/lint/run; /opt/agent/run; busybox true && echo base"
	want := "int x;workspacelintagentlint 1\nagent\nbase"
	if got := shared.Must(t, "exec", id, "--", "sh", "-c", look); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	// Later toolkits lie over earlier ones, and all is writable.
	other := create("--toolkit", name("agent"), "--toolkit", name("lint"))
	defer shared.Must(t, "rm", other)
	if got := shared.Must(t, "exec", other, "--", "sh", "-c", "cat /etc/order; echo mine >/opt/lint/run; rm /etc/which; ls /etc/which 2>/dev/null; cat /opt/lint/run"); got != "lintmine" {
		t.Errorf("in the other order: %q", got)
	}
	sb := bed.JSON[v1.Sandbox](t, shared, "inspect", id, "--json")
	var parts []string
	for _, p := range sb.Parts {
		parts = append(parts, p.Kind+" "+p.Name)
	}
	if want := []string{"base " + bed.Image, "workspace " + name("repo"), "toolkit " + name("lint"), "toolkit " + name("agent")}; !slices.Equal(parts, want) {
		t.Errorf("composed of %q, want %q", parts, want)
	}

	// A toolkit's update is a new import of that one image, for sandboxes to come.
	before := bed.JSON[v1.Image](t, shared, "image", "inspect", name("repo"), "--json")
	shared.Must(t, "image", "import", name("lint"), tree(t, map[string]string{"opt/lint/run": "#!/bin/sh\necho lint 2\n"}))
	updated := create("--toolkit", name("lint"))
	defer shared.Must(t, "rm", updated)
	if got := shared.Must(t, "exec", updated, "--", "/opt/lint/run"); got != "lint 2" {
		t.Errorf("after the update: %q", got)
	}
	if got := shared.Must(t, "exec", id, "--", "/opt/lint/run"); got != "lint 1" {
		t.Errorf("of a sandbox from before the update: %q", got)
	}
	if after := bed.JSON[v1.Image](t, shared, "image", "inspect", name("repo"), "--json"); after.Digest != before.Digest {
		t.Error("the workspace changed with a toolkit")
	}

	// The same image twice is one layer.
	twice := create("--toolkit", name("agent"), "--toolkit", name("lint"), "--toolkit", name("agent"))
	defer shared.Must(t, "rm", twice)
	if got := shared.Must(t, "exec", twice, "--", "cat", "/etc/order"); got != "agent" {
		t.Errorf("a toolkit given twice: %q", got)
	}

	shared.Fails(t, 1, "image_in_use", "image", "rm", name("agent"))
	shared.Fails(t, 1, "image_not_found", "create", bed.Image, "--toolkit", name("none"))
	shared.Fails(t, 1, "image_not_found", "create", bed.Image, "--workspace", name("none"))
	shared.Fails(t, 2, "", "create", "--image", bed.Image, bed.Image)
	if r := shared.Run(t.Context(), nil, "create", "--backend", "hollow", "--toolkit", name("lint")); r.Code == 0 || !strings.Contains(r.Stderr, "base image") {
		t.Errorf("toolkits without a base: %+v", r)
	}
}
