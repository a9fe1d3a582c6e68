package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/backend/backendtest"
	"dsec/internal/backend/container/scratch"
	"dsec/internal/guest/bin"
	"dsec/internal/image"
	"dsec/internal/swap"

	"golang.org/x/sys/unix"
)

// These tests need root, and busybox-static for their image; nothing of them is skipped.

// layers serves one mounted directory image.
type layers struct{ fd int }

func (l layers) Acquire(context.Context, *v1.Image) ([]int, func(), error) {
	return []int{l.fd}, func() {}, nil
}

// node is a directory and an image that backends can be opened on.
type node struct {
	dir, writable, group string
	layers               layers
	swapDir              string
	swap                 *swap.Space
}

// swapBytes is the size of a node's swap.
const swapBytes = 768 << 20

var groups atomic.Int64

func newNode(t testing.TB) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{dir: filepath.Join(dir, "container"), group: fmt.Sprintf("dsectest%d-%d", os.Getpid(), groups.Add(1))}
	var err error
	if n.writable, err = scratch.Mount(t.Context(), dir, 512<<20); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		var err error
		for range 100 { // mounts of dead sandboxes go away in the background
			if err = errors.Join(scratch.Unmount(dir), scratch.Remove(dir)); err == nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Errorf("scratch is still in use: %v", err)
	})
	n.layers.fd = busybox(t, dir)
	n.swapDir = filepath.Join(dir, "swap")
	if n.swap, err = swap.New(swap.Config{Dir: n.swapDir, Option: swap.Option{Kind: swap.File, Bytes: swapBytes}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.swap.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		b := n.open(t)
		if err := b.Withdraw(); err != nil {
			t.Error(err)
		}
		b.Close()
	})
	return n
}

// busybox makes and mounts a small image.
func busybox(t testing.TB, dir string) int {
	t.Helper()
	root := filepath.Join(dir, "busybox")
	for _, d := range []string{"bin", "etc", "tmp", "root", "home/user"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write := func(name, content string, mode os.FileMode) {
		if err := os.WriteFile(filepath.Join(root, name), []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	write("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n", 0o644)
	write("etc/group", "root:x:0:\nuser:x:1000:\n", 0o644)
	if err := os.Chown(filepath.Join(root, "home/user"), 1000, 1000); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatalf("package busybox-static: %v", err)
	}
	write("bin/busybox", string(data), 0o755)
	out, err := exec.Command("/bin/busybox", "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range strings.Fields(string(out)) {
		if name != "busybox" {
			if err := os.Symlink("busybox", filepath.Join(root, "bin", name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, program := range []string{"attack", "memory"} {
		if out, err := exec.Command("gcc", "-static", "-O1", "-o", filepath.Join(root, "bin", program), "testdata/"+program+".c").CombinedOutput(); err != nil {
			t.Fatalf("packages gcc, libc6-dev: %v: %s", err, out)
		}
	}
	if err := unix.Mknod(filepath.Join(root, "zero"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))); err != nil {
		t.Fatal(err)
	}
	meta := filepath.Join(dir, "busybox.erofs")
	if out, err := exec.Command("mkfs.erofs", "-T0", meta, root).CombinedOutput(); err != nil {
		t.Fatalf("package erofs-utils: %v: %s", err, out)
	}
	fd, err := image.Mount(t.Context(), image.LayerFiles{Meta: meta})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.NewFile(uintptr(fd), "layer").Close() })
	return fd
}

func (n *node) open(t testing.TB) *Backend {
	t.Helper()
	guest, err := bin.Guest()
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(Config{Dir: n.dir, Writable: n.writable, Guest: guest, CgroupRoot: "/sys/fs/cgroup", CgroupName: n.group, Layers: n.layers, FirstID: 1 << 20, Swap: n.swap})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func spec(id string) backend.Spec {
	s := v1.Spec{Backend: v1.BackendContainer, Image: "busybox", MemoryBytes: 128 << 20}
	s.SetDefaults()
	return backend.Spec{ID: id, Generation: 1, Sandbox: s, Image: &v1.Image{Config: v1.ImageConfig{Env: []string{"FROM_IMAGE=1", "BOTH=image"}}}}
}

func TestConformance(t *testing.T) {
	backendtest.Run(t, func(t *testing.T) backendtest.Subject {
		n := newNode(t)
		return backendtest.Subject{
			Open: func(t *testing.T) backend.Backend { return n.open(t) },
			Spec: spec,
			Broken: map[string]func(string) backend.Spec{
				"no image": func(id string) backend.Spec { s := spec(id); s.Image = nil; return s },
				"too little memory": func(id string) backend.Spec {
					s := spec(id)
					s.Sandbox.MemoryBytes = 64 << 10
					return s
				},
				"too few processes": func(id string) backend.Spec { s := spec(id); s.Sandbox.PIDs = 1; return s },
			},
		}
	})
}

// box is one running sandbox.
type box struct {
	t testing.TB
	*aether.Conn
	backend.Instance
}

func newBox(t *testing.T, change func(*backend.Spec)) *box {
	t.Helper()
	b := newNode(t).open(t)
	t.Cleanup(func() { b.Close() })
	return boxOn(t, b, change)
}

// boxOn makes a sandbox on a node of which there may be more.
func boxOn(t testing.TB, b *Backend, change func(*backend.Spec)) *box {
	t.Helper()
	s := spec(v1.SandboxID("testaa", 1, uint64(groups.Add(1))))
	if change != nil {
		change(&s)
	}
	i, err := b.Create(t.Context(), s, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Delete(context.Background(), s.ID); err != nil {
			t.Error(err)
		}
	})
	conn, err := i.DialGuest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c, err := aether.NewClient(t.Context(), conn, aether.ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &box{t, c, i}
}

// sh runs a script and returns its output and exit code.
func (b *box) sh(script string) (string, int) {
	b.t.Helper()
	return b.run(&msg.StartRequest{Cmd: "sh", Args: []string{"-c", script}})
}

func (b *box) run(start *msg.StartRequest) (string, int) {
	b.t.Helper()
	var r msg.ExecResult
	if err := b.Call(b.t.Context(), "", "process.exec", &msg.ExecRequest{Start: start}, &r); err != nil {
		b.t.Fatalf("exec: %v", err)
	}
	return strings.TrimSpace(string(r.Stdout) + string(r.Stderr)), int(r.Exit.ExitCode)
}

func TestWhatASandboxLooksLike(t *testing.T) {
	t.Parallel()
	b := newBox(t, func(s *backend.Spec) {
		s.Sandbox.Hostname = "myhost"
		s.Sandbox.Env = map[string]string{"BOTH": "spec"}
	})
	for _, c := range []struct{ what, script, want string }{
		{"root is the sandbox's root user", "id -u", "0"},
		{"host name", "hostname; cat /etc/hostname", "myhost\nmyhost"},
		{"own name resolves", "ping -c1 -W1 myhost >/dev/null 2>&1; grep -c myhost /etc/hosts", "1"},
		{"loopback is up", "ping -c1 -W2 127.0.0.1 | grep -c '1 packets received'", "1"},
		{"no other interface", "ls /sys/class/net", "lo"},
		{"PID 1 is the guest", "cat /proc/1/comm", "dsec-guest"},
		{"environment", "echo $FROM_IMAGE $BOTH", "1 spec"},
		{"owners look right", "stat -c '%u %g' /bin/busybox /home/user | tr '\\n' ' '", "0 0 1000 1000"},
		{"devices work", "echo x >/dev/null && head -c3 /dev/zero | wc -c && head -c4 /dev/urandom | wc -c", "3\n4"},
		{"shared memory", "echo hi >/dev/shm/a && cat /dev/shm/a", "hi"},
		{"descriptors", "ls -l /dev/fd | grep -c /proc/self/fd; echo err >/dev/stderr", "1\nerr"},
		{"terminals", "ls /dev/pts/ptmx && [ -c /dev/ptmx ] && echo ok", "/dev/pts/ptmx\nok"},
		{"proc is this sandbox's", "ls -d /proc/[0-9]* | wc -l | { read n; [ $n -lt 10 ] && echo few; }", "few"},
		{"proc can be written where it is the process's own", "echo 500 >/proc/self/oom_score_adj && cat /proc/self/oom_score_adj; hostname other && hostname && hostname myhost", "500\nother"},
		{"the image is writable", "echo x >/bin/new && cat /bin/new && rm /bin/busybox2 2>/dev/null; mv /home /house && ls -d /house/user", "x\n/house/user"},
		{"files of users", "su user -c 'touch /tmp/x; stat -c %u /tmp/x'", "1000"},
		{"umask", "umask", "0022"},
		{"timers are as exact as anywhere", "cat /proc/self/timerslack_ns", "50000"},
		{"/sys is there to look at", "cat /sys/class/net/lo/operstate; touch /sys/x 2>/dev/null || echo read-only; awk '$5 == \"/sys\" {print substr($6, 1, 2)}' /proc/self/mountinfo", "unknown\nread-only\nro"},
		{"programs are killed before PID 1", "cat /proc/self/oom_score_adj; sleep 0.1; cat /proc/1/oom_score_adj", "300\n0"},
		{"signals are at their defaults", "grep -E 'Sig(Blk|Ign)' /proc/self/status | awk '{print $2}' | tr '\\n' ' '", "0000000000000000 0000000000000000"},
	} {
		if c.what == "files of users" {
			b.sh("chmod 1777 /tmp")
		}
		if got, _ := b.sh(c.script); got != c.want {
			t.Errorf("%s: %q gave %q, want %q", c.what, c.script, got, c.want)
		}
	}
}

// What is mounted in a sandbox says nothing of where the node keeps its files.
func TestMountsHideTheHost(t *testing.T) {
	t.Parallel()
	b := newBox(t, nil)
	out, _ := b.sh("cat /proc/self/mountinfo; cat /proc/self/mounts; cat /proc/self/mountstats")
	if !strings.Contains(out, "upperdir=/"+b.ID()+"/upper,workdir=/"+b.ID()+"/work") {
		t.Errorf("not the expected overlay in %q", out)
	}
	if dir := filepath.Dir(b.Instance.(*instance).b.dir.Name()); strings.Contains(out, dir) || strings.Contains(out, filepath.Dir(dir)) {
		t.Errorf("%s of the host is seen: %q", dir, out)
	}
}

func TestWhatASandboxMayNotDo(t *testing.T) {
	t.Parallel()
	b := newBox(t, nil)
	for _, c := range []struct{ what, script string }{
		{"mount", "mount -t tmpfs none /mnt 2>/dev/null || mount -t tmpfs none /tmp"},
		{"enter namespaces of its own", "unshare -m true"},
		{"see PID 1's descriptors", "ls /proc/1/fd/"},
		{"see PID 1's environment", "cat /proc/1/environ | grep ."},
		{"read PID 1's memory", "dd if=/proc/1/mem bs=1 count=1 skip=4194304"},
		{"read PID 1's memory map", "cat /proc/1/maps | grep ."},
		{"see PID 1's binary", "ls -l /proc/1/exe | grep -- '->'"},
		{"see PID 1's root", "ls /proc/1/root/"},
		{"write kernel settings", "echo 1 >/proc/sys/kernel/panic"},
		{"lift its own limits", "echo 1000000 >/proc/sys/user/max_inotify_instances"},
		{"write any setting", "attack settings"},
		{"have more watches than others can spare", "[ $(cat /proc/sys/user/max_inotify_watches) -gt 65536 ]"},
		{"trigger sysrq", "echo h >/proc/sysrq-trigger"},
		{"make device nodes", "mknod /tmp/sda b 8 0"},
		{"write to the shared /dev", "touch /dev/x"},
		{"make the shared /dev writable", "attack dev"},
		{"open a device node of the image", "head -c1 /zero"},
		{"set limits of PID 1", "attack prlimit"},
		{"take all inotify instances", "attack inotify"},
		{"take all terminals", "attack pty"},
		{"put a filter on a socket", "attack socketfilter"},
		{"filter its own system calls", "attack seccomp"},
		{"have sockets of other families", "attack families"},
		{"have sockets of other protocols", "attack protocols"},
		{"change a terminal's line discipline", "attack ldisc"},
		{"have a table of descriptors of the processor", "attack ldt"},
		{"trace PID 1", "attack trace"},
		{"signal PID 1's threads", "attack signals"},
		{"make a file that cannot be removed", "attack immutable"},
		{"freeze a file system", "attack freeze"},
		{"take rings of the machine's number of them", "attack aio"},
		{"fill the buffers of sockets beyond its limit", "attack tcp"},
		{"fill them with datagrams", "attack udp"},
		{"change the network", "ip link set lo down || ip link add x type bridge"},
		{"set the clock", "date -s 2020-01-01; date +%Y | grep 2020"},
		{"delay PID 1's timers", "echo 10000000000 >/proc/1/timerslack_ns"},
		{"have a say in what others may run", "[ $((0x$(grep CapBnd /proc/self/status | cut -f2) >> 23 & 1)) = 1 ]"},
		{"set limits of others", "echo 1000 >/proc/1/oom_score_adj"},
		{"write sysfs", "echo 1 >/sys/kernel/mm/ksm/run"},
		{"read the kernel's memory", "dd if=/proc/kcore bs=1 count=1"},
	} {
		if out, code := b.sh(c.script); code == 0 {
			t.Errorf("root in a sandbox can %s: %q", c.what, out)
		}
	}
	// Nothing from inside ends PID 1.
	for _, sig := range []string{"TERM", "KILL", "SEGV", "ABRT", "QUIT", "INT", "HUP", "BUS", "FPE", "STOP", "USR1", "PIPE", "ALRM"} {
		b.sh("kill -" + sig + " 1")
	}
	if out, code := b.sh("echo alive"); out != "alive" || code != 0 {
		t.Errorf("after signals to PID 1: %q, %d", out, code)
	}
	select {
	case <-b.Instance.Done():
		t.Error("PID 1 died")
	default:
	}
}

// What the kernel counts by user is counted for the sandbox's own, and for nobody else.
func TestSandboxesHaveAnAccountEach(t *testing.T) {
	t.Parallel()
	b := newBox(t, nil)
	pending := func() int {
		status, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Fatal(err)
		}
		_, line, _ := strings.Cut(string(status), "\nSigQ:")
		var n, limit int
		if _, err := fmt.Sscanf(line, "%d/%d", &n, &limit); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := pending()
	out, _ := b.sh(": >/tmp/n; attack timers >/tmp/n & until grep . /tmp/n; do sleep 0.01; done")
	if out != "3000" {
		t.Fatalf("%q timers", out)
	}
	if after := pending(); after > before+1000 {
		t.Errorf("signals of the node's root: %d before, %d with the timers of a sandbox", before, after)
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", b.Instance.(*instance).handle.PID))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	owner, err := unix.IoctlGetUint32(int(ns.Fd()), unix.NS_GET_OWNER_UID)
	if err != nil || owner != b.Instance.(*instance).handle.FirstID {
		t.Errorf("the user namespace is of user %d, %v; want %d", owner, err, b.Instance.(*instance).handle.FirstID)
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	b := newBox(t, func(s *backend.Spec) {
		s.Sandbox.MemoryBytes, s.Sandbox.PIDs, s.Sandbox.CPUMillis = 64<<20, 40, 200
	})
	if out, code := b.sh("dd if=/dev/zero bs=200M count=1 2>/dev/null | wc -c"); strings.HasSuffix(out, "209715200") {
		t.Errorf("200 MiB fit into 64: %q, %d", out, code)
	}
	u, err := b.Usage(t.Context())
	if err != nil || u.OOMKills == 0 || u.PeakMemoryBytes > 64<<20 || u.PeakMemoryBytes < 32<<20 {
		t.Errorf("usage after an OOM kill: %+v, %v", u, err)
	}
	if out, _ := b.sh("echo alive"); out != "alive" {
		t.Errorf("after an OOM kill: %q", out)
	}
	if out, _ := b.sh("n=0; while [ $n -lt 60 ]; do sleep 5 & n=$((n+1)); done 2>&1 | grep -ci 'fork'; true"); out == "0" {
		t.Errorf("60 processes fit into 40: %q", out)
	}
	if out, _ := b.run(&msg.StartRequest{Cmd: "killall", Args: []string{"sleep"}}); out == "never" {
		t.Error(out)
	}
	before, err := b.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	b.run(&msg.StartRequest{Cmd: "sh", Args: []string{"-c", "while :; do :; done"}, TimeoutMs: 2000})
	took := time.Since(start).Seconds()
	after, err := b.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if share := (after.CPUSeconds - before.CPUSeconds) / took; share > 0.5 {
		t.Errorf("a busy loop limited to 0.2 cores got %.2f", share)
	}
}

func TestEndOfPID1IsNoticed(t *testing.T) {
	t.Parallel()
	b := newBox(t, nil)
	if err := b.Instance.(*instance).kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-b.Instance.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("not noticed")
	}
}

func TestScratchImage(t *testing.T) {
	t.Parallel()
	// An image without anything but one static program, and without any directory.
	n := newNode(t)
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "echo"), data, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.erofs", filepath.Join(dir, "x.erofs"), root).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	fd, err := image.Mount(t.Context(), image.LayerFiles{Meta: filepath.Join(dir, "x.erofs")})
	if err != nil {
		t.Fatal(err)
	}
	n.layers.fd = fd
	b := n.open(t)
	defer b.Close()
	id := v1.SandboxID("testab", 1, 1)
	i, err := b.Create(t.Context(), spec(id), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.Delete(context.Background(), id); err != nil {
			t.Error(err)
		}
	}()
	conn, err := i.DialGuest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c, err := aether.NewClient(t.Context(), conn, aether.ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	bx := &box{t, c, i}
	if out, code := bx.run(&msg.StartRequest{Cmd: "/echo", Args: []string{"hello"}}); out != "hello" || code != 0 {
		t.Errorf("%q, %d", out, code)
	}
	if _, code := bx.run(&msg.StartRequest{Cmd: "sh"}); code != 127 {
		t.Errorf("a shell that is not there: %d", code)
	}
	var s msg.SessionInfo
	if err := c.Call(t.Context(), "", "session.open", &msg.SessionOpenRequest{}, &s); errs.Of(err).Class() != errs.Unsupported {
		t.Errorf("a session without a shell: %v", err)
	}
}

// When the file system of the writable layers has failed, sandboxes can still be removed.
func TestFailedFileSystem(t *testing.T) {
	n := newNode(t)
	b := n.open(t)
	defer b.Close()
	i, err := b.Create(t.Context(), spec("sfailed"), func(string, time.Duration) {})
	if err != nil {
		t.Fatal(err)
	}
	remount := func(flags uintptr) {
		t.Helper()
		if err := unix.Mount("", n.writable, "", unix.MS_REMOUNT|flags, ""); err != nil {
			t.Fatal(err)
		}
	}
	remount(unix.MS_RDONLY)
	defer remount(0)
	if _, err := b.Create(t.Context(), spec("sother"), func(string, time.Duration) {}); !errors.Is(err, errs.BackendUnusable) {
		t.Errorf("a create: %v", err)
	}
	if err := b.Delete(t.Context(), "sfailed"); err != nil {
		t.Errorf("a removal: %v", err)
	}
	<-i.Done()
	if left, err := b.Audit(t.Context()); err != nil || len(left) != 1 || left[0].Kind != "directory" {
		t.Errorf("left: %v, %v", left, err)
	}
	remount(0)
	if err := b.Delete(t.Context(), "sfailed"); err != nil { // as the next start does, which finds the directory
		t.Error(err)
	}
	if left, err := b.Audit(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Without a guest nothing is installed, and what another process made can be removed.
func TestRemovalNeedsNoGuest(t *testing.T) {
	n := newNode(t)
	maker := n.open(t)
	i, err := maker.Create(t.Context(), spec("snoguest"), func(string, time.Duration) {})
	if err != nil {
		t.Fatal(err)
	}
	installed := filepath.Join(n.dir, "dsec-guest")
	if err := os.Remove(installed); err != nil {
		t.Fatal(err)
	}
	b, err := New(Config{Dir: n.dir, Writable: n.writable, CgroupRoot: "/sys/fs/cgroup", CgroupName: n.group, FirstID: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if _, err := b.Create(t.Context(), spec("sother"), func(string, time.Duration) {}); !errors.Is(err, errs.BackendUnusable) {
		t.Errorf("a create: %v", err)
	}
	if err := b.Check(t.Context()); !errors.Is(err, errs.BackendUnusable) {
		t.Errorf("a check: %v", err)
	}
	if ids, err := b.List(t.Context()); err != nil || len(ids) != 1 {
		t.Errorf("%v, %v", ids, err)
	}
	if err := b.Delete(t.Context(), "snoguest"); err != nil {
		t.Fatal(err)
	}
	<-i.Done()
	if left, err := b.Audit(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := os.Lstat(installed); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the guest was installed: %v", err)
	}
	if err := maker.Close(); err != nil {
		t.Error(err)
	}
}
