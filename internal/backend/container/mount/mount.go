package mount

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"dsec/internal/image"
)

// Idmapped clones the detached mount layer so that its owners appear shifted by the
// user namespace's map. Page cache stays shared with every other clone.
func Idmapped(layer, userns int) (int, error) {
	fd, err := image.Clone(layer)
	if err != nil {
		return -1, err
	}
	attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns)}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, attr); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("map ids of mount: %w", err)
	}
	return fd, nil
}

// Sys makes a sysfs, detached, that shows the caller's network namespace and is fit for
// sandboxes to look at.
func Sys() (int, error) {
	fs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen sysfs: %w", err)
	}
	defer unix.Close(fs)
	return create(fs, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
}

// Detached opens a directory through a mount of its own, of which it is the root: what is
// opened below it has paths that begin there. An overlay shows the paths of its upper and
// work directories to all who see the mount, and those of the host are nobody's business.
func Detached(dir string) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("clone the mount of %s: %w", dir, err)
	}
	return fd, nil
}

// Overlay mounts the layers (highest first) with a writable upper. Upper and work are
// plain directories whose owner is the root of the sandbox's id range: an idmapped
// upper would make the overlay read-only (kernel 6.18).
//
// The mount is volatile (fsync of the sandbox costs nothing): an upper does not
// outlive the sandbox's processes, and those do not outlive a crash of the machine.
// redirect_dir lets programs rename directories that come from a layer. metacopy, which
// a host may have on by default, would leave contents of changed files in the layers below, where no
// snapshot finds them.
func Overlay(layers []int, upper, work int) (int, error) {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen overlay: %w", err)
	}
	defer unix.Close(fs)
	for _, l := range layers {
		if err := unix.FsconfigSetFd(fs, "lowerdir+", l); err != nil {
			return -1, fmt.Errorf("overlay lower: %w%s", err, messages(fs))
		}
	}
	if err := unix.FsconfigSetFd(fs, "upperdir", upper); err != nil {
		return -1, fmt.Errorf("overlay upper: %w%s", err, messages(fs))
	}
	if err := unix.FsconfigSetFd(fs, "workdir", work); err != nil {
		return -1, fmt.Errorf("overlay work: %w%s", err, messages(fs))
	}
	if err := unix.FsconfigSetFlag(fs, "volatile"); err != nil {
		return -1, fmt.Errorf("overlay volatile: %w%s", err, messages(fs))
	}
	for _, o := range [][2]string{{"redirect_dir", "on"}, {"metacopy", "off"}} {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return -1, fmt.Errorf("overlay %s: %w%s", o[0], err, messages(fs))
		}
	}
	// Device nodes of an image or of the upper must open nothing: the node's disks are theirs
	// by number, and the layers' own nodev does not carry through an overlay.
	return create(fs, unix.MOUNT_ATTR_NODEV)
}

// create finishes a file system context and mounts it, detached.
func create(fs, attrs int) (int, error) {
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("create file system: %w%s", err, messages(fs))
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return -1, fmt.Errorf("fsmount: %w%s", err, messages(fs))
	}
	return fd, nil
}

// messages reads what the kernel logged to the context, for the error text.
func messages(fs int) string {
	var out string
	buf := make([]byte, 512)
	for {
		n, err := unix.Read(fs, buf)
		if err != nil || n == 0 {
			return out
		}
		out += ": " + string(buf[:n])
	}
}

// sealed makes the file system of a mount read-only, not only the mount: whoever may clone a
// mount may take such a flag of the clone away.
func sealed(fd int) error {
	fs, err := unix.Fspick(fd, "", unix.FSPICK_CLOEXEC|unix.FSPICK_EMPTY_PATH)
	if err != nil {
		return fmt.Errorf("fspick: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetFlag(fs, "ro"); err != nil {
		return fmt.Errorf("make read-only: %w%s", err, messages(fs))
	}
	if err := unix.FsconfigReconfigure(fs); err != nil {
		return fmt.Errorf("make read-only: %w%s", err, messages(fs))
	}
	return unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
}

// devices of every sandbox's /dev.
var devices = []struct {
	name         string
	major, minor uint32
}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}

var devLinks = [][2]string{
	{"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"}, {"pts/ptmx", "ptmx"},
}

// Dev makes the /dev that all sandboxes share, each through its own read-only idmapped
// clone. Made by the host's root because a user namespace cannot make device nodes,
// and once, because ten files and bind mounts a sandbox are most of a create's cost.
func Dev() (int, error) {
	fd, err := Tmpfs("dsec-dev", 64<<10, 64, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, err
	}
	fill := func() error {
		for _, d := range devices {
			if err := unix.Mknodat(fd, d.name, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
				return fmt.Errorf("make device %s: %w", d.name, err)
			}
			if err := unix.Fchmodat(fd, d.name, 0o666, 0); err != nil { // whatever the umask
				return err
			}
		}
		for _, l := range devLinks {
			if err := unix.Symlinkat(l[0], fd, l[1]); err != nil {
				return fmt.Errorf("link %s: %w", l[1], err)
			}
		}
		for _, d := range []string{"pts", "shm"} {
			if err := unix.Mkdirat(fd, d, 0o755); err != nil {
				return fmt.Errorf("make /dev/%s: %w", d, err)
			}
		}
		return sealed(fd)
	}
	if err := fill(); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// Tmpfs makes a file system in memory, detached, for the host's root to make files in.
func Tmpfs(source string, size, inodes int64, attrs int) (int, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("fsopen tmpfs: %w", err)
	}
	defer unix.Close(fs)
	for k, v := range map[string]string{"mode": "0755", "size": strconv.FormatInt(size, 10), "nr_inodes": strconv.FormatInt(inodes, 10), "source": source} {
		if err := unix.FsconfigSetString(fs, k, v); err != nil {
			return -1, fmt.Errorf("tmpfs %s: %w%s", k, err, messages(fs))
		}
	}
	return create(fs, attrs)
}
