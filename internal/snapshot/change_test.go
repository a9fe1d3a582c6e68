package snapshot_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"
	"dsec/internal/snapshot"

	"golang.org/x/sys/unix"
)

// plain is a directory of the test's own as an upper, owned by host root as it is.
type plain struct {
	t   *testing.T
	dir string
	fd  int
}

func newPlain(t *testing.T) *plain {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	p := &plain{t: t, dir: t.TempDir()}
	fd, err := unix.Open(p.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	p.fd = fd
	t.Cleanup(func() { unix.Close(fd) })
	return p
}

func (p *plain) write(path, content string) {
	p.t.Helper()
	full := filepath.Join(p.dir, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.WriteFile(full, []byte(content), 0o644)); err != nil {
		p.t.Fatal(err)
	}
}

func (p *plain) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// pack returns what is in the layer as names.
func (p *plain) pack(o snapshot.Options) (string, snapshot.Manifest) {
	p.t.Helper()
	w := &world{tb: p.t, dir: p.t.TempDir(), open: map[int]bool{}}
	var man snapshot.Manifest
	fd, _ := w.mountLayer(w.dir, func(data layer.Blob, meta io.Writer) (res layer.Result, err error) {
		o.Upper, o.Blob, o.Meta = p.fd, data, meta
		res, man, err = snapshot.Pack(p.t.Context(), o)
		return res, err
	})
	defer unix.Close(fd)
	var names []string
	for _, l := range describe(p.t, fd)[1:] {
		name, _, _ := strings.Cut(l, `" mode=`)
		names = append(names, strings.TrimPrefix(name, `"./`))
	}
	return strings.Join(names, " "), man
}

func TestLeaveOut(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		patterns, want string
		left           int64
	}{
		{"", "a a/key a/key.pem a/sub a/sub/key b b/key b/x* gone", 0},
		{"/a/key", "a a/key.pem a/sub a/sub/key b b/key b/x* gone", 1},
		{"/key", "a a/key a/key.pem a/sub a/sub/key b b/key b/x* gone", 0},
		{"key", "a a/key.pem a/sub b b/x* gone", 3},
		{"*.pem", "a a/key a/sub a/sub/key b b/key b/x* gone", 1},
		{"/*/key", "a a/key.pem a/sub a/sub/key b b/x* gone", 2},
		{"/a/**/key", "a a/key.pem a/sub b b/key b/x* gone", 2},
		{"sub/key", "a a/key a/key.pem a/sub b b/key b/x* gone", 1},
		{"/a", "b b/key b/x* gone", 1},
		{"/a/**", "a b b/key b/x* gone", 3},
		{"/a/sub/", "a a/key a/key.pem b b/key b/x* gone", 1},
		{"/a/key/", "a a/key a/key.pem a/sub a/sub/key b b/key b/x* gone", 0},
		{`/b/x\*`, "a a/key a/key.pem a/sub a/sub/key b b/key gone", 1},
		{"/gone", "a a/key a/key.pem a/sub a/sub/key b b/key b/x* gone", 0}, // what is removed stays removed
		{"/a/key b", "a a/key.pem a/sub a/sub/key gone", 2},
		{"[ab]", "gone", 2},
	} {
		p := newPlain(t)
		p.write("a/key", "1")
		p.write("a/key.pem", "2")
		p.write("a/sub/key", "3")
		p.write("b/key", "4")
		p.write("b/x*", "5")
		p.must(unix.Mknod(filepath.Join(p.dir, "gone"), unix.S_IFCHR, 0))
		got, man := p.pack(snapshot.Options{LeaveOut: strings.Fields(c.patterns)})
		if got != c.want || man.LeftOutCount != c.left || int64(len(man.LeftOut)) != c.left {
			t.Errorf("%q: got %s, %d left out\nwant %s, %d", c.patterns, got, man.LeftOutCount, c.want, c.left)
		}
	}
	for _, bad := range []string{"", "/", "**", "/**", "a/../b", "./a", "a//b", "[a", strings.Repeat("a", 5000)} {
		_, _, err := snapshot.Pack(t.Context(), snapshot.Options{LeaveOut: []string{bad}})
		if !errors.Is(err, errs.BadRequest) {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
}

// A secret is left out under all its names, and its bytes are not in the blob either.
func TestLeaveOutAllNamesOfAFile(t *testing.T) {
	t.Parallel()
	const secret = "BEGIN PRIVATE KEY"
	for _, pattern := range []string{"/m/key", "/m", "/z/key", "/z"} {
		p := newPlain(t)
		p.write("m/key", strings.Repeat(secret, 1000))
		p.write("n/other", strings.Repeat("kept", 1000))
		p.must(os.MkdirAll(filepath.Join(p.dir, "z"), 0o755))
		for _, name := range []string{"a", "n/b", "z/key"} {
			p.must(os.Link(filepath.Join(p.dir, "m/key"), filepath.Join(p.dir, name)))
		}
		var data memBlob
		o := snapshot.Options{Upper: p.fd, Blob: &data, Meta: io.Discard, LeaveOut: []string{pattern}}
		res, _, err := snapshot.Pack(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(data.b), "PRIVATE") || !strings.Contains(string(data.b), "keptkept") || int64(len(data.b)) != res.DataSize {
			t.Errorf("%s: a blob of %d bytes, of which the result says %d", pattern, len(data.b), res.DataSize)
		}
		got, man := p.pack(o)
		if strings.Contains(got, "key") || strings.Contains(got, "a ") || strings.Contains(got, "n/b") || len(man.Notes) == 0 && man.LeftOutCount < 4 {
			t.Errorf("%s: %s, %+v", pattern, got, man)
		}
	}
}

// memBlob is a blob in memory.
type memBlob struct{ b []byte }

func (m *memBlob) Write(p []byte) (int, error) { m.b = append(m.b, p...); return len(p), nil }
func (m *memBlob) ReadAt(p []byte, off int64) (int, error) {
	return copy(p, m.b[off:]), nil
}
func (m *memBlob) WriteAt(p []byte, off int64) (int, error) { return copy(m.b[off:], p), nil }
func (m *memBlob) Truncate(n int64) error                   { m.b = m.b[:n]; return nil }

func TestWhatThePlatformPutsInIsLeftOut(t *testing.T) {
	t.Parallel()
	platform := snapshot.Platform{
		Files:       map[string][]byte{"/etc/hostname": []byte("box\n"), "/etc/hosts": []byte("hosts"), "/etc/resolv.conf": nil},
		Dirs:        map[string]uint32{"/etc": 0o755},
		MountPoints: []string{"/proc", "/sys", "/dev"},
	}
	for _, c := range []struct {
		name, want string
		change     func(p *plain)
	}{
		{"nothing", "", func(*plain) {}},
		{"a content", "etc etc/hosts", func(p *plain) { p.write("etc/hosts", "Hosts") }},
		{"a mode", "etc etc/hosts", func(p *plain) { p.must(os.Chmod(p.dir+"/etc/hosts", 0o600)) }},
		{"an owner", "etc etc/hosts", func(p *plain) { p.must(os.Chown(p.dir+"/etc/hosts", 1, 0)) }},
		{"an xattr", "etc etc/hosts", func(p *plain) { p.must(unix.Setxattr(p.dir+"/etc/hosts", "user.a", nil, 0)) }},
		{"a type", "etc etc/hosts", func(p *plain) {
			p.must(errors.Join(os.Remove(p.dir+"/etc/hosts"), os.Symlink("hostname", p.dir+"/etc/hosts")))
		}},
		{"another file", "etc etc/passwd", func(p *plain) { p.write("etc/passwd", "") }},
		{"another name", "copy", func(p *plain) { p.must(os.Rename(p.dir+"/etc/hosts", p.dir+"/copy")) }},
		{"a second name", "copy etc etc/hosts", func(p *plain) { p.must(os.Link(p.dir+"/etc/hosts", p.dir+"/copy")) }},
		{"a whiteout", "etc etc/hosts", func(p *plain) {
			p.must(errors.Join(os.Remove(p.dir+"/etc/hosts"), unix.Mknod(p.dir+"/etc/hosts", unix.S_IFCHR, 0)))
		}},
		{"the directory's mode", "etc", func(p *plain) { p.must(os.Chmod(p.dir+"/etc", 0o700)) }},
		{"the directory hides", "etc", func(p *plain) { p.must(unix.Setxattr(p.dir+"/etc", "trusted.overlay.opaque", []byte("y"), 0)) }},
		{"a made mount point", "", func(p *plain) { p.must(unix.Setxattr(p.dir+"/proc", "trusted.overlay.opaque", []byte("y"), 0)) }},
		{"a mount point's content", "dev dev/x", func(p *plain) { p.write("dev/x", "") }},
	} {
		p := newPlain(t)
		p.write("etc/hostname", "box\n")
		p.write("etc/hosts", "hosts")
		p.write("etc/resolv.conf", "")
		for _, d := range []string{"proc", "sys", "dev"} {
			p.must(os.Mkdir(filepath.Join(p.dir, d), 0o755))
		}
		c.change(p)
		if got, man := p.pack(snapshot.Options{Platform: platform}); got != c.want || man.LeftOutCount != 0 {
			t.Errorf("%s: got %q, want %q; %+v", c.name, got, c.want, man)
		}
	}
}

// What only a real sandbox makes right, read back in a real sandbox.
func TestAttributesOfASandbox(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.chain()
	o := s.overlay()
	capability := []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	o.mustDo(put("ping"), op{Do: "cap", Path: []byte("ping")},
		op{Do: "cap", Path: []byte("a/base")}, // copied up
		put("acl"), op{Do: "acl", Path: []byte("acl"), UID: 1234, GID: 65535},
		op{Do: "defacl", Path: []byte("a"), UID: 7, GID: 8},
		put("su"), op{Do: "chown", Path: []byte("su"), UID: 1000, GID: 50}, op{Do: "chmod", Path: []byte("su"), Mode: 0o6755},
		op{Do: "chmod", Path: []byte("x/base"), Mode: 0o1600}, // metadata only
		op{Do: "times", Path: []byte("a/b/c"), Sec: 1_234_567_890, Nsec: 123_456_789},
		op{Do: "setxattr", Path: []byte("x"), Key: "user.note", Value: []byte("v")},
		op{Do: "mksock", Path: []byte("sock"), Mode: 0o600}, op{Do: "mkfifo", Path: []byte("fifo"), Mode: 0o600},
		op{Do: "create", Path: []byte("sparse"), N: 10, Mode: 0o600}, op{Do: "write", Path: []byte("sparse"), N: 10, Off: 40 << 30},
		mkdir("x\xff\xfe"), put("x\xff\xfe/\xfd"))
	if e := o.do(op{Do: "mknod", Path: []byte("null"), N: 0x103}, op{Do: "mknod", Path: []byte("white"), N: 0}); e[0] == "" || e[1] == "" {
		t.Errorf("a sandbox can make devices: %q", e)
	}
	fd, l, man := o.pack(snapshot.Options{})
	o.close()
	if len(man.Notes) > 0 || man.Special != 2 {
		t.Errorf("%+v", man)
	}
	// In the layer, ids begin at 0 and the root of the sandbox is root.
	in := strings.Join(describe(t, fd), "\n")
	if !strings.Contains(in, fmt.Sprintf("security.capability=%x", capability)) || strings.Contains(in, fmt.Sprint(w.first/rangeSize)) {
		t.Errorf("the layer:\n%s", in)
	}
	top := s.push(fd, l)
	for _, s := range []*stack{top, top.flatten(0, 2)} {
		o := s.overlay()
		o.mustDo(op{Do: "getxattr", Path: []byte("ping"), Key: "security.capability", Value: capability},
			op{Do: "getxattr", Path: []byte("a/base"), Key: "security.capability", Value: capability},
			op{Do: "getxattr", Path: []byte("acl"), Key: "system.posix_acl_access", Value: acl(1234, 65535)},
			op{Do: "getxattr", Path: []byte("a"), Key: "system.posix_acl_default", Value: acl(7, 8)},
			op{Do: "getxattr", Path: []byte("x"), Key: "user.note", Value: []byte("v")},
			op{Do: "read", Path: []byte("x\xff\xfe/\xfd"), Value: pattern(10, 5)},
			op{Do: "write", Path: []byte("ping"), N: 5}) // copies it up again
		all := strings.Join(describe(t, o.root), "\n")
		for _, want := range []string{
			fmt.Sprintf(`"./su" mode=106755 uid=%d gid=%d`, w.first+1000, w.first+50), `"./x/base" mode=101600`, `mtime=1234567890.123456789`,
			`"./sock" mode=140600`, `"./fifo" mode=10600`, fmt.Sprintf("size=%d", 40<<30+10),
		} {
			if !strings.Contains(all, want) {
				t.Errorf("no %s in\n%s", want, all)
			}
		}
		o.close()
	}
	if l.DataSize > 4<<20 { // in units of 1 MiB, as large as it is
		t.Errorf("a sparse file takes %d bytes", l.DataSize)
	}
}

func TestMetacopyIsRefused(t *testing.T) {
	t.Parallel()
	p := newPlain(t)
	p.write("f", "")
	p.must(unix.Setxattr(p.dir+"/f", "trusted.overlay.metacopy", nil, 0))
	_, _, err := snapshot.Pack(t.Context(), snapshot.Options{Upper: p.fd, Blob: &discard{}, Meta: io.Discard})
	if !errors.Is(err, errs.NotSupported) || !strings.Contains(err.Error(), "metacopy") || errs.Of(err).Details["path"] != "/f" {
		t.Errorf("got %v", err)
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	p := newPlain(t)
	p.write("a", strings.Repeat("x", 1<<20))
	p.must(os.Truncate(p.dir+"/a", 1<<30))
	for name, l := range map[string]snapshot.Limits{"entries": {Entries: 1}, "bytes": {Bytes: 1 << 20}, "data": {Data: 1 << 19}} {
		if name == "entries" {
			p.write("b", "")
		}
		_, _, err := snapshot.Pack(t.Context(), snapshot.Options{Upper: p.fd, Blob: &discard{}, Meta: io.Discard, Limits: l})
		if !errors.Is(err, errs.BodyTooLarge) {
			t.Errorf("%s: %v", name, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := snapshot.Pack(ctx, snapshot.Options{Upper: p.fd, Blob: &discard{}, Meta: io.Discard}); !errors.Is(err, errs.RequestCanceled) {
		t.Errorf("canceled: %v", err)
	}
}

// A tree deeper than any path, and than descriptors there are, packs, flattens and mounts.
func TestVeryDeepTrees(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const depth = 6000
	s := w.chain()
	o := s.overlay()
	o.mustDo(op{Do: "deep", Path: []byte("d"), N: depth}, put("after"))
	start := time.Now()
	fd, l, man := o.pack(snapshot.Options{LeaveOut: []string{"*.pem", "/a/**/b"}})
	t.Logf("packed in %v", time.Since(start))
	if man.Dirs != depth {
		t.Errorf("%+v", man)
	}
	o.close()
	s = s.push(fd, l)
	for _, s := range []*stack{s, s.flatten(0, 2), s.flatten(1, 2)} {
		at := s.mounts[len(s.mounts)-1]
		own := -1
		for i := range depth + 1 {
			name := "d"
			if i == depth {
				name = "bottom"
			}
			next, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if own >= 0 {
				unix.Close(own)
			}
			if own = next; err != nil {
				t.Fatalf("level %d: %v", i, err)
			}
			at = own
		}
		buf := make([]byte, 10)
		if n, err := unix.Read(own, buf); err != nil || string(buf[:n]) != "here" {
			t.Errorf("%q, %v", buf[:n], err)
		}
		unix.Close(own)
	}
}

// Programs that write, delete, rename and swap links while nothing is frozen lead to a layer
// or to a typed, retryable error, and never out of the upper.
func TestPackWhileProgramsRun(t *testing.T) {
	t.Parallel()
	p := newPlain(t)
	outside := t.TempDir()
	const secret = "secret of the host"
	for i := range 20 {
		p.must(os.WriteFile(filepath.Join(outside, fmt.Sprint(i)), []byte(strings.Repeat(secret, 300)), 0o644))
	}
	for d := range 4 {
		for i := range 20 {
			p.write(fmt.Sprintf("%d/%d", d, i), strings.Repeat("mine", 2000))
		}
	}
	var stop sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	for g := range 3 {
		stop.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				d := filepath.Join(p.dir, fmt.Sprint(i%4))
				f := filepath.Join(d, fmt.Sprint(i%20))
				switch (i + g) % 5 {
				case 0: // a directory becomes a link out, and back
					if os.Rename(d, d+"x") == nil {
						_ = os.Symlink(outside, d)
						runtime.Gosched()
						_ = os.Remove(d)
						_ = os.Rename(d+"x", d)
					}
				case 1:
					_ = os.Remove(f)
					_ = os.Symlink(filepath.Join(outside, fmt.Sprint(i%20)), f)
				case 2:
					_ = os.Remove(f)
					if fd, err := unix.Open(f, unix.O_CREAT|unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644); err == nil { // a fifo would wait
						_, _ = unix.Write(fd, []byte(strings.Repeat("mine", i%3000)))
						unix.Close(fd)
					}
				case 3:
					_ = os.Truncate(f+"0", int64(i%9000))
				case 4:
					_ = os.Remove(f)
					_ = unix.Mkfifo(f, 0o600)
				}
			}
		})
	}
	packs, conflicts := 0, 0
	for ctx.Err() == nil {
		var data memBlob
		var meta memBlob
		_, _, err := snapshot.Pack(t.Context(), snapshot.Options{Upper: p.fd, Blob: &data, Meta: &meta})
		switch {
		case err == nil:
			packs++
		case errors.Is(err, errs.StateConflict) && errs.Of(err).Retryable:
			conflicts++
		default:
			t.Errorf("got %v", err)
		}
		if strings.Contains(string(data.b)+string(meta.b), secret) {
			t.Fatal("the host's files were read")
		}
	}
	stop.Wait()
	t.Logf("%d packs, %d conflicts", packs, conflicts)
	if packs+conflicts == 0 {
		t.Error("nothing was tried")
	}
}

// The same upper gives the same bytes, whatever order its directory has.
func TestPackIsDeterministic(t *testing.T) {
	t.Parallel()
	p, q := newPlain(t), newPlain(t)
	stamp := unix.Timespec{Sec: 1}
	for i := range 200 {
		p.write(fmt.Sprint(i), fmt.Sprint(i))
		q.write(fmt.Sprint(199-i), fmt.Sprint(199-i))
	}
	var results [2]layer.Result
	for n, x := range []*plain{p, q} {
		for i := range 200 {
			x.must(unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(x.dir, fmt.Sprint(i)), []unix.Timespec{stamp, stamp}, 0))
		}
		x.must(unix.UtimesNanoAt(unix.AT_FDCWD, x.dir, []unix.Timespec{stamp, stamp}, 0))
		var err error
		results[n], _, err = snapshot.Pack(t.Context(), snapshot.Options{Upper: x.fd, Blob: &discard{}, Meta: io.Discard})
		x.must(err)
	}
	if results[0] != results[1] {
		t.Errorf("%+v", results)
	}
}
