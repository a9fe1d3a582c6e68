package robustness

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dsec/client"
	"dsec/test/bed"
)

// Damaged files of the data directory: the error says what is lost and how to go on.
func TestUpSaysHowToMendDamagedData(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	for range 2 {
		if _, err := c.Create(t.Context(), client.Spec{Image: bed.Image}); err != nil {
			t.Fatal(err)
		}
	}
	b.Kill(t)
	garble := func(path string, at, n int64) (mend func()) {
		old, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		bad := append([]byte(nil), old...)
		copy(bad[at:], strings.Repeat("garbage!", 1000)[:n])
		write := func(data []byte) {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write(bad)
		return func() { write(old) }
	}
	up := func() bed.Result { return b.CLI(t, "up", "--data", b.Data, "--listen", "unix:"+b.Sock) }
	says := func(want ...string) {
		t.Helper()
		r := up()
		for _, w := range append(want, "data_corrupt") {
			if r.Code == 0 || !strings.Contains(r.Stderr, w) || strings.Contains(r.Stderr, "goroutine ") {
				t.Errorf("up ended with %d, want %q in:\n%.3000s", r.Code, w, r.Stderr)
			}
		}
	}
	etcd := filepath.Join(b.Data, "etcd")
	var wal, db string
	_ = filepath.WalkDir(etcd, func(p string, _ os.DirEntry, _ error) error {
		if strings.HasSuffix(p, ".wal") && wal == "" {
			wal = p
		}
		if filepath.Base(p) == "db" {
			db = p
		}
		return nil
	})
	for _, path := range []string{wal, db} {
		mend := garble(path, 64, 8000)
		says(etcd, "image names", "mv ")
		mend()
	}
	for _, name := range []string{"edge/identity.json", "root.token"} {
		mend := garble(filepath.Join(b.Data, name), 8, 8)
		says(filepath.Join(b.Data, name), "--data "+b.Data)
		mend()
	}
	garble(filepath.Join(b.Data, "edge", "journal"), 40, 8) // not mended: what up says is done instead
	says(filepath.Join(b.Data, "edge", "journal"), "dsec down --data "+b.Data)
	if out := b.Must(t, "down", "--data", b.Data); !strings.Contains(out, "removed 2 sandboxes") {
		t.Errorf("down: %s", out)
	}
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.Must(t, "run", bed.Image, "--", "true")
}
