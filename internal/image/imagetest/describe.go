package imagetest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"
)

// Describe lists everything below root, one line per entry in walk order: path,
// type, permissions, owner, times, device, link count, other names, xattrs, and
// the hash of the content. It opens directory by directory, so paths of any
// length work. Sizes of directories are not compared; those of files are.
func Describe(root string) ([]string, error) {
	fd, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", root, err)
	}
	return DescribeFD(fd)
}

// DescribeFD is Describe of the directory (or detached mount) fd, which it closes.
func DescribeFD(fd int) ([]string, error) {
	defer unix.Close(fd)
	// A mount's descriptor is O_PATH; open its root for reading.
	fd, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open root: %w", err)
	}
	w := walker{buf: make([]byte, 1<<20), first: map[[2]uint64]string{}}
	err = w.dir(os.NewFile(uintptr(fd), "."), ".")
	return w.lines, err
}

type walker struct {
	lines []string
	buf   []byte
	first map[[2]uint64]string // (dev, ino) to its first path
}

func (w *walker) dir(d *os.File, path string) error {
	defer d.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(d.Fd()), &st); err != nil {
		return fmt.Errorf("stat %s: %w", path, err)
	}
	if err := w.add(path, &st, int(d.Fd()), ""); err != nil {
		return err
	}
	names, err := d.Readdirnames(-1)
	if err != nil {
		return fmt.Errorf("list %s: %w", path, err)
	}
	sort.Strings(names)
	for _, name := range names {
		if err := w.entry(int(d.Fd()), name, path+"/"+name); err != nil {
			return err
		}
	}
	return nil
}

func (w *walker) entry(dir int, name, path string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("stat %s: %w", path, err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", path, err)
		}
		return w.dir(os.NewFile(uintptr(fd), name), path)
	case unix.S_IFREG:
		fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", path, err)
		}
		f := os.NewFile(uintptr(fd), name)
		defer f.Close()
		sum, err := w.hash(f, st.Size)
		if err != nil {
			return fmt.Errorf("read %s: %w", path, err)
		}
		return w.add(path, &st, fd, fmt.Sprintf("hash=%x", sum))
	case unix.S_IFLNK:
		buf := make([]byte, 8192)
		n, err := unix.Readlinkat(dir, name, buf)
		if err != nil {
			return fmt.Errorf("read link %s: %w", path, err)
		}
		return w.addAt(dir, name, path, &st, fmt.Sprintf("to=%q", buf[:n]))
	default:
		return w.addAt(dir, name, path, &st, fmt.Sprintf("rdev=%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	}
}

// hash sums up a file's blocks that are not all zeros, with their offsets, so that
// huge holes need not be read.
func (w *walker) hash(f *os.File, size int64) (uint64, error) {
	const block = 4096
	h := xxhash.New()
	zero := make([]byte, block)
	for off := int64(0); off < size; {
		if size > 1<<30 {
			next, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
			if errors.Is(err, unix.ENXIO) {
				break
			}
			if err != nil {
				return 0, err
			}
			off = next &^ (block - 1)
		}
		n, err := f.ReadAt(w.buf[:min(int64(len(w.buf)), size-off)], off)
		if err != nil && err != io.EOF {
			return 0, err
		}
		if n == 0 {
			return 0, io.ErrUnexpectedEOF
		}
		for p := w.buf[:n]; len(p) > 0; {
			b := p[:min(block, len(p))]
			if !bytes.Equal(b, zero[:len(b)]) {
				fmt.Fprint(h, off)
				h.Write(b)
			}
			off += int64(len(b))
			p = p[len(b):]
		}
	}
	return h.Sum64(), nil
}

func (w *walker) addAt(dir int, name, path string, st *unix.Stat_t, more string) error {
	fd, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	return w.add(path, st, -1, more, fmt.Sprintf("/proc/self/fd/%d/%s", dir, name))
}

func (w *walker) add(path string, st *unix.Stat_t, fd int, more string, links ...string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%q mode=%o uid=%d gid=%d mtime=%d.%09d nlink=%d", path, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec, st.Nlink)
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if first, ok := w.first[[2]uint64{st.Dev, st.Ino}]; ok {
			fmt.Fprintf(&b, " same=%q", first)
		} else {
			w.first[[2]uint64{st.Dev, st.Ino}] = path
		}
		fmt.Fprintf(&b, " size=%d", st.Size)
	}
	xattrs, err := xattrsOf(fd, links)
	if err != nil {
		return fmt.Errorf("xattrs of %s: %w", path, err)
	}
	b.WriteString(xattrs + " " + more)
	w.lines = append(w.lines, b.String())
	return nil
}

func xattrsOf(fd int, links []string) (string, error) {
	list := func(buf []byte) (int, error) { return unix.Flistxattr(fd, buf) }
	get := func(name string, buf []byte) (int, error) { return unix.Fgetxattr(fd, name, buf) }
	if len(links) > 0 {
		list = func(buf []byte) (int, error) { return unix.Llistxattr(links[0], buf) }
		get = func(name string, buf []byte) (int, error) { return unix.Lgetxattr(links[0], name, buf) }
	}
	buf := make([]byte, 64<<10)
	n, err := list(buf)
	if err != nil || n == 0 {
		return "", err
	}
	names := strings.Split(strings.TrimRight(string(buf[:n]), "\x00"), "\x00")
	sort.Strings(names)
	var b strings.Builder
	for _, name := range names {
		n, err := get(name, buf)
		if err != nil {
			return "", fmt.Errorf("get %s: %w", name, err)
		}
		fmt.Fprintf(&b, " %s=%x", name, buf[:n])
	}
	return b.String(), nil
}

// Diff says where two descriptions differ, or "" if they do not.
func Diff(want, got []string) string {
	for i := 0; i < len(want) || i < len(got); i++ {
		w, g := "(nothing)", "(nothing)"
		if i < len(want) {
			w = want[i]
		}
		if i < len(got) {
			g = got[i]
		}
		if w != g {
			return fmt.Sprintf("entry %d of %d/%d:\nwant %s\n got %s", i, len(want), len(got), w, g)
		}
	}
	return ""
}
