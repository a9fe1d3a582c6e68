package e2e

import (
	"context"
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

// A snapshot of a sandbox of several images records each with its layers, is checked against them
// wherever it is used, and none of them can be removed before it.
func TestASnapshotKnowsItsParts(t *testing.T) {
	t.Parallel()
	name := func(s string) string { return strings.ToLower(t.Name()) + "-" + s }
	shared.Must(t, "image", "import", name("repo"), tree(t, map[string]string{"repo/a": "a", "repo/b": "b"}))
	shared.Must(t, "image", "import", name("plain"), tree(t, map[string]string{"opt/plain": "plain"}))
	// A toolkit that is a snapshot, whose layers were made on the same base.
	made := begin(t, "--image", bed.Image, "--workspace", name("plain"))
	sh(t, made, "echo tool >/opt/tool; rm /opt/plain")
	tool := snap(t, made, name("tool"))
	id := begin(t, "--image", bed.Image, "--workspace", name("repo"), "--toolkit", tool)
	sh(t, id, "rm /repo/a; echo more >/repo/more")
	first := snap(t, id, name("1"))
	sh(t, id, "echo again >/repo/again")
	second := snap(t, id, name("2"))
	copied := begin(t, second)
	sh(t, copied, "echo third >/repo/third")
	third := snap(t, copied, name("3"))
	child := strings.TrimSpace(shared.Must(t, "fork", copied))
	t.Cleanup(func() { shared.Run(context.Background(), nil, "rm", child) })
	sh(t, child, "echo fourth >/repo/fourth")
	fourth := snap(t, child, name("4"))

	if got := len(bed.JSON[v1.Sandbox](t, shared, "inspect", id, "--json").Parts); got != 3 {
		t.Errorf("the sandbox has %d parts", got)
	}
	toolImage := bed.JSON[v1.Image](t, shared, "image", "inspect", tool, "--json")
	for _, s := range []string{first, second, third, fourth} {
		img := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", s, "--json")
		var names []string
		for _, p := range img.Snapshot.Parts {
			names = append(names, p.Kind+" "+p.Name)
		}
		if want := "base " + bed.Image + ", workspace " + name("repo") + ", toolkit " + tool; strings.Join(names, ", ") != want {
			t.Errorf("%s is composed of %q, want %q", s, names, want)
			continue
		}
		if p := img.Snapshot.Parts[2]; p.Digest != toolImage.Digest || len(p.Layers) != len(toolImage.Layers) || p.Layers[2].View != toolImage.Layers[2].View || p.Layers[2].Parent == "" {
			t.Errorf("%s has the toolkit as %+v, which is %+v", s, p, toolImage)
		}
		if text := shared.Must(t, "snapshot", "inspect", s); !strings.Contains(text, "toolkit "+tool+" "+toolImage.Digest) {
			t.Errorf("'snapshot inspect' does not name the toolkit:\n%s", text)
		}
	}
	if list := shared.Must(t, "snapshot", "ls"); !strings.Contains(list, name("repo")+","+tool) {
		t.Errorf("'snapshot ls' does not name what it was made with:\n%s", list)
	}
	for image, user := range map[string]string{name("repo"): first, tool: first, bed.Image: first, first: second, second: third} {
		if r := shared.Fails(t, 1, "image_in_use", "image", "rm", image); !strings.Contains(r.Stderr, user) {
			t.Errorf("the removal of %s does not name %s: %s", image, user, r.Stderr)
		}
	}
	want := "again\nb\nfourth\nmore\nthird\ntool"
	const look = "cd /repo; ls again b fourth more third; cat /opt/tool; ls /opt/plain a 2>/dev/null || :"
	file := filepath.Join(t.TempDir(), "archive")
	shared.Must(t, "image", "collapse", fourth)
	shared.Must(t, "snapshot", "export", fourth, file)
	shared.Must(t, "snapshot", "import", file, name("again"))
	for _, s := range []string{fourth, "snap:" + name("again")} {
		if got := sh(t, begin(t, s), look); got != want {
			t.Errorf("%s shows %q, want %q", s, got, want)
		}
	}
}
