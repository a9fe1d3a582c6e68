package boot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"dsec/aether/msg"
)

// maxConfig bounds the message from the edge.
const maxConfig = 1 << 20

// Container turns this process into PID 1 of a container, as the edge says over the
// socket channel, and tells the edge the outcome. Call it before anything else runs.
// memory is the descriptor of the file that counts what the memory limit kills.
func Container(channel int) (cfg *msg.BootConfig, memory int, err error) {
	cfg, memory, err = container(channel)
	if err != nil {
		_, werr := unix.Write(channel, append([]byte{1}, err.Error()...))
		return nil, 0, errors.Join(err, werr)
	}
	if _, err := unix.Write(channel, []byte{0}); err != nil {
		return nil, 0, fmt.Errorf("tell the edge: %w", err)
	}
	return cfg, memory, nil
}

func container(channel int) (*msg.BootConfig, int, error) {
	cfg, given, err := receive(channel)
	if err != nil {
		return nil, 0, fmt.Errorf("receive config: %w", err)
	}
	if err := mounts(cfg, given); err != nil {
		return nil, 0, err
	}
	if err := unix.Sethostname([]byte(cfg.Hostname)); err != nil {
		return nil, 0, fmt.Errorf("set hostname: %w", err)
	}
	unix.Umask(0o022)
	if err := seccomp(cfg.Seccomp); err != nil {
		return nil, 0, fmt.Errorf("install seccomp filter: %w", err)
	}
	return cfg, given.memory, nil
}

// given are the detached mounts that the edge makes, the control group's file, open for reading, and
// mounts of single files.
type given struct {
	root, dev, sys, memory int
	views                  []int
}

// maxViews bounds the last.
const maxViews = 16

// receive reads the length-prefixed config and its descriptors.
func receive(channel int) (cfg *msg.BootConfig, m given, err error) {
	head := make([]byte, 4)
	oob := make([]byte, unix.CmsgSpace((4+maxViews)*4))
	n, oobn, _, _, err := unix.Recvmsg(channel, head, oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_WAITALL)
	if err != nil {
		return nil, m, err
	}
	size := int(binary.BigEndian.Uint32(head))
	if n != len(head) || size > maxConfig {
		return nil, m, fmt.Errorf("bad length (%d bytes, size %d)", n, size)
	}
	cmsgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(cmsgs) != 1 {
		return nil, m, fmt.Errorf("no descriptors came: %w", err)
	}
	fds, err := unix.ParseUnixRights(&cmsgs[0])
	if err != nil || len(fds) < 4 {
		return nil, m, fmt.Errorf("want 4 descriptors at least, got %d: %w", len(fds), err)
	}
	body := make([]byte, size)
	for got := 0; got < size; {
		n, err := unix.Read(channel, body[got:])
		if err != nil {
			return nil, m, err
		}
		if n == 0 {
			return nil, m, errors.New("the edge went away")
		}
		got += n
	}
	cfg = &msg.BootConfig{}
	if err := cfg.ParseWire(body); err != nil {
		return nil, m, err
	}
	m = given{root: fds[0], dev: fds[1], sys: fds[2], memory: fds[3], views: fds[4:]}
	if len(m.views) != len(cfg.Views) {
		return nil, m, fmt.Errorf("want mounts for %q, got %d", cfg.Views, len(m.views))
	}
	return cfg, m, nil
}

// mounts attaches the root, fills in what belongs to this sandbox alone, and enters it.
func mounts(cfg *msg.BootConfig, g given) error {
	defer unix.Close(g.root)
	defer unix.Close(g.dev)
	defer unix.Close(g.sys)
	root := g.root
	// /proc must be made while the stage's is still in sight: the kernel refuses a user
	// namespace a fresh one that shows more than it could see before.
	proc, err := filesystem("proc", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(proc)
	pts, err := filesystem("devpts", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC, "mode", "0620", "ptmxmode", "0666", "gid", "5", "max", "256")
	if err != nil {
		return err
	}
	defer unix.Close(pts)
	shm, err := filesystem("tmpfs", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV, "mode", "1777", "size", strconv.FormatUint(cfg.ShmBytes, 10))
	if err != nil {
		return err
	}
	defer unix.Close(shm)

	// On top of the stage that the clone started from, of which nothing can be reached then:
	// even the way up from the root of this namespace ends here.
	if err := attach(root, unix.AT_FDCWD, "/"); err != nil {
		return fmt.Errorf("attach root: %w", err)
	}
	if err := limitUser(proc); err != nil {
		return err
	}
	for _, m := range []struct {
		fd   int
		path string
	}{{proc, "proc"}, {g.sys, "sys"}, {g.dev, "dev"}, {pts, "dev/pts"}, {shm, "dev/shm"}} {
		if err := unix.Mkdirat(root, m.path, 0o755); err != nil && err != unix.EEXIST && err != unix.EROFS {
			return fmt.Errorf("make /%s: %w", m.path, err)
		}
		if err := attach(m.fd, root, m.path); err != nil {
			return fmt.Errorf("attach /%s: %w", m.path, err)
		}
	}
	for i, fd := range g.views {
		if err := attach(fd, root, cfg.Views[i]); err != nil {
			return fmt.Errorf("attach /%s: %w", cfg.Views[i], err)
		}
		unix.Close(fd)
	}
	for _, name := range readOnly {
		if err := protect(root, "proc/"+name); err != nil {
			return fmt.Errorf("make /proc/%s read-only: %w", name, err)
		}
	}
	if err := unix.Fchdir(root); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("enter root: %w", err)
	}
	return unix.Chdir("/")
}

// readOnly parts of /proc. In sys, root could lift the limits of its own user namespace; to
// files of pressure (CONFIG_PSI) anybody could write triggers, which the kernel goes through
// in a thread of its own and counts for nobody.
var readOnly = []string{"sys", "pressure"}

// protect puts a read-only mount of it over a directory, if there is one.
func protect(dir int, path string) error {
	fd, err := unix.OpenTree(dir, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return err
	}
	return attach(fd, dir, path)
}

// userLimits are of the sandbox's user namespace, as sysctl has them below user. Those of the
// node are for all sandboxes together.
var userLimits = []struct{ name, most string }{{"max_inotify_instances", "256"}, {"max_inotify_watches", "65536"}}

func limitUser(proc int) error {
	for _, l := range userLimits {
		fd, err := unix.Openat(proc, "sys/user/"+l.name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open user.%s: %w", l.name, err)
		}
		_, err = unix.Write(fd, []byte(l.most))
		unix.Close(fd)
		if err != nil {
			return fmt.Errorf("set user.%s: %w", l.name, err)
		}
	}
	return nil
}

func attach(fd, dir int, path string) error {
	return unix.MoveMount(fd, "", dir, path, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// filesystem mounts a new instance, detached.
func filesystem(kind string, attrs int, options ...string) (int, error) {
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen %s: %w", kind, err)
	}
	defer unix.Close(fs)
	for i := 0; i < len(options); i += 2 {
		if err := unix.FsconfigSetString(fs, options[i], options[i+1]); err != nil {
			return -1, fmt.Errorf("%s option %s: %w", kind, options[i], err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("create %s: %w", kind, err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return -1, fmt.Errorf("mount %s: %w", kind, err)
	}
	return fd, nil
}

// seccomp installs the filter for all threads and all processes to come. no_new_privs
// is not set: setuid programs such as sudo must work, and PID 1 has CAP_SYS_ADMIN in
// its user namespace.
func seccomp(program []byte) error {
	if len(program) == 0 {
		return nil
	}
	if len(program)%unix.SizeofSockFilter != 0 {
		return errors.New("not a BPF program")
	}
	prog := unix.SockFprog{Len: uint16(len(program) / unix.SizeofSockFilter), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0]))}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(program)
	if errno != 0 {
		return errno
	}
	return nil
}
