package client_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
)

// random returns n bytes; the seed is printed with a failure.
func random(t *testing.T, n int) []byte {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24)})
	r.Read(b)
	return b
}

func TestFilesReadWrite(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	ctx := t.Context()
	for _, n := range []int{0, 1, 1<<20 - 4<<10, 1<<20 - 4<<10 + 1, 3 << 20} {
		data := random(t, n)
		if err := sb.WriteFile(ctx, "/tmp/f", data, 0o640); err != nil {
			t.Fatal(err)
		}
		got, err := sb.ReadFile(ctx, "/tmp/f")
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes: %d came back, %v", n, len(got), err)
		}
		if e, err := sb.Files().Stat(ctx, "/tmp/f"); err != nil || e.Size != int64(n) || e.Mode&0o777 != 0o640 || client.IsDir(e) || client.ModTime(e).IsZero() {
			t.Errorf("%d bytes: %+v, %v", n, e, err)
		}
	}
	if err := sb.Files().WriteFile(ctx, "/tmp/f", []byte("0123456789"), client.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := sb.Files().WriteFile(ctx, "/tmp/f", []byte("AB"), client.WriteOptions{Offset: 3, Keep: true}); err != nil {
		t.Fatal(err)
	}
	r, err := sb.Files().Open(ctx, "/tmp/f", 2, 5)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || string(b) != "2AB56" {
		t.Errorf("range: %q, %v", b, err)
	}
	if r, err = sb.Files().Open(ctx, "/tmp/f", 0, 0); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("read after close: %v", err)
	}
	if _, err := sb.ReadFile(ctx, "/none"); !errors.Is(err, errs.PathNotFound) || !errors.Is(err, client.ErrNotFound) {
		t.Errorf("missing file: %v", err)
	}
	w, err := sb.Files().Create(ctx, "/no/dir/f", client.WriteOptions{})
	if err == nil {
		err = w.Close()
	}
	if !errors.Is(err, errs.PathNotFound) {
		t.Errorf("missing directory: %v", err)
	}
}

// The server's own word on why a write ended must come through, not "stream closed".
func TestWriteReportsTheServersReason(t *testing.T) {
	t.Parallel()
	s, sb := sandbox(t)
	s.Fail("file.write", 1, errs.New(errs.DiskFull, "file.write", "no space left"))
	err := sb.Files().WriteFrom(t.Context(), "/tmp/x", bytes.NewReader(make([]byte, 8<<20)), client.WriteOptions{})
	if !errors.Is(err, errs.DiskFull) {
		t.Errorf("%v", err)
	}
}

func TestFileOperations(t *testing.T) {
	t.Parallel()
	s, sb := sandbox(t)
	ctx, f := t.Context(), sb.Files().As("root")
	if err := f.Mkdir(ctx, "/d", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := f.Mkdir(ctx, "/d", 0o755); !errors.Is(err, errs.PathExists) {
		t.Errorf("second mkdir: %v", err)
	}
	if err := f.MkdirAll(ctx, "/d/e/f", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := sb.WriteFile(ctx, "/d/e/x", []byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	l, more, err := f.List(ctx, "/d", 2, 0)
	if err != nil || more || len(l) != 3 {
		t.Errorf("depth 2: %v, %v", l, err)
	}
	if l, _, err = f.List(ctx, "/d", 0, 0); err != nil || len(l) != 1 || l[0].Name != "e" {
		t.Errorf("depth 0: %v, %v", l, err)
	}
	if err := f.Move(ctx, "/d/e/x", "/d/y"); err != nil {
		t.Error(err)
	}
	if err := f.Chmod(ctx, "/d/y", 0o755|fs.ModeSetuid, false); err != nil {
		t.Error(err)
	}
	if err := f.Chown(ctx, "/d/y", "12345", false); err != nil {
		t.Error(err)
	}
	// chown clears setuid, so the mode is read before the owner would matter
	fi, err := os.Stat(filepath.Join(s.Root(sb.ID()), "d/y"))
	if err != nil || fi.Sys().(*syscall.Stat_t).Uid != 12345 || fi.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", fi, err)
	}
	if err := os.Symlink("y", filepath.Join(s.Root(sb.ID()), "d/link")); err != nil {
		t.Fatal(err)
	}
	if e, err := f.Lstat(ctx, "/d/link"); err != nil || e.SymlinkTarget != "y" {
		t.Errorf("lstat: %+v, %v", e, err)
	}
	if err := f.Remove(ctx, "/d"); err == nil {
		t.Error("a full directory was removed")
	}
	if err := f.RemoveAll(ctx, "/d"); err != nil {
		t.Error(err)
	}
	if _, err := f.Stat(ctx, "/d"); !errors.Is(err, errs.PathNotFound) {
		t.Errorf("after remove: %v", err)
	}
}

func TestWatch(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	ready := func() {
		if err := sb.WriteFile(t.Context(), "/tmp/new", nil, 0); err != nil {
			t.Error(err)
		}
	}
	for e, err := range sb.Files().Watch(t.Context(), "/tmp", false, ready) {
		if err != nil || e.Name != "new" {
			t.Errorf("%+v, %v", e, err)
		}
		break
	}
	ctx, cancel := context.WithCancel(t.Context())
	for range sb.Files().Watch(ctx, "/tmp", false, cancel) {
		t.Error("an event after the end")
	}
	for _, err := range sb.Files().Watch(t.Context(), "/none", false, nil) {
		if !errors.Is(err, errs.PathNotFound) {
			t.Errorf("watch of nothing: %v", err)
		}
	}
}

// tree makes a directory with what a copy has to keep.
func tree(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "project")
	for name, mode := range map[string]fs.FileMode{"a.txt": 0o644, "bin/run": 0o755, "secret": 0o600, "deep/er/f": 0o640} {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte("content of "+name), mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{
		os.Symlink("a.txt", filepath.Join(dir, "link")),
		os.Link(filepath.Join(dir, "a.txt"), filepath.Join(dir, "hard")),
		os.Mkdir(filepath.Join(dir, "empty"), 0o700),
		os.Chtimes(filepath.Join(dir, "a.txt"), time.Unix(1e9, 0), time.Unix(1e9, 0)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// picture describes a tree so that two can be compared.
func picture(t *testing.T, dir string) string {
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		fi, err := d.Info()
		if err != nil {
			return err
		}
		b.WriteString(rel + " " + fi.Mode().String())
		st := fi.Sys().(*syscall.Stat_t)
		switch {
		case fi.Mode().IsRegular():
			c, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			b.WriteString(" " + string(c) + " links " + strconv.Itoa(int(st.Nlink)) + " at " + fi.ModTime().UTC().String())
		case fi.Mode()&fs.ModeSymlink != 0:
			l, _ := os.Readlink(p)
			b.WriteString(" -> " + l)
		}
		b.WriteString("\n")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestCopyTreesBothWays(t *testing.T) {
	t.Parallel()
	s, sb := sandbox(t)
	ctx, f, dir := t.Context(), sb.Files(), tree(t)
	want := picture(t, dir)
	var seen int64
	if err := f.CopyIn(ctx, dir, "/work", client.CopyOptions{Progress: func(n int64) { seen = n }}); err != nil {
		t.Fatal(err)
	}
	if got := picture(t, filepath.Join(s.Root(sb.ID()), "work")); got != want {
		t.Errorf("as a new directory:\n%s\nwant\n%s", got, want)
	}
	if seen == 0 {
		t.Error("no progress was told")
	}
	if err := f.CopyIn(ctx, dir, "/work", client.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := picture(t, filepath.Join(s.Root(sb.ID()), "work/project")); got != want {
		t.Errorf("into a directory that exists:\n%s\nwant\n%s", got, want)
	}
	out := filepath.Join(t.TempDir(), "out")
	if err := f.CopyOut(ctx, "/work/project", out, client.CopyOptions{KeepOwner: true}); err != nil {
		t.Fatal(err)
	}
	if got := picture(t, out); got != want {
		t.Errorf("out:\n%s\nwant\n%s", got, want)
	}
	if err := f.CopyOut(ctx, "/work/project", out, client.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := picture(t, filepath.Join(out, "project")); got != want {
		t.Errorf("out into a directory that exists:\n%s\nwant\n%s", got, want)
	}
}

func TestCopyFiles(t *testing.T) {
	t.Parallel()
	s, sb := sandbox(t)
	ctx, f, dir := t.Context(), sb.Files(), tree(t)
	if err := f.CopyIn(ctx, filepath.Join(dir, "bin/run"), "/tmp", client.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(filepath.Join(s.Root(sb.ID()), "tmp/run"))
	if err != nil || fi.Mode() != 0o755 {
		t.Errorf("into a directory: %v, %v", fi, err)
	}
	out := t.TempDir()
	if err := f.CopyOut(ctx, "/tmp/run", out, client.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := f.CopyOut(ctx, "/tmp/run", filepath.Join(out, "other"), client.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"run", "other"} {
		b, err := os.ReadFile(filepath.Join(out, name))
		fi, _ := os.Stat(filepath.Join(out, name))
		if err != nil || string(b) != "content of bin/run" || fi.Mode() != 0o755 {
			t.Errorf("%s: %q %v %v", name, b, fi.Mode(), err)
		}
	}
	if l, _ := os.ReadDir(out); len(l) != 2 {
		t.Errorf("temporary files are left: %v", l)
	}
	if err := f.CopyOut(ctx, "/none", out, client.CopyOptions{}); !errors.Is(err, errs.PathNotFound) {
		t.Errorf("missing source: %v", err)
	}
	if err := f.CopyIn(ctx, filepath.Join(dir, "none"), "/tmp", client.CopyOptions{}); !errors.Is(err, errs.LocalFile) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing local source: %v", err)
	}
	for _, bad := range []string{filepath.Join(dir, "none", "x"), filepath.Join(dir, "none") + "/", filepath.Join(dir, "a.txt", "x")} {
		if err := f.CopyOut(ctx, "/tmp/run", bad, client.CopyOptions{}); !errors.Is(err, errs.LocalFile) || strings.Contains(err.Error(), ".dsec-") {
			t.Errorf("copy to %s: %v", bad, err)
		}
	}
	if err := f.CopyIn(ctx, filepath.Join(dir, "a.txt"), "/new/dir/", client.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	if b, err := sb.ReadFile(ctx, "/new/dir/a.txt"); err != nil || string(b) != "content of a.txt" {
		t.Errorf("into a directory to be made: %q, %v", b, err)
	}
}

func TestDialPort(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "hello "+r.Host) }))
	defer web.Close()
	u, _ := url.Parse(web.URL)
	port, _ := strconv.Atoi(u.Port())
	hc := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return sb.Dial(ctx, "", port) }}}
	defer hc.CloseIdleConnections()
	for range 3 {
		resp, err := hc.Get("http://inside/")
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "hello inside" {
			t.Errorf("%q, %v", b, err)
		}
		resp.Body.Close()
	}
	if _, err := sb.Dial(t.Context(), "", 70000); !errors.Is(err, errs.BadRequest) {
		t.Errorf("port 70000: %v", err)
	}
	if p, err := sb.Ports(t.Context()); err != nil || len(p) != 1 || p[0].Port != 80 {
		t.Errorf("%v, %v", p, err)
	}
}

func TestDialWhereNothingListensIsPortClosed(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	if c, err := sb.Dial(t.Context(), "", port); !errors.Is(err, errs.PortClosed) {
		t.Errorf("%v, %v", c, err)
	}
}

// A service that closes first is seen to, though our own side is still open.
func TestDialledConnEndsWithTheService(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			io.WriteString(c, "bye")
			c.Close()
		}
	}()
	c, err := sb.Dial(t.Context(), "", l.Addr().(*net.TCPAddr).Port)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, err := io.ReadAll(c); err != nil || string(b) != "bye" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestDialledConnIsANetConn(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		io.Copy(c, c) // an echo until the peer's half is closed
	}()
	ctx, cancel := context.WithCancel(t.Context())
	c, err := sb.Dial(ctx, "", l.Addr().(*net.TCPAddr).Port)
	if err != nil {
		t.Fatal(err)
	}
	cancel() // the dial's context must not end the connection
	buf := make([]byte, 4)
	c.SetReadDeadline(time.Now().Add(-time.Second))
	if _, err := c.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("deadline in the past: %v", err)
	}
	go func() {
		time.Sleep(10 * time.Millisecond)
		c.SetReadDeadline(time.Now())
	}()
	c.SetReadDeadline(time.Time{})
	if _, err := c.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("deadline set during a read: %v", err)
	}
	c.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := c.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "ping" {
		t.Errorf("%q, %v", buf, err)
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Error(err)
	}
	if _, err := c.Read(buf); err != io.EOF {
		t.Errorf("after both ends closed: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := c.Read(buf); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after close: %v", err)
	}
}

func TestBatch(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	b := sb.Client().Batch(1, false)
	put := b.WriteFile(sb, "/tmp/x", []byte("data"), client.WriteOptions{})
	get := b.ReadFile(sb, "/tmp/x")
	run := b.Exec(sb, client.Command("sh", "-c", "cat tmp/x"))
	bad := b.Stat(sb, "/none")
	other := b.Stat(sb.Client().Sandbox("nobody"), "/")
	if _, err := get.Get(); err == nil {
		t.Error("a result before Do")
	}
	if err := b.Do(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e, err := put.Get(); err != nil || e.Size != 4 {
		t.Errorf("put: %+v, %v", e, err)
	}
	if d, err := get.Get(); err != nil || string(d) != "data" {
		t.Errorf("get: %q, %v", d, err)
	}
	if r, err := run.Get(); err != nil || string(r.Stdout) != "data" {
		t.Errorf("exec: %+v, %v", r, err)
	}
	if _, err := bad.Get(); !errors.Is(err, errs.PathNotFound) {
		t.Errorf("stat of nothing: %v", err)
	}
	if _, err := other.Get(); !errors.Is(err, errs.SandboxNotFound) {
		t.Errorf("unknown sandbox: %v", err)
	}
}

func TestBatchEndsByItself(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	b := sb.Client().Batch(1, false)
	b.Timeout = 50 * time.Millisecond
	hang := b.Exec(sb, client.Command("sleep", "600"))
	if err := b.Do(t.Context()); !errors.Is(err, errs.DeadlineExceeded) {
		t.Errorf("a batch that hangs: %v", err)
	}
	if _, err := hang.Get(); err == nil {
		t.Error("its operation has a result")
	}
}

func TestImportImages(t *testing.T) {
	t.Parallel()
	_, sb := sandbox(t)
	c, ctx, dir := sb.Client(), t.Context(), tree(t)
	var phases []string
	img, err := c.ImportPath(ctx, "tree", dir, client.ImportOptions{Progress: func(p v1.ImageProgress) { phases = append(phases, p.Phase) }})
	if err != nil || img.Config.Labels["format"] != "dir" || len(phases) == 0 {
		t.Errorf("directory: %+v, %v, %v", img, phases, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "oci-layout"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if img, err = c.ImportPath(ctx, "oci", dir, client.ImportOptions{}); err != nil || img.Config.Labels["format"] != "oci-layout" {
		t.Errorf("OCI layout: %+v, %v", img, err)
	}
	bad := filepath.Join(t.TempDir(), "bad.tar")
	if err := os.WriteFile(bad, bytes.Repeat([]byte("no tar "), 1000), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := c.ImportPath(ctx, "bad", bad, client.ImportOptions{}); !errors.Is(err, errs.ImageCorrupt) {
		t.Errorf("corrupt tar: %v", err)
	}
	if _, err := c.ImportPath(ctx, "dir", dir, client.ImportOptions{Format: client.FormatTar}); !errors.Is(err, errs.BadRequest) {
		t.Errorf("a directory as tar: %v", err)
	}
	own := errors.New("the disk is on fire")
	if _, err := c.Import(ctx, "own", io.MultiReader(bytes.NewReader(make([]byte, 10)), failing{own}), client.ImportOptions{}); !errors.Is(err, own) {
		t.Errorf("the reader's own error: %v", err)
	}
	if l, err := c.Images(ctx); err != nil || len(l) != 3 {
		t.Errorf("images: %v, %v", l, err)
	}
	if err := c.DeleteImage(ctx, "oci"); err != nil {
		t.Error(err)
	}
	if _, err := c.Image(ctx, "oci"); !errors.Is(err, errs.ImageNotFound) {
		t.Errorf("removed image: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }
