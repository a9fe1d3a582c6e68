package build

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/source"

	"golang.org/x/sys/unix"
)

// These tests need root, as building does.

func TestRecipes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, text, want string }{
		{"unknown key", "from: scratch\nfro: x\n", "[2:1]"},
		{"unknown key in a step", "from: scratch\nsteps:\n  - copy: {src: a, dst: /b}\n", "[3:"},
		{"wrong type", "from: scratch\ncmd: {a: b}\n", "[2:"},
		{"no from", "cmd: [a]\n", "from is missing"},
		{"debian without a suite", "from: debian\n", "suite"},
		{"packages without debian", "from: busybox\npackages: [git]\n", "from: debian"},
		{"an option as a package", "from: debian\nsuite: bookworm\npackages: [\"--help\"]\n", "package name"},
		{"both in one step", "from: scratch\nsteps: [{run: a, copy: {src: a, dest: /b}}]\n", "step 1"},
		{"neither in a step", "from: scratch\nsteps: [{run: a}, {}]\n", "step 2"},
		{"copy from outside", "from: scratch\nsteps: [{copy: {src: ../a, dest: /b}}]\n", "beside"},
		{"copy to a relative path", "from: scratch\nsteps: [{copy: {src: a, dest: b}}]\n", "absolute"},
		{"bad mode", "from: scratch\nsteps: [{copy: {src: a, dest: /b, mode: rwx}}]\n", "octal"},
		{"bad variable", "from: scratch\nenv: {\"a b\": c}\n", "variable"},
		{"relative workdir", "from: scratch\nworkdir: a\n", "absolute"},
	} {
		_, err := Parse([]byte(c.text), ".")
		if !errors.Is(err, errs.BadRequest) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q in it", c.name, err, c.want)
		}
	}
	for _, text := range []string{"from: scratch\nfro: x\n", "from: scratch\nsteps:\n  - copy: {src: a, dst: /b}\n"} {
		_, err := Parse([]byte(text), ".")
		const fields = "from, suite, packages, steps, env, user, workdir, cmd, labels; in a step: copy, run; in copy: src, dest, mode, user"
		if hint := errs.Of(err).Hint(); !strings.HasSuffix(hint, fields) {
			t.Errorf("%q: the hint is %q", text, hint)
		}
	}
	shipped, err := filepath.Glob("../../../images/*/recipe.yaml")
	if err != nil || len(shipped) < 4 {
		t.Fatalf("shipped recipes: %v, %v", shipped, err)
	}
	manual, err := os.ReadFile("../../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, example, _ := strings.Cut(string(manual), "```yaml\n")
	example, _, found := strings.Cut(example, "```")
	if _, err := Parse([]byte(example), "."); err != nil || !found {
		t.Errorf("the example of the manual: %v", err)
	}
	for _, f := range shipped {
		if _, err := Load(f); err != nil {
			t.Error(err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("from: debian\nsuite: bookworm\npackages: [git]\nsteps:\n  - run: |\n      true\n  - copy: {src: a, dest: /b, mode: \"0755\"}\nenv: {A: b}\n"))
	f.Add([]byte("from: [\n"))
	f.Fuzz(func(t *testing.T, p []byte) {
		r, err := Parse(p, ".")
		if err == nil {
			r.Config()
		}
	})
}

// built returns the image as the kernel shows it, mounted for reading.
func built(t *testing.T, r *Recipe) (dir string, lines []string, res layer.Result) {
	t.Helper()
	var out bytes.Buffer
	if err := Build(t.Context(), r, &out, Options{TempDir: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	var l image.LayerFiles
	l, res = imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		_, err := source.Stream(t.Context(), &out, b, source.Options{})
		return err
	})
	lines = imagetest.Mounted(t, l)
	fd, err := image.Mount(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd), lines, res
}

func TestBusyboxImageIsSmallAndRuns(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("busybox"); err != nil {
		t.Fatal("the package busybox-static is needed")
	}
	r, err := Load("../../../images/busybox/recipe.yaml")
	if err != nil {
		t.Fatal(err)
	}
	dir, lines, res := built(t, r)
	if size := res.MetaSize + res.DataSize; size > 4<<20 {
		t.Errorf("the image takes %d bytes", size)
	}
	links := 0
	for _, l := range lines {
		if strings.Contains(l, `same="./bin/`) {
			links++
		}
	}
	if links < 200 {
		t.Errorf("%d hard links", links)
	}
	for _, cmd := range []string{"/bin/true", "/bin/sh"} {
		c := exec.Command("chroot", dir, cmd, "-c", "ls / && id")
		c.Stderr = os.Stderr
		if out, err := c.Output(); err != nil {
			t.Errorf("%s: %v %s", cmd, err, out)
		}
	}
}

func TestStepsCopyAndRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.WriteFile(filepath.Join(dir, "tool"), []byte("#!/bin/sh\necho hello\n"), 0o644))
	must(os.MkdirAll(filepath.Join(dir, "tree/sub"), 0o755))
	must(os.WriteFile(filepath.Join(dir, "tree/sub/a"), []byte("a"), 0o600))
	must(os.Symlink("sub/a", filepath.Join(dir, "tree/link")))
	r, err := Parse([]byte(`
from: busybox
env: {GREETING: hi}
steps:
  - copy: {src: tool, dest: /usr/local/bin/tool, mode: "4755", user: 7}
  - copy: {src: tree, dest: /srv}
  - run: |
      tool > /from-run
      echo "$GREETING $(pwd) $$" >> /from-run
      test -e /proc/self/exe && test -c /dev/null
      mkdir -m 1777 /made && chown 123:456 /made
`), dir)
	must(err)
	root, lines, _ := built(t, r)
	all := strings.Join(lines, "\n")
	for _, want := range []string{
		`"./usr/local/bin/tool" mode=104755 uid=7 gid=7`, `"./srv/sub/a" mode=100600 uid=0`, `"./made" mode=41777 uid=123 gid=456`,
	} {
		if !strings.Contains(all, want) {
			t.Errorf("no %s", want)
		}
	}
	for _, not := range []string{"resolv.conf", `"./proc/`, `"./dev/`} {
		if strings.Contains(all, not) {
			t.Errorf("the build left %s in the image", not)
		}
	}
	got, err := os.ReadFile(root + "/from-run")
	if err != nil || !strings.HasPrefix(string(got), "hello\nhi / ") {
		t.Errorf("from-run: %q, %v", got, err)
	}
	if got, err := os.Readlink(root + "/srv/link"); err != nil || got != "sub/a" {
		t.Errorf("link: %q, %v", got, err)
	}
}

func TestAFailingCommandSaysWhichAndLeavesNothing(t *testing.T) {
	t.Parallel()
	tmp := t.TempDir()
	r, err := Parse([]byte("from: busybox\nsteps:\n  - run: echo about to fail; exit 3\n"), tmp)
	if err != nil {
		t.Fatal(err)
	}
	err = Build(t.Context(), r, io.Discard, Options{TempDir: tmp})
	if !errors.Is(err, errs.BuildFailed) || !strings.Contains(err.Error(), `step 1: image.build: "echo about to fail; exit 3" ended`) || !strings.Contains(err.Error(), "lines: about to fail") {
		t.Errorf("got %v", err)
	}
	if r, err = Parse([]byte("from: busybox\nsteps: [{run: exit 3}]\n"), tmp); err != nil {
		t.Fatal(err)
	}
	if err := Build(t.Context(), r, io.Discard, Options{TempDir: tmp}); !errors.Is(err, errs.BuildFailed) || strings.Contains(err.Error(), "last lines") {
		t.Errorf("one that says nothing: %v", err)
	}
	left(t, tmp)
}

func TestCancellingEndsEveryProcessAndMount(t *testing.T) {
	t.Parallel()
	tmp := t.TempDir()
	r, err := Parse([]byte("from: busybox\nsteps:\n  - run: sleep 1000 & echo started; sleep 1000\n"), tmp)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err = Build(ctx, r, io.Discard, Options{TempDir: tmp, Progress: func(line string) {
		if line == "started" {
			cancel()
		}
	}})
	if !errors.Is(err, errs.RequestCanceled) {
		t.Errorf("got %v", err)
	}
	left(t, tmp)
}

// left checks that a build removed its directory and that no mount is in it.
func left(t *testing.T, tmp string) {
	t.Helper()
	if list, err := os.ReadDir(tmp); err != nil || len(list) > 0 {
		t.Errorf("left %v, %v", list, err)
	}
	p, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(p), tmp) {
		t.Errorf("a mount is left in %s (%v)", tmp, err)
	}
}

func TestRunNeedsAShell(t *testing.T) {
	t.Parallel()
	r, err := Parse([]byte("from: scratch\nsteps: [{run: ls}]\n"), ".")
	if err != nil {
		t.Fatal(err)
	}
	if err := Build(t.Context(), r, io.Discard, Options{TempDir: t.TempDir()}); !errors.Is(err, errs.BadRequest) {
		t.Errorf("got %v", err)
	}
}

func TestCopyDoesNotFollowLinksOut(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Symlink("/etc", filepath.Join(dir, "out")); err != nil {
		t.Fatal(err)
	}
	r, err := Parse([]byte("from: scratch\nsteps: [{copy: {src: out/passwd, dest: /p}}]\n"), dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := Build(t.Context(), r, io.Discard, Options{TempDir: t.TempDir()}); !errors.Is(err, errs.BadRequest) {
		t.Errorf("got %v", err)
	}
}

func TestTheTarIsWhatGNUTarReads(t *testing.T) {
	t.Parallel()
	src := t.TempDir()
	for path, content := range map[string]string{"a": "a", strings.Repeat("n", 200): "long"} {
		if err := os.WriteFile(filepath.Join(src, path), []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(filepath.Join(src, "a"), filepath.Join(src, "b")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mknod(filepath.Join(src, "c"), unix.S_IFCHR|0o600, int(unix.Mkdev(5, 300))); err != nil {
		t.Fatal(err)
	}
	if err := unix.Lsetxattr(filepath.Join(src, "a"), "user.x", []byte("v\x00"), 0); err != nil {
		t.Fatal(err)
	}
	dst := t.TempDir()
	cmd := exec.Command("tar", "--xattrs", "--xattrs-include=*", "-C", dst, "-xpf", "-")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := writeTar(t.Context(), src, in); err != nil {
		t.Error(err)
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	want, err := imagetest.Describe(src)
	if err != nil {
		t.Fatal(err)
	}
	got, err := imagetest.Describe(dst)
	if err != nil {
		t.Fatal(err)
	}
	if d := imagetest.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestAptSourcesOfThisMachineServeTheSuite(t *testing.T) {
	t.Parallel()
	etc := t.TempDir()
	if err := os.Mkdir(filepath.Join(etc, "sources.list.d"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"sources.list": "# comment\ndeb [arch=amd64 signed-by=/k.gpg] http://one/debian host main contrib # end\ndeb-src http://one/debian host main\n",
		"sources.list.d/a.sources": "Types: deb deb-src\n# comment\nURIs: http://two/debian\nSuites: host host-updates\nComponents: main\nSigned-By: /k2.gpg\n\n" +
			"Types: deb\nEnabled: no\nURIs: http://off\nSuites: host\nComponents: main\n\n" +
			"Types: deb\nURIs: http://three/security\nSuites: host-security\nComponents: main\nSigned-By:\n -----BEGIN\n .\n",
		"sources.list.d/b.list": "deb http://others/x stable main\ndeb http://vendor/y host contrib\n",
	} {
		if err := os.WriteFile(filepath.Join(etc, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got := strings.Join(aptSources(etc, "host", "trixie"), "\n")
	want := "deb [signed-by=/k.gpg] http://one/debian trixie main contrib\n" +
		"deb [signed-by=/k2.gpg] http://two/debian trixie main\n" +
		"deb [signed-by=/k2.gpg] http://two/debian trixie-updates main\n" +
		"deb http://three/security trixie-security main"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if none := aptSources(t.TempDir(), "host", "trixie"); none != nil {
		t.Errorf("got %v", none)
	}
}

// Keys tell steps apart by all that makes their result, and by nothing else.
func TestKeys(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "f")
	write := func(content string, mode os.FileMode) {
		t.Helper()
		if err := errors.Join(os.WriteFile(file, []byte(content), 0o644), os.Chmod(file, mode)); err != nil {
			t.Fatal(err)
		}
	}
	keys := func(base, text string) []string {
		t.Helper()
		r, err := Parse([]byte(text), dir)
		if err != nil {
			t.Fatal(err)
		}
		k, err := r.Keys(t.Context(), base)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	const text = "from: some/image\nenv: {A: b}\nuser: me\nsteps:\n  - run: one\n  - copy: {src: f, dest: /f}\n  - run: two\n"
	write("x", 0o644)
	was := keys("base", text)
	if again := keys("base", strings.Replace(text, "user: me", "cmd: [sh]", 1)); !slices.Equal(was, again) {
		t.Error("how programs run makes no other steps")
	}
	for what, c := range map[string]struct {
		base, text, content string
		mode                os.FileMode
		same                int
	}{
		"another base":      {"other", text, "x", 0o644, 0},
		"another variable":  {"base", strings.Replace(text, "A: b", "A: c", 1), "x", 0o644, 0},
		"another content":   {"base", text, "y", 0o644, 1},
		"another mode":      {"base", text, "x", 0o755, 1},
		"another last step": {"base", strings.Replace(text, "two", "three", 1), "x", 0o644, 2},
	} {
		write(c.content, c.mode)
		now := keys(c.base, c.text)
		same := 0
		for same < len(now) && now[same] == was[same] {
			same++
		}
		if same != c.same {
			t.Errorf("%s: %d steps are the same, want %d", what, same, c.same)
		}
	}
}
