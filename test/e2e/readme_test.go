package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"dsec/test/bed"
)

// exits is how a line of the tour says that it fails.
var exits = regexp.MustCompile(`# exits (\d+)`)

// The tour of the README does what it says, line by line.
func TestReadmeTour(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, tour, _ := strings.Cut(string(readme), "## Five minutes")
	_, tour, _ = strings.Cut(tour, "```\n")
	tour, _, found := strings.Cut(tour, "```")
	if !found || !strings.HasPrefix(tour, "dsec doctor") {
		t.Fatalf("the README has no tour: %.40q", tour)
	}
	image, err := bed.Archive(t.Context(), "../../images/debian-python/recipe.yaml")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	data := filepath.Join(dir, "data")
	// Not where a server of this machine may be, and not by minutes of downloads.
	instead := strings.NewReplacer(
		"dsec doctor ", "dsec doctor --data "+data+" ",
		"dsec up --detach", "dsec up --detach --data "+data+" --listen unix:"+filepath.Join(dir, "api.sock"),
		"dsec image build debian -f images/debian-python/recipe.yaml", "dsec image import debian "+image,
	)
	var script strings.Builder
	lines := 0
	for line := range strings.Lines(tour) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		want := "0"
		if m := exits.FindStringSubmatch(line); m != nil {
			want = m[1]
		}
		lines++
		changed := instead.Replace(line)
		fmt.Fprintf(&script, "%s\ncode=$?; [ $code = %s ] || { echo \"line %d exits $code, not %s\" >&2; exit 99; }\n", changed, want, lines, want)
	}
	if lines < 20 {
		t.Fatalf("the tour has %d lines", lines)
	}
	cmd := shared.Command(t.Context(), "version")
	file := filepath.Join(dir, "tour.sh") // not on stdin, which is the commands'
	if err := os.WriteFile(file, []byte(script.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd.Path, cmd.Args, cmd.Dir = "/bin/bash", []string{"bash", "-v", file}, "../.."
	cmd.Env = append(cmd.Env, "PATH="+filepath.Dir(shared.Bin)+":"+os.Getenv("PATH"), "XDG_CONFIG_HOME="+filepath.Join(dir, "config"))
	t.Cleanup(func() {
		if _, err := os.Stat(filepath.Join(data, "run.json")); err == nil { // it did not come to its end
			shared.Run(context.Background(), nil, "down", "--data", data)
		}
	})
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	for _, want := range []string{"\n42\n", "failed", "/root/repo\n1\n", `"exit_code":0`, "sandbox_gone", "somebody asked for it"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the tour does not show %q:\n%s", want, out)
		}
	}
}

// The program of the README can be compiled as it stands there.
func TestReadmeProgram(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, program, _ := strings.Cut(string(readme), "```go\n")
	program, _, found := strings.Cut(program, "```")
	if !found {
		t.Fatal("the README has no program")
	}
	file := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(file, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "vet", file)
	cmd.Dir = "../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
