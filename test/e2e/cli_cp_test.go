package e2e

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dsec/client"
)

// treeTime is when the files of writeTree were last written.
var treeTime = time.Date(2021, 2, 3, 4, 5, 6, 0, time.UTC)

// writeTree makes a small tree with what copies get wrong.
func writeTree(t *testing.T, dir string) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	file := func(name, data string, mode fs.FileMode) {
		path := filepath.Join(dir, name)
		check(os.MkdirAll(filepath.Dir(path), 0o755))
		check(os.WriteFile(path, []byte(data), 0o600))
		check(os.Chmod(path, mode)) // not masked
		check(os.Chtimes(path, treeTime, treeTime))
	}
	file("plain", "hello\n", 0o644)
	file("script.sh", "#!/bin/sh\necho ran\n", 0o755)
	file("setuid", "x", 0o755|fs.ModeSetuid)
	file("secret", "s", 0o400)
	file("sub/deep/er/file", "deep", 0o640)
	file("name with spaces and ünïcode", "u", 0o644)
	file(strings.Repeat("long", 50), "long", 0o644)
	file("empty", "", 0o644)
	check(os.Mkdir(filepath.Join(dir, "emptydir"), 0o750))
	check(os.Symlink("plain", filepath.Join(dir, "link")))
	check(os.Symlink("/etc/passwd", filepath.Join(dir, "absolute")))
	check(os.Symlink("nowhere", filepath.Join(dir, "dangling")))
	check(os.Link(filepath.Join(dir, "plain"), filepath.Join(dir, "hard")))
}

// describe renders a tree: type, mode, size or target, and the time of files.
func describe(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		line := info.Mode().String() + " " + name
		switch {
		case info.Mode().IsRegular():
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += " " + string(data) + " " + info.ModTime().UTC().Format(time.RFC3339)
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " -> " + target
		}
		if name != "." {
			out = append(out, line)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestCopyTreeThereAndBack(t *testing.T) {
	t.Parallel()
	id := box(t)
	src, back := filepath.Join(t.TempDir(), "tree"), t.TempDir()
	if err := os.Mkdir(src, 0o755); err != nil {
		t.Fatal(err)
	}
	writeTree(t, src)
	shared.Must(t, "cp", src, id+":/work")
	if got := shared.Must(t, "exec", id, "--", "sh", "-c", "cd /work && ./script.sh && cat link && stat -c %a setuid secret && readlink absolute && stat -c %h plain"); got != "ran\nhello\n4755\n400\n/etc/passwd\n2" {
		t.Errorf("inside: %q", got)
	}
	shared.Must(t, "cp", id+":/work", back) // a directory: goes into it
	want := describe(t, src)
	for i, line := range want { // set-uid programs of a sandbox must not get out
		want[i] = strings.Replace(line, "urwx", "-rwx", 1)
	}
	if got := describe(t, filepath.Join(back, "work")); !slices.Equal(got, want) {
		t.Errorf("came back as\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	// Into a directory that exists, and only its content.
	shared.Must(t, "cp", src, id+":/tmp")
	shared.Must(t, "cp", src+"/.", id+":/var")
	shared.Must(t, "exec", id, "--", "test", "-e", "/tmp/tree/sub/deep/er/file", "-a", "-e", "/var/script.sh")
}

func TestCopyFileThereAndBack(t *testing.T) {
	t.Parallel()
	id := box(t)
	src := filepath.Join(t.TempDir(), "f")
	data := bytes.Repeat([]byte{0, 1, 0xff, '\n'}, 1<<18)
	if err := os.WriteFile(src, data, 0o751); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(src, 0o751); err != nil {
		t.Fatal(err)
	}
	shared.Must(t, "cp", src, id+":/tmp")           // into a directory
	shared.Must(t, "cp", src, id+":/new/dir/other") // makes what is missing
	shared.Must(t, "cp", src, id+":/new/trailing/") // a directory by its slash
	if got := shared.Must(t, "exec", id, "--", "stat", "-c", "%a %s", "/tmp/f", "/new/dir/other", "/new/trailing/f"); got != strings.TrimSuffix(strings.Repeat("751 1048576\n", 3), "\n") {
		t.Errorf("inside: %q", got)
	}
	dst := filepath.Join(t.TempDir(), "g")
	shared.Must(t, "cp", id+":/tmp/f", dst)
	got, err := os.ReadFile(dst)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("came back with %d bytes, %v", len(got), err)
	}
	if fi, err := os.Stat(dst); err != nil || fi.Mode().Perm() != 0o751 {
		t.Errorf("mode: %v, %v", fi, err)
	}
}

func TestCopyStdinAndStdout(t *testing.T) {
	t.Parallel()
	id := box(t)
	data := strings.Repeat("bytes \x00\xff\n", 50000)
	shared.MustIn(t, data, "cp", "-", id+":/tmp/in")
	if r := shared.CLI(t, "cp", id+":/tmp/in", "-"); r.Code != 0 || r.Stdout != data {
		t.Errorf("cp to stdout: %d bytes of %d, %s", len(r.Stdout), len(data), r.Stderr)
	}
	// A directory to stdout is a tar; a tar from stdin goes into a directory.
	src := t.TempDir()
	writeTree(t, src)
	shared.Must(t, "cp", src+"/.", id+":/work")
	r := shared.CLI(t, "cp", id+":/work", "-")
	if r.Code != 0 {
		t.Fatal(r.Stderr)
	}
	var names []string
	for tr := tar.NewReader(strings.NewReader(r.Stdout)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, strings.TrimSuffix(h.Name, "/"))
	}
	if !slices.Contains(names, "work/sub/deep/er/file") {
		t.Errorf("the tar has %v", names)
	}
	if res := shared.Run(t.Context(), strings.NewReader(r.Stdout), "cp", "-", id+":/again/"); res.Code != 0 {
		t.Fatal(res.Stderr)
	}
	if got := shared.Must(t, "exec", id, "--", "cat", "/again/work/sub/deep/er/file"); got != "deep" {
		t.Errorf("unpacked: %q", got)
	}
}

func TestCopyRefusals(t *testing.T) {
	t.Parallel()
	id := box(t)
	shared.Fails(t, 2, "", "cp", "a", "b")
	shared.Fails(t, 2, "", "cp", id+":/etc", id+":/tmp")
	shared.Fails(t, 1, "path_not_found", "cp", id+":/nosuch", t.TempDir())
	shared.Fails(t, 1, "local_file", "cp", "/nosuch/file", id+":/tmp")
	shared.Fails(t, 1, "not_directory", "cp", "/etc/hostname", id+":/etc/passwd/x")
	if left := shared.Must(t, "exec", id, "--", "ls", "/tmp"); left != "" {
		t.Errorf("refused copies left %q", left)
	}
}

// What cp cannot copy is said once, with something to do.
func TestCopyErrorsHelp(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	r := shared.Fails(t, 1, "path_not_found", "cp", sb.ID()+":/nonexist", ".")
	if strings.Count(r.Stderr, "/nonexist") != 1 {
		t.Errorf("%s", r.Stderr)
	}
	r = shared.Fails(t, 1, "bad_path", "cp", sb.ID()+":/dev/zero", "-")
	if !strings.Contains(r.Stderr, "next:  read it with a command inside") {
		t.Errorf("%s", r.Stderr)
	}
	r = shared.Fails(t, 125, "permission_denied", "exec", "-u", "nobody", "--cwd", "/root", sb.ID(), "--", "true")
	if !strings.Contains(r.Stderr, "choose another --cwd") {
		t.Errorf("%s", r.Stderr)
	}
}
