package robustness

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dsec/test/bed"
)

// Programs of a sandbox have its secret environment, also after the server was killed; nothing that the server
// says or writes has it, nor has what is made of the sandbox, unless a fork gives it again.
func TestSecretsAreKeptNowhere(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	secret := fmt.Sprintf("secret-%x", bed.Random(t).Uint64())
	has := func(id string) string {
		t.Helper()
		return b.Must(t, "exec", id, "--", "sh", "-c", "echo $KEY $PLAIN")
	}
	file := filepath.Join(t.TempDir(), "secrets")
	if err := os.WriteFile(file, []byte("# one\nKEY="+secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	id := b.Must(t, "create", "--secret-file", file, "--env", "PLAIN=plain", "--env", "KEY=over", bed.Image)
	if got := has(id); got != secret+" plain" {
		t.Errorf("programs have %q", got)
	}
	for _, many := range strings.Fields(b.Must(t, "create", "--count", "2", "--secret", "KEY="+secret, bed.Image)) {
		if got := has(many); got != secret {
			t.Errorf("one of several has %q", got)
		}
		b.Must(t, "rm", many)
	}
	if got := b.Must(t, "run", "--secret", "KEY="+secret, bed.Image, "--", "sh", "-c", "echo $KEY"); got != secret {
		t.Errorf("run has %q", got)
	}
	b.Must(t, "snapshot", id, "made")
	copied := b.Must(t, "create", "snap:made")
	if got := has(copied); got != "over plain" {
		t.Errorf("a sandbox of the snapshot has %q", got)
	}
	child := b.Must(t, "fork", id)
	if got := has(child); got != "over plain" {
		t.Errorf("a fork's child has %q", got)
	}
	told := b.Must(t, "fork", "--secret", "KEY="+secret, id)
	if got := has(told); got != secret+" plain" {
		t.Errorf("the child of a fork that gives it has %q", got)
	}
	for _, args := range [][]string{
		{"inspect", "--json", id}, {"ls", "--json"}, {"ps", "--json", id}, {"image", "inspect", "--json", "snap:made"}, {"events", "--json", "--from", "0"},
	} {
		if r := b.Run(context.Background(), nil, args...); strings.Contains(r.Stdout+r.Stderr, secret) || r.Code != 0 {
			t.Errorf("%v: code %d, tells the secret: %v\n%s", args, r.Code, strings.Contains(r.Stdout+r.Stderr, secret), r.Stderr)
		}
	}
	for _, bad := range []string{"=" + secret, "NO_SUCH_" + secret} {
		if r := b.Fails(t, 2, "", "create", "--secret", bad, bed.Image); strings.Contains(r.Stderr, secret) {
			t.Errorf("the error tells it: %s", r.Stderr)
		}
	}
	b.Kill(t)
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := has(id); got != secret+" plain" {
		t.Errorf("after a restart programs have %q", got)
	}
	files := 0
	err := filepath.WalkDir(b.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || d.Name() == "scratch.img" {
			return nil // what goes meanwhile is not there; the image is mostly holes
		}
		raw, err := os.ReadFile(path)
		if err == nil {
			files++
		}
		if bytes.Contains(raw, []byte(secret)) {
			t.Errorf("%s has it", path)
		}
		return nil
	})
	if err != nil || files < 10 {
		t.Errorf("looked at %d files: %v", files, err)
	}
	for _, s := range []string{id, copied, child, told} {
		b.Must(t, "rm", s)
	}
}
