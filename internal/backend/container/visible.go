package container

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"dsec/internal/backend/container/mount"
)

// visible makes files that show a sandbox's limits in the place of the machine's processors and memory, for
// programs that size themselves by these. They are shared by all sandboxes with the same limits: each gets a mount
// of each file, over that of /proc or /sys. What they say never changes.
//
// They belong to the host's root, whom no sandbox knows: there nobody can write to them, however it is mounted.
type visible struct {
	dir     int // a tmpfs, detached
	machine int // processors
	cpuinfo []byte
	meminfo []byte

	mu   sync.Mutex
	made map[string]bool
}

// visibleMost bounds how many files are kept for sandboxes to come; those that are mounted stay as long as that.
const visibleMost = 256

// view is one file, to be mounted at a path of the sandbox.
type view struct {
	path string
	fd   int
}

func newVisible() (*visible, error) {
	v := &visible{dir: -1, made: map[string]bool{}}
	for path, to := range map[string]*[]byte{"/proc/cpuinfo": &v.cpuinfo, "/proc/meminfo": &v.meminfo} {
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		*to = b
	}
	v.machine = bytes.Count(v.cpuinfo, []byte("processor\t"))
	var err error
	v.dir, err = mount.Tmpfs("dsec-visible", 4<<20, 2*visibleMost, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	return v, err
}

func (v *visible) close() {
	if v.dir >= 0 {
		unix.Close(v.dir)
		v.dir = -1
	}
}

// cpus is how many processors a limit is, as programs are told; 0: all that there are.
func (v *visible) cpus(millis int64) int {
	if n := (millis + 999) / 1000; millis > 0 && n < int64(v.machine) {
		return int(n)
	}
	return 0
}

// views returns a mount of each file for a sandbox with such limits; 0 is none.
func (v *visible) views(cpus int, memory int64) (all []view, err error) {
	defer func() {
		if err != nil {
			closeViews(all)
			all = nil
		}
	}()
	add := func(path, name string, content func() []byte) error {
		fd, err := v.open(name, content)
		if err != nil {
			return fmt.Errorf("make a %s: %w", path, err)
		}
		all = append(all, view{path, fd})
		return nil
	}
	if memory > 0 {
		if err := add("proc/meminfo", "meminfo-"+strconv.FormatInt(memory, 10), func() []byte { return memInfo(v.meminfo, memory) }); err != nil {
			return all, err
		}
	}
	if cpus > 0 {
		n := strconv.Itoa(cpus)
		if err := add("proc/cpuinfo", "cpuinfo-"+n, func() []byte { return cpuInfo(v.cpuinfo, cpus) }); err != nil {
			return all, err
		}
		if err := add("sys/devices/system/cpu/online", "online-"+n, func() []byte { return cpuList(cpus) }); err != nil {
			return all, err
		}
	}
	return all, nil
}

func closeViews(all []view) {
	for _, v := range all {
		unix.Close(v.fd)
	}
}

// open returns a detached read-only mount of a file, which it makes if need be.
func (v *visible) open(name string, content func() []byte) (int, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.made[name] {
		for old := range v.made {
			if len(v.made) < visibleMost {
				break
			}
			if err := unix.Unlinkat(v.dir, old, 0); err != nil {
				return -1, err
			}
			delete(v.made, old)
		}
		if err := writeAt(v.dir, name, content()); err != nil {
			return -1, err
		}
		v.made[name] = true
	}
	fd, err := unix.OpenTree(v.dir, name, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, err
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOEXEC}); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func writeAt(dir int, name string, content []byte) error {
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	n, err := unix.Write(fd, content)
	if err == nil && n < len(content) {
		err = unix.ENOSPC
	}
	return errors.Join(err, unix.Fchmod(fd, 0o444)) // whatever the umask
}

// cpuInfo is the first so many processors of a /proc/cpuinfo.
func cpuInfo(machine []byte, cpus int) []byte {
	var out []byte
	for block := range bytes.SplitAfterSeq(machine, []byte("\n\n")) {
		if cpus == 0 {
			break
		}
		out = append(out, block...)
		cpus--
	}
	return out
}

// cpuList is how /sys names the first so many processors.
func cpuList(cpus int) []byte {
	if cpus == 1 {
		return []byte("0\n")
	}
	return []byte("0-" + strconv.Itoa(cpus-1) + "\n")
}

// memInfo is a /proc/meminfo of a machine with so much memory, none of it in use: what is in use changes, and the
// file does not. It has the lines of the machine's.
func memInfo(machine []byte, memory int64) []byte {
	var out bytes.Buffer
	for line := range strings.Lines(string(machine)) {
		key, _, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		switch key {
		case "MemTotal", "MemFree", "MemAvailable", "CommitLimit":
			fmt.Fprintf(&out, "%-16s%8d kB\n", key+":", memory>>10)
		case "VmallocTotal", "Hugepagesize":
			out.WriteString(line)
		default:
			unit := ""
			if strings.HasSuffix(strings.TrimSpace(line), "kB") {
				unit = " kB"
			}
			fmt.Fprintf(&out, "%-16s%8d%s\n", key+":", 0, unit)
		}
	}
	return out.Bytes()
}
