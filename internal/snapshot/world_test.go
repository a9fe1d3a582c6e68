package snapshot_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"dsec/internal/backend/container/mount"
	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/snapshot"

	"golang.org/x/sys/unix"
)

// These tests need root: overlays are real, and so is the user namespace that changes them.

const agentEnv = "SNAPSHOT_TEST_AGENT"

func TestMain(m *testing.M) {
	switch os.Getenv(agentEnv) {
	case "":
		os.Exit(m.Run())
	case "agent":
		runAgent(os.NewFile(4, "ops"))
	}
}

// tb is what *testing.T and *rapid.T share.
type tb interface {
	Helper()
	Fatalf(format string, args ...any)
	Fatal(args ...any)
	Errorf(format string, args ...any)
	Logf(format string, args ...any)
}

const rangeSize = 1 << 16

var nextRange atomic.Uint32

// world is a sandbox's surroundings: a range of ids, a user namespace, and a process in it
// that does what it is told in an overlay.
type world struct {
	tb     testing.TB
	first  uint32
	dir    string
	userns int
	ops    *os.File
	n      int
	open   map[int]bool // mounts
}

func newWorld(t testing.TB) *world {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	w := &world{tb: t, first: 3_000_000_000 + nextRange.Add(1)*rangeSize, dir: t.TempDir(), open: map[int]bool{}}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	w.must(err)
	w.ops = os.NewFile(uintptr(pair[0]), "ops")
	theirs := os.NewFile(uintptr(pair[1]), "ops")
	self, err := os.Open("/proc/self/exe")
	w.must(err)
	cmd := exec.Command("/proc/self/fd/3")
	cmd.Args = []string{"agent"}
	cmd.Env = append(os.Environ(), agentEnv+"=agent", "GOCOVERDIR=")
	cmd.ExtraFiles = []*os.File{self, theirs}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 syscall.CLONE_NEWUSER,
		UidMappings:                []syscall.SysProcIDMap{{HostID: int(w.first), Size: rangeSize}},
		GidMappings:                []syscall.SysProcIDMap{{HostID: int(w.first), Size: rangeSize}},
		GidMappingsEnableSetgroups: true,
		Credential:                 &syscall.Credential{},
		Pdeathsig:                  syscall.SIGKILL,
	}
	w.must(cmd.Start())
	self.Close()
	theirs.Close()
	w.userns, err = unix.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	w.must(err)
	t.Cleanup(func() {
		w.ops.Close()
		cmd.Wait()
		unix.Close(w.userns)
		for fd := range w.open {
			unix.Close(fd)
		}
	})
	return w
}

// unmount lets go of a layer before the test ends.
func (w *world) unmount(fd int) {
	if w.open[fd] {
		delete(w.open, fd)
		unix.Close(fd)
	}
}

func (w *world) must(err error) {
	w.tb.Helper()
	if err != nil {
		w.tb.Fatal(err)
	}
}

func (w *world) path(name string) string {
	w.n++
	return filepath.Join(w.dir, name+strconv.Itoa(w.n))
}

// stack is layers, lowest first, mounted.
type stack struct {
	w      *world
	mounts []int
	layers []image.Layer
}

func (w *world) stack() *stack { return &stack{w: w} }

func (s *stack) close() {
	for _, m := range s.mounts {
		s.w.unmount(m)
	}
}

func (s *stack) push(m int, l image.Layer) *stack {
	return &stack{s.w, append(s.mounts[:len(s.mounts):len(s.mounts)], m), append(s.layers[:len(s.layers):len(s.layers)], l)}
}

// lowers are idmapped clones, highest first.
func (s *stack) lowers() (fds []int, done func()) {
	for i := len(s.mounts) - 1; i >= 0; i-- {
		fd, err := mount.Idmapped(s.mounts[i], s.w.userns)
		s.w.must(err)
		fds = append(fds, fd)
	}
	return fds, func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
}

// view is what the layers show; the caller closes it.
func (s *stack) view() int {
	fds, done := s.lowers()
	defer done()
	if len(fds) == 1 { // Compose gives a layer's clone; keep to overlays, whose inodes look alike
		fds = append(fds, s.w.emptyLower())
		defer unix.Close(fds[1])
	}
	fd, err := snapshot.Compose(s.w.tb.Context(), fds)
	s.w.must(err)
	return fd
}

func (w *world) emptyLower() int {
	dir := w.path("empty")
	w.must(os.Mkdir(dir, 0o755))
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	w.must(err)
	return fd
}

// build makes and mounts a layer.
func (w *world) build(fill func(b *layer.Builder) error) (int, image.Layer) {
	dir := w.path("layer")
	w.must(os.Mkdir(dir, 0o700))
	return w.mountLayer(dir, func(data layer.Blob, meta io.Writer) (layer.Result, error) {
		b := layer.NewBuilder(data, layer.Options{})
		if err := fill(b); err != nil {
			return layer.Result{}, err
		}
		return b.Finish(meta)
	})
}

// mountLayer has mk write a layer's blobs in dir, and mounts them.
func (w *world) mountLayer(dir string, mk func(data layer.Blob, meta io.Writer) (layer.Result, error)) (int, image.Layer) {
	w.tb.Helper()
	f := image.LayerFiles{Meta: filepath.Join(dir, "meta"), Data: filepath.Join(dir, "data")}
	data, err := os.Create(f.Data)
	w.must(err)
	defer data.Close()
	meta, err := os.Create(f.Meta)
	w.must(err)
	defer meta.Close()
	res, err := mk(data, meta)
	w.must(err)
	checkResult(w.tb, f, res)
	if res.DataSize == 0 {
		f.Data = ""
	}
	fd, err := image.Mount(w.tb.Context(), f)
	w.must(err)
	w.open[fd] = true
	return fd, image.Layer{MetaDigest: res.MetaDigest, MetaSize: res.MetaSize, DataDigest: res.DataDigest, DataSize: res.DataSize}
}

// checkResult compares what a build says of its blobs with the files.
func checkResult(t testing.TB, f image.LayerFiles, res layer.Result) {
	t.Helper()
	for _, b := range []struct {
		path, digest string
		size         int64
	}{{f.Meta, res.MetaDigest, res.MetaSize}, {f.Data, res.DataDigest, res.DataSize}} {
		in, err := os.Open(b.path)
		if err != nil {
			t.Fatal(err)
		}
		h := sha256.New()
		n, err := io.Copy(h, in)
		in.Close()
		if err != nil || n != b.size || n > 0 && hex.EncodeToString(h.Sum(nil)) != b.digest {
			t.Fatalf("%s: %d bytes, %v; the result says %+v", b.path, n, err, res)
		}
	}
}

// overlay is a sandbox's root.
type overlay struct {
	w     *world
	dir   string
	root  int
	upper int
}

// overlay mounts one on the stack, as the container backend does.
func (s *stack) overlay() *overlay {
	w := s.w
	o := &overlay{w: w, dir: w.path("sandbox")}
	w.must(os.Mkdir(o.dir, 0o755))
	for _, d := range []string{"upper", "work"} {
		w.must(os.Mkdir(filepath.Join(o.dir, d), 0o755))
		w.must(os.Chown(filepath.Join(o.dir, d), int(w.first), int(w.first)))
	}
	dir, err := mount.Detached(o.dir)
	w.must(err)
	defer unix.Close(dir)
	o.upper, err = unix.Openat(dir, "upper", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	w.must(err)
	work, err := unix.Openat(dir, "work", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	w.must(err)
	defer unix.Close(work)
	lowers, done := s.lowers()
	defer done()
	o.root, err = mount.Overlay(lowers, o.upper, work)
	w.must(err)
	return o
}

func (o *overlay) close() {
	unix.Close(o.root)
	unix.Close(o.upper)
	o.w.send(nil, -1) // the agent leaves it
	os.RemoveAll(o.dir)
}

// ids are those of the sandbox; a world without a user namespace has the host's.
func (w *world) ids() snapshot.IDs {
	if w.first == 0 {
		return snapshot.IDs{}
	}
	return snapshot.IDs{First: w.first, Count: rangeSize}
}

// pack packs the overlay and mounts the layer.
func (o *overlay) pack(opts snapshot.Options) (int, image.Layer, snapshot.Manifest) {
	o.w.tb.Helper()
	var man snapshot.Manifest
	dir := o.w.path("diff")
	o.w.must(os.Mkdir(dir, 0o700))
	fd, l := o.w.mountLayer(dir, func(data layer.Blob, meta io.Writer) (res layer.Result, err error) {
		opts.Upper, opts.Blob, opts.Meta, opts.IDs = o.upper, data, meta, o.w.ids()
		res, man, err = snapshot.Pack(o.w.tb.Context(), opts)
		return res, err
	})
	return fd, l, man
}

// flatten merges the layers from, to (exclusive) of s.
func (s *stack) flatten(from, to int) *stack {
	s.w.tb.Helper()
	dir := s.w.path("flat")
	s.w.must(os.Mkdir(dir, 0o700))
	fd, l := s.w.mountLayer(dir, func(data layer.Blob, meta io.Writer) (layer.Result, error) {
		res, _, err := snapshot.Flatten(s.w.tb.Context(), snapshot.FlattenOptions{Layers: s.mounts[from:to], Bottom: from == 0, Blob: data, Meta: meta})
		return res, err
	})
	out := s.w.stack()
	for i := range from {
		out = out.push(s.mounts[i], s.layers[i])
	}
	out = out.push(fd, l)
	for i := to; i < len(s.mounts); i++ {
		out = out.push(s.mounts[i], s.layers[i])
	}
	return out
}

// describe lists what the mount shows. It keeps the mount.
func describe(t tb, root int) []string {
	t.Helper()
	fd, err := unix.FcntlInt(uintptr(root), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		var lines []string
		if lines, err = imagetest.DescribeFD(fd); err == nil {
			return lines
		}
	}
	t.Fatalf("describe: %v", err)
	return nil
}

// withoutLinks takes link counts out of a description.
func withoutLinks(lines []string) []string {
	out := make([]string, len(lines))
	for i, l := range lines {
		before, after, ok := strings.Cut(l, " nlink=")
		if ok {
			_, after, _ = strings.Cut(after, " ")
			l = before + " " + after
		}
		out[i] = l
	}
	return out
}

// withoutInodes takes out which names are one file: an overlay may give the names of a file
// that it copied up different inode numbers (which it does depends on what is cached).
func withoutInodes(lines []string) []string {
	out := make([]string, len(lines))
	for i, l := range lines {
		if at := strings.Index(l, ` same="`); at >= 0 {
			q := must(strconv.QuotedPrefix(l[at+len(` same=`):]))(nil)
			l = l[:at] + l[at+len(` same=`)+len(q):]
		}
		out[i] = l
	}
	return out
}

// links are the names of files that have several, whiteouts not counted.
func links(lines []string) (out []string) {
	for _, l := range lines {
		if strings.Contains(l, ` same="`) && !strings.Contains(l, " rdev=0:0") {
			name := must(strconv.QuotedPrefix(l))(nil)
			same := l[strings.Index(l, ` same="`)+len(` same=`):]
			out = append(out, name+" is "+must(strconv.QuotedPrefix(same))(nil))
		}
	}
	return out
}

// tarOf is what tar makes of the mount, one line for each member.
func tarOf(t tb, root int) []string {
	t.Helper()
	f := os.NewFile(uintptr(must(unix.FcntlInt(uintptr(root), unix.F_DUPFD_CLOEXEC, 0))(t)), "root")
	defer f.Close()
	cmd := exec.Command("tar", "-C", "/proc/self/fd/3", "--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner", "--sort=name",
		"--format=posix", "--pax-option=delete=atime,delete=ctime", "-cf", "-", ".")
	cmd.ExtraFiles = []*os.File{f}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out := must(cmd.StdoutPipe())(t)
	if err := cmd.Start(); err != nil {
		t.Fatalf("tar: %v", err)
	}
	var lines []string
	tr := tar.NewReader(bufio.NewReaderSize(out, 1<<20))
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("read tar: %v", err)
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, tr); err != nil {
			t.Fatalf("read tar: %v", err)
		}
		var xs []string
		for k, v := range h.PAXRecords {
			xs = append(xs, fmt.Sprintf("%s=%q", k, v))
		}
		sort.Strings(xs)
		lines = append(lines, fmt.Sprintf("%q %c %o %d:%d %d %v %d:%d %q %q %x", h.Name, h.Typeflag, h.Mode, h.Uid, h.Gid, h.Size, h.ModTime.UnixNano(), h.Devmajor, h.Devminor, h.Linkname, xs, sum.Sum(nil)))
	}
	_, _ = io.Copy(io.Discard, out)
	err := cmd.Wait()
	for l := range strings.Lines(stderr.String()) {
		if !strings.Contains(l, "socket ignored") {
			t.Errorf("tar: %s", l)
		}
	}
	if err != nil {
		t.Fatalf("tar: %v\n%s", err, stderr.String())
	}
	return lines
}

func must[T any](v T, err error) func(tb) T {
	return func(t tb) T {
		if err != nil {
			t.Fatalf("%v", err)
		}
		return v
	}
}

// op is one thing that the agent does. Paths come from the tree as it is then: A and B choose
// among the existing ones, Name is a new one. A negative choice means Path.
type op struct {
	Do         string
	A, B       int
	Path, To   []byte
	Name       []byte
	N          int64
	Off        int64
	Mode       uint32
	UID, GID   int
	Key        string
	Value      []byte
	Sec, Nsec  int64
	Repeat     int
	RepeatBase int
}

// do has the agent do ops in the overlay and returns the error of each, "" for none.
func (o *overlay) do(ops ...op) []string {
	o.w.tb.Helper()
	return o.w.send(ops, o.root)
}

// mustDo is do of what has to work.
func (o *overlay) mustDo(ops ...op) {
	o.w.tb.Helper()
	for i, e := range o.do(ops...) {
		if e != "" {
			o.w.tb.Fatalf("%s %q: %s", ops[i].Do, ops[i].Path, e)
		}
	}
}

func (w *world) send(ops []op, root int) []string {
	w.tb.Helper()
	body, err := json.Marshal(ops)
	w.must(err)
	head := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	fd := root
	if fd < 0 {
		fd = int(w.ops.Fd())
		head[0] |= 0x80 // leave: the root is whatever it was at the start
	}
	w.must(unix.Sendmsg(int(w.ops.Fd()), head, unix.UnixRights(fd), nil, 0))
	_, err = w.ops.Write(body)
	w.must(err)
	size := make([]byte, 4)
	_, err = io.ReadFull(w.ops, size)
	w.must(err)
	answer := make([]byte, binary.BigEndian.Uint32(size))
	_, err = io.ReadFull(w.ops, answer)
	w.must(err)
	var out []string
	w.must(json.Unmarshal(answer, &out))
	return out
}

// runAgent serves ops: it is a process in the sandbox's user namespace.
func runAgent(conn *os.File) {
	die := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "agent:", err)
			os.Exit(1)
		}
	}
	unix.CloseOnExec(3)
	old, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	die(err)
	unix.Umask(0)
	r := bufio.NewReader(conn)
	for {
		head, oob := make([]byte, 4), make([]byte, unix.CmsgSpace(4))
		n, oobn, _, _, err := unix.Recvmsg(int(conn.Fd()), head, oob, unix.MSG_WAITALL|unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if n == 0 || err != nil {
			return
		}
		msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
		die(err)
		fds, err := unix.ParseUnixRights(&msgs[0])
		die(err)
		to := fds[0]
		if head[0]&0x80 != 0 {
			to = old
			head[0] &^= 0x80
		}
		body := make([]byte, binary.BigEndian.Uint32(head))
		_, err = io.ReadFull(r, body)
		die(err)
		die(unix.Fchdir(to))
		die(unix.Chroot("."))
		unix.Close(fds[0])
		var ops []op
		die(json.Unmarshal(body, &ops))
		out := make([]string, len(ops))
		for i, o := range ops {
			if err := o.run(); err != nil {
				out[i] = err.Error()
			}
		}
		answer, err := json.Marshal(out)
		die(err)
		_, err = conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(answer))), answer...))
		die(err)
	}
}
