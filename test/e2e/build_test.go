package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

// Steps run in a sandbox of the base; a later build with the same steps up to one goes on from there.
func TestBuildSteps(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	recipe := filepath.Join(dir, "recipe.yaml")
	write := func(name, content string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	name := strings.ToLower(t.Name())
	build := func(args ...string) string {
		t.Helper()
		r := shared.CLI(t, append([]string{"image", "build", "--memory", "256m", "-f", recipe}, args...)...)
		if r.Code != 0 {
			t.Fatalf("build: %+v", r)
		}
		return r.Stderr
	}
	steps := func(last string) string {
		return "from: " + bed.Image + `
env: {COLOUR: green}
user: "1000"
workdir: /srv
labels: {made: here}
steps:
  - run: mkdir -p /srv /tmp; chmod 1777 /tmp; hostname > /who; echo $COLOUR > /srv/colour
  - copy: {src: tree, dest: /tmp, user: 1000}
  - copy: {src: tree/run.sh, dest: /usr/local/bin/hello, mode: "4755"}
` + last
	}
	write("tree/run.sh", "#!/bin/sh\necho hello from $COLOUR\n")
	write("tree/sub/file", "content")
	write("recipe.yaml", steps("  - run: cp /tmp/sub/file /srv/copied\n"))
	said := build(name)
	if strings.Contains(said, "earlier build") || !strings.Contains(said, "run cp") {
		t.Errorf("the first build: %s", said)
	}
	const look = `pwd; id -u; cat colour copied; hello; stat -c '%a %u' /tmp /tmp/sub/file /usr/local/bin/hello; ls /run.sh 2>/dev/null || true`
	want := "/srv\n1000\ngreen\ncontenthello from green\n1777 0\n644 1000\n4755 0"
	if got := shared.Must(t, "run", name, "--", "sh", "-ec", look); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := shared.Must(t, "run", name, "--", "cat", "/who", "/etc/hostname"); strings.Count(got, "\n") != 1 || strings.Fields(got)[0] == strings.Fields(got)[1] {
		t.Errorf("the steps ran on %q", got) // another sandbox than the one that shows it
	}
	img := bed.JSON[v1.Image](t, shared, "image", "inspect", name, "--json")
	if img.Snapshot != nil || img.Config.Labels["made"] != "here" || img.Layers[0].Kind != v1.KindBase || img.Layers[1].Kind != v1.KindDiff {
		t.Errorf("%+v", img)
	}
	if said := build(name + "2"); !strings.Contains(said, "4 steps as in an earlier build") || strings.Contains(said, "run ") {
		t.Errorf("the same again: %s", said)
	}
	write("recipe.yaml", steps("  - run: echo other > /srv/copied\n"))
	if said := build(name); !strings.Contains(said, "3 steps as in an earlier build") || strings.Contains(said, "run mkdir") {
		t.Errorf("with another last step: %s", said)
	}
	if got := shared.Must(t, "run", name, "--", "cat", "copied"); got != "other" {
		t.Errorf("with another last step it has %q", got)
	}
	if got := shared.Must(t, "run", name+"2", "--", "cat", "copied"); got != "content" {
		t.Errorf("the earlier one has %q", got)
	}
	write("tree/sub/file", "changed")
	if said := build(name); !strings.Contains(said, "1 step as in an earlier build") {
		t.Errorf("with a changed file: %s", said)
	}
	if said := build("--no-cache", name); strings.Contains(said, "earlier build") {
		t.Errorf("without a cache: %s", said)
	}
	write("recipe.yaml", steps("  - run: |\n      echo about to fail\n      exit 3\n"))
	r := shared.Fails(t, 1, "build_failed", "image", "build", "--memory", "256m", "-f", recipe, name)
	if !strings.Contains(r.Stderr, "step 4") || !strings.Contains(r.Stderr, "about to fail") {
		t.Errorf("a failed step: %s", r.Stderr)
	}
	if boxes := shared.Must(t, "ls", "-q"); strings.Contains(boxes, "build-") {
		t.Errorf("left: %s", boxes)
	}
	shared.Must(t, "image", "rm", name, name+"2")
	if ls := shared.Must(t, "image", "ls", "-q"); strings.Contains(ls, "build-") {
		t.Errorf("'image ls' shows what builds keep: %s", ls)
	}
	for _, n := range strings.Fields(shared.Must(t, "image", "ls", "-q", "--all")) {
		if strings.HasPrefix(n, "build-step:") && strings.Contains(shared.Must(t, "image", "inspect", n), "COLOUR=green") {
			shared.Must(t, "image", "rm", n)
		}
	}
}

// A build without a cache leaves nothing but its image, well or not.
func TestBuildWithoutACacheKeepsNothing(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{NoImage: true})
	for run, code := range map[string]int{"true": 0, "false": 1} {
		recipe := filepath.Join(t.TempDir(), "recipe.yaml")
		if err := os.WriteFile(recipe, []byte("from: busybox\nsteps:\n  - run: "+run+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if r := b.CLI(t, "image", "build", "made-"+run, "--memory", "256m", "--no-cache", "-f", recipe); r.Code != code {
			t.Fatalf("%+v", r)
		}
	}
	if got := b.Must(t, "image", "ls", "--all", "-q"); got != "made-true" {
		t.Errorf("there is %q", got)
	}
	b.Must(t, "run", "made-true", "--", "true")
}
